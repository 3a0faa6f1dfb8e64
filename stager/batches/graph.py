"""What a batch inside a CUDA graph is made from, see :class:`stager.cuda.GraphBatch`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stager.batches.gathers import OnGpu
from stager.errors import SampleError
from stager.samples.order import Order
from stager.samples.sampling import WeightedOrder
from stager.samples.schedule import Schedule

if TYPE_CHECKING:
    from stager.batches.served import Served


@dataclass(frozen=True)
class GraphSource:
    """Attributes
    ----------
    rows : device array
    gather : WindowGather
    batch_size, n_batches : int
    stride, offset : int
        Positions from one batch to the next, and before the first of one.
    window_nbytes : int
        Bytes of the rows that a window spans.
    order : callable
        The order of an epoch.
    check : callable
        Raises unless there is such a batch of an epoch.
    """

    rows: Any
    gather: Any
    batch_size: int
    n_batches: int
    stride: int
    offset: int
    window_nbytes: int
    order: Callable[[int], Order | WeightedOrder]
    check: Callable[[int, int], None]


def graph_source(st: Served, gather: Any, schedule: Callable[[int], Schedule]) -> GraphSource:
    """See :meth:`stager.Stager.graph_source`."""
    if not isinstance(gather, OnGpu):
        raise SampleError("a graph's batch needs rows on a GPU; these are on the host, use batches()")
    first = schedule(0)
    if gather.of_panel or first.instants is not None:
        what = "samples of a panel" if gather.of_panel else "batches of whole decision instants (shuffle='time')"
        raise SampleError(f"{what} are not served inside a graph; use batches()")
    if st.last == "keep" and st.n_samples % st.batch_size:
        raise SampleError(
            f"{st.n_samples:,} samples leave a shorter last batch of {st.n_samples % st.batch_size:,}, and a graph's "
            f"batches are all of one size; use last='drop' or 'pad'"
        )
    rows = st.resident.rows

    def check(epoch: int, batch: int) -> None:
        st.sample_id(epoch, batch, 0)

    return GraphSource(
        rows, gather.windows, st.batch_size, len(st), first.stride, first.shift, gather.windows.reach_nbytes,
        lambda epoch: schedule(epoch).order, check,
    )  # fmt: skip
