"""The door in front of Arrow Flight, which itself takes messages of any size, from as many as come.

Connections are relayed to the server's own socket. On the way in, HTTP/2 frames are followed, not understood: a call
may send so many bytes at once, and then so many a second. Whoever sends more is cut off before the server holds it, and
so are those who are too many, too slow to begin, or, on a unix socket, another user.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stager.errors import ServiceError

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _RST_STREAM = 0x0, 0x3
_END_STREAM = 0x1
_MAX_FRAME_NBYTES = 1 << 20
_MAX_CALLS = 128
_BEGIN_SECONDS = 10.0
_END_SECONDS = 5.0
_CHUNK_NBYTES = 1 << 16

Note = Callable[[str, str], None]


class Frames:
    """Follows what a client sends over one connection.

    Parameters
    ----------
    burst_nbytes, nbytes_per_second : int
        What one call may send.
    """

    def __init__(self, burst_nbytes: int, nbytes_per_second: int) -> None:
        self._burst, self._rate = float(burst_nbytes), nbytes_per_second
        self._head, self._preface, self._skip = bytearray(), bytearray(), 0
        # By stream: what it may still send, and since when that is so.
        self._calls: dict[int, tuple[float, float]] = {}

    @property
    def begun(self) -> bool:
        """Whether the client has said what it speaks."""
        return len(self._preface) == len(_PREFACE)

    def feed(self, data: bytes) -> None:
        """Follow further bytes.

        Raises
        ------
        ServiceError
            If they are none of HTTP/2, or too many.
        """
        at = 0
        if not self.begun:
            at = len(_PREFACE) - len(self._preface)
            self._preface += data[:at]
            if not _PREFACE.startswith(self._preface):
                raise ServiceError("what was sent is not HTTP/2, which gRPC speaks")
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                continue
            step = 9 - len(self._head)
            self._head += data[at : at + step]
            at += step
            if len(self._head) == 9:
                self._frame(int.from_bytes(self._head[:3], "big"), self._head[3], self._head[4], self._head[5:])
                self._head.clear()

    def _frame(self, length: int, kind: int, flags: int, stream: bytes | bytearray) -> None:
        if length > _MAX_FRAME_NBYTES:
            raise ServiceError(f"a frame has {length:,} bytes; at most {_MAX_FRAME_NBYTES:,} are allowed")
        self._skip = length
        number = int.from_bytes(stream, "big") & 0x7FFFFFFF
        if kind == _RST_STREAM:
            self._calls.pop(number, None)
        elif number:
            self._charge(number, length if kind == _DATA else 0)
            if kind == _DATA and flags & _END_STREAM:
                self._calls.pop(number, None)

    def _charge(self, number: int, nbytes: int) -> None:
        now = time.monotonic()
        left, since = self._calls.get(number, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate) - nbytes
        if left < 0:
            raise ServiceError(
                f"a call sent more than {self._burst:,.0f} bytes at once, or {self._rate:,} a second after that"
            )
        self._calls[number] = left, now
        if len(self._calls) > _MAX_CALLS:
            raise ServiceError(f"more than {_MAX_CALLS} calls at a time over one connection")


class Gate:
    """Relays connections to a server's own socket, from a thread of its own.

    Parameters
    ----------
    outer : socket
        Bound, and listening from now on; closed with the gate.
    inner : Path
        The socket of the server.
    note : callable(reason, message)
        Told what was refused.
    tls : ssl.SSLContext, optional
    max_connections, burst_nbytes, nbytes_per_second : int
    """

    def __init__(
        self,
        outer: socket.socket,
        inner: Path,
        note: Note,
        *,
        tls: ssl.SSLContext | None = None,
        max_connections: int,
        burst_nbytes: int,
        nbytes_per_second: int,
    ) -> None:
        self._inner, self._note, self._max_connections = inner, note, max_connections
        self._limits = burst_nbytes, nbytes_per_second
        self._open: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stager-gate", daemon=True)
        self._thread.start()
        begun = asyncio.run_coroutine_threadsafe(self._begin(outer, tls), self._loop)
        self._server = begun.result()

    async def _begin(self, outer: socket.socket, tls: ssl.SSLContext | None) -> asyncio.Server:
        timeout = None if tls is None else _BEGIN_SECONDS
        if outer.family == socket.AF_UNIX:
            return await asyncio.start_unix_server(self._meet, sock=outer, limit=_CHUNK_NBYTES)
        return await asyncio.start_server(
            self._meet, sock=outer, ssl=tls, ssl_handshake_timeout=timeout, limit=_CHUNK_NBYTES
        )

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= self._max_connections:
            self._note("too many", f"more than {self._max_connections} connections at a time")
            writer.close()
            return
        self._open.add(task)
        try:
            if _is_this_user(writer.get_extra_info("socket")):
                await self._relay(reader, writer)
            else:
                self._note("another user", "a process of another user reached the socket")
        except (OSError, ssl.SSLError, asyncio.CancelledError):
            pass  # one of the two sides has gone, or the gate closes
        finally:
            self._open.discard(task)
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(self._inner, limit=_CHUNK_NBYTES)
        ways = [
            asyncio.create_task(self._inward(reader, inner_writer)),
            asyncio.create_task(_outward(inner_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            inner_writer.close()
            for way in ways:
                with contextlib.suppress(OSError, ssl.SSLError, asyncio.CancelledError):
                    await way

    async def _inward(self, reader: asyncio.StreamReader, inner: asyncio.StreamWriter) -> None:
        frames, begun = Frames(*self._limits), time.monotonic()
        try:
            while True:
                left = None if frames.begun else max(0.0, begun + _BEGIN_SECONDS - time.monotonic())
                data = await asyncio.wait_for(reader.read(_CHUNK_NBYTES), left)
                if not data:
                    return
                frames.feed(data)
                inner.write(data)
                await inner.drain()
        except TimeoutError:
            self._note("slow", f"a connection said nothing for {_BEGIN_SECONDS:.0f} s")
        except ServiceError as error:
            self._note("too much", str(error))

    def close(self) -> None:
        """Cut everybody off."""

        async def end() -> None:
            self._server.close()
            tasks = list(self._open)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        ended = asyncio.run_coroutine_threadsafe(end(), self._loop)
        with contextlib.suppress(TimeoutError):
            ended.result(_END_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _outward(inner: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await inner.read(_CHUNK_NBYTES):
        writer.write(data)
        await writer.drain()


def _is_this_user(peer: socket.socket) -> bool:
    """Whether the system says so, of a unix socket; root may do as it likes anyway."""
    if peer.family != socket.AF_UNIX:
        return True
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid in (0, os.geteuid())


def unix_socket(path: Path) -> socket.socket:
    """A socket at a path, of mode 0600. Nobody else may enter its directory, so nobody is faster than the mode."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(os.fspath(path))
        os.chmod(path, 0o600)
    except BaseException:
        made.close()
        raise
    return made
