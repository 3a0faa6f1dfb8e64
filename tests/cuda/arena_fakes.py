"""CUDA as the arena sees it, without a GPU: made-up addresses and streams, calls that are counted and can fail."""

import contextlib
from collections import Counter
from unittest import mock

from cupy.cuda import UnownedMemory, runtime
from cupy.cuda.memory import OutOfMemoryError

from stager.cuda import arena_driver
from stager.cuda.arena import Arena

BASE = 0x7F00_0000_0000
OUTSIDE = 0x7E00_0000_0000
TOTAL = 8 << 30


class Slab(UnownedMemory):
    """Counts itself, so that tests see when it goes."""

    alive = 0

    def __init__(self, nbytes):
        super().__init__(BASE, nbytes, None, 0)
        Slab.alive += 1

    def __del__(self):
        Slab.alive -= 1


class Stream:
    """A stream that may capture."""

    def __init__(self, ptr=0, device_id=-1):
        self.ptr, self.device_id, self.is_capturing = ptr, device_id, False

    def begin_capture(self):
        self.is_capturing = True

    def end_capture(self):
        self.is_capturing = False
        return object()

    def __enter__(self):
        self.before, FakeDriver.current.now = FakeDriver.current.now, self

    def __exit__(self, *exception):
        FakeDriver.current.now = self.before


class FakeDriver:
    """Stands in for stager.cuda.arena_driver.Driver."""

    current = None

    def __init__(self):
        FakeDriver.current = self
        self.now = self.null = Stream()
        self.now_device = 0
        self.calls = Counter()
        self.fail_at = None  # number of the driver call that fails
        self.limit = TOTAL
        self.outside = {}  # address -> (bytes, stream, device)
        self.next = OUTSIDE
        self.freed_on = []
        self.filled = []
        self.ordered = []
        self.pools, self.n_pools = {}, 0

    def _call(self, name):
        self.calls[name] += 1
        self.calls["all"] += 1
        if self.fail_at is not None and self.calls["all"] == self.fail_at:
            self.fail_at = None
            raise runtime.CUDARuntimeError(2)

    def device(self):
        return self.now_device

    def stream(self):
        return self.now

    def lookup(self, stream, device):
        return lambda: self.now if self.now_device == device else None

    def memory(self):
        return self.limit - sum(entry[0] for entry in self.outside.copy().values()), TOTAL

    def slab(self, nbytes):
        if nbytes > self.limit:
            raise OutOfMemoryError(nbytes, 0)
        return Slab(nbytes)

    def fill(self, start, nbytes, stream):
        self._call("fill")
        self.filled.append((start, nbytes))

    def capturing(self, stream):
        return stream.is_capturing

    def order(self, before, after):
        self._call("order")
        self.ordered.append((before, after))

    def synchronize(self, stream=None):
        self._call("synchronize")

    def pool_create(self, device, keep_nbytes):
        self._call("pool_create")
        self.n_pools += 1
        handle = self.n_pools
        self.pools[handle] = (device, keep_nbytes)
        return handle

    def pool_malloc(self, nbytes, pool, stream):
        self._call("pool_malloc")
        assert not stream.is_capturing
        if nbytes > self.memory()[0]:
            raise runtime.CUDARuntimeError(2)
        start, self.next = self.next, self.next + nbytes
        self.outside[start] = (nbytes, stream, self.pools[pool][0])
        return start

    def pool_free(self, start, stream, device):
        self._call("pool_free")
        assert not stream.is_capturing
        _, of, where = self.outside.pop(start)
        assert (stream, device) == (of, where)
        self.freed_on.append(stream)

    def free_after_device(self, start, device):
        self._call("free_after_device")
        del self.outside[start]

    def pool_trim(self, pool):
        self._call("pool_trim")

    def pool_reserved(self, pool):
        return 0

    def pool_destroy(self, pool):
        self.calls["pool_destroy"] += 1
        del self.pools[pool]

    def out_of_memory(self, error):
        return error.status == 2

    def release_other_pools(self):
        self._call("release_other_pools")

    def other_pools(self):
        return {"cupy": 0}


@contextlib.contextmanager
def fake_cuda():
    driver = FakeDriver()
    with mock.patch.object(arena_driver, "Driver", return_value=driver):
        yield driver


def fake_arena(driver, capacity, **options):
    with mock.patch.object(arena_driver, "Driver", return_value=driver):
        return Arena(capacity, **options)
