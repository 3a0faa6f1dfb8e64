"""From samples back to symbols and instants."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stager.bars.clock import instant_text
from stager.batches.batch import About
from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.samples.index import SampleIndex
from stager.samples.panel_index import PanelIndex
from stager.samples.select import nanoseconds

_STAMP = pa.timestamp("ns", "UTC")


def locate(pack: Pack, index: SampleIndex, symbol: str, time: Any) -> int:
    """The sample of a symbol and a decision, see :meth:`stager.Stager.locate`."""
    decision = nanoseconds(time)
    symbols = index.symbols if isinstance(index, PanelIndex) else pack.symbols
    if symbol not in symbols:
        raise SampleError(f"the pack has no symbol {symbol!r}; it has {len(symbols):,}: {_some(symbols)}")
    # Symbols of a panel share its axis.
    number = 0 if isinstance(index, PanelIndex) else symbols.index(symbol)
    first = int(pack.first_rows[number])
    times = pack.times[first : first + int(pack.counts[number])]
    place = int(np.searchsorted(times, pack.interval.opened(np.array([decision])))[0])
    near = pack.interval.available(times[max(0, place - 1) : place + 1])
    if place == len(times) or near[-1] != decision:
        raise SampleError(
            f"{symbol} has no bar that closes at {instant_text(decision)}; next to it are "
            f"{', '.join(map(instant_text, near.tolist()))}. A decision is the close of its bar"
        )
    row = first + place
    order = index.spans_by_row
    span = int(order[np.searchsorted(index.span_rows, row, side="right", sorter=order) - 1])
    sample = int(index.span_ids[span]) + row - int(index.span_rows[span])
    if not int(index.span_ids[span]) <= sample < int(index.span_ids[span + 1]):
        raise SampleError(
            f"the bar of {symbol} that closes at {instant_text(decision)} ends no sample here; the plan tells "
            f"the reasons"
        )
    return sample


def newest(pack: Pack, index: SampleIndex, target: Any) -> SampleIndex:
    """The last sample of each symbol that has one, in the order of symbols."""
    if target is not None:
        raise SampleError(
            "latest() is for a Stager with target=None: with a target, windows whose label is not known yet are none "
            "of its samples"
        )
    order = index.spans_by_row
    first = index.span_rows[order]
    spans = np.searchsorted(first, pack.first_rows + pack.counts) - 1
    lasts = first + np.diff(index.span_ids)[order] - 1
    rows = np.where(spans >= 0, lasts[spans], -1)
    rows = rows[rows >= pack.first_rows]
    reasons = {"not the newest": index.n_samples - len(rows)}
    return index.of_rows(rows, reasons)


def to_table(pack: Pack, index: SampleIndex, about: About, predictions: Any, *, padded: bool = False) -> pa.Table:
    """The samples with what was predicted for them, see :meth:`stager.Stager.to_table`."""
    ids = np.arange(index.n_samples)
    rows = index.rows_between(0, index.n_samples)
    ends = about.label_times(ids)
    y = None if index.y is None else index.y[rows]
    # What has a row of the table, among values by sample, or by sample and symbol.
    shape: tuple[int, ...] = ids.shape
    chosen: Any = slice(None)
    if isinstance(index, PanelIndex):
        chosen, symbols = index.cells[rows], index.symbols
        shape, (samples, owners) = chosen.shape, np.nonzero(chosen)
        rows = rows[samples]
    else:
        owners, symbols = np.searchsorted(pack.first_rows, rows, side="right") - 1, pack.symbols
    columns: dict[str, pa.Array[Any]] = {
        "symbol": pa.DictionaryArray.from_arrays(pa.array(owners, pa.int32()), pa.array(symbols, pa.string())),
        "time": _instants(pack.times[rows]),
        "decision": _instants(pack.available_at(rows)),
    }
    if y is None or ends is None:
        columns["label_end"] = pa.nulls(len(rows), _STAMP)
        columns["target"] = pa.nulls(len(rows), pa.float32())
    else:
        columns |= {name: _instants(values.view(np.int64)) for name, values in _columns("label_end", ends[chosen])}
        columns |= {name: pa.array(values, from_pandas=True) for name, values in _columns("target", y[chosen])}
    if predictions is not None:
        values = _on_host(predictions)
        if values.ndim - len(shape) not in (0, 1) or values.shape[: len(shape)] != shape:
            text = ", ".join(map(str, shape))
            raise SampleError(
                f"predictions have shape {values.shape}; to_table takes ({text}{',' * (len(shape) == 1)}) or "
                f"({text}, n_outputs), one for each sample{' and symbol' * (len(shape) > 1)}"
                f"{'; leave out what batch.valid marks false' * padded}"
            )
        columns |= {name: pa.array(column) for name, column in _columns("prediction", values[chosen])}
    return pa.table(columns)


def _columns(name: str, values: npt.NDArray[Any]) -> list[tuple[str, npt.NDArray[Any]]]:
    """The values under their name; a column each where there are several."""
    if values.ndim == 1:
        return [(name, values)]
    return [(f"{name}_{i}", np.ascontiguousarray(values[:, i])) for i in range(values.shape[1])]


def _instants(values: npt.NDArray[np.int64]) -> pa.Array[Any]:
    missing = values == np.iinfo(np.int64).min
    return pa.array(values, pa.int64(), mask=missing).view(_STAMP)


def _on_host(predictions: Any) -> npt.NDArray[Any]:
    """A NumPy array of numbers."""
    if isinstance(predictions, (list, tuple)) and any(getattr(one, "ndim", 0) for one in predictions):
        raise SampleError("predictions are a list of arrays, as of batches; concatenate them into one array")
    if hasattr(predictions, "detach"):
        predictions = predictions.detach().cpu()
    values = predictions.get() if hasattr(predictions, "device") and hasattr(predictions, "get") else predictions
    values = np.asarray(values)
    if values.dtype.kind not in "biuf":
        raise SampleError(f"predictions are of {values.dtype}; to_table takes numbers")
    return values


def _some(symbols: tuple[str, ...]) -> str:
    return ", ".join(symbols[:8]) + (", ..." if len(symbols) > 8 else "")
