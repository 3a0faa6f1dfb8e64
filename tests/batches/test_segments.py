"""A pack of several segments is served as the same bars in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import bar_table

import stager
from stager import Select, Stager, Target, WalkForward, append, compact, open_pack, pack, stage
from stager.batches import resident
from stager.batches.read_ahead import read_ahead
from stager.errors import PackError, StagingError, StagingMemoryError
from stager.packs.held import Joined

STEPS = {"A": [*range(40), *range(45, 120)], "B": range(100), "D": [5], "C": range(30, 90)}


def parts_of(table: pa.Table) -> list[pa.Table]:
    """Later bars, a symbol that begins later, and bars in between."""
    row = np.arange(len(table))
    late = np.concatenate([np.arange(len(steps)) / len(steps) for steps in STEPS.values()])
    part = np.where(late < 0.5, 0, np.where(late < 0.8, 1, 2))
    part[(row % 17 == 3)] = 2
    part[table["symbol"].to_numpy() == "C"] = 1
    part[0] = 0
    return [table.take(np.flatnonzero(part == number)) for number in range(3)]


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """One segment, three, and three that were compacted."""
    folder = tmp_path_factory.mktemp("segments")
    table = bar_table(STEPS, extra=np.sin(np.arange(sum(map(len, STEPS.values())))))
    one, three, merged = (folder / f"{name}.pack" for name in ("one", "three", "merged"))
    pack(table, one)
    for path in (three, merged):
        first, *others = parts_of(table)
        pack(first, path)
        for other in others:
            append(path, other)
    compact(merged)
    assert [len(open_pack(path).manifest.segments) for path in (one, three, merged)] == [1, 3, 1]
    return one, three, merged


OPTIONS: list[dict[str, Any]] = [
    {"target": Target(horizon=3)},
    {"target": None, "select": Select(columns=("close", "extra"), stride=3)},
    {"target": [Target(horizon=1), Target("open", horizon=7, kind="direction")], "normalize": "zscore"},
    {"target": Target(horizon=2), "select": Select(symbols=("C", "A"), max_gap=10), "normalize": "last"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_batches_are_bit_identical(packs: tuple[Path, Path, Path], options: dict[str, Any]) -> None:
    served = []
    for path in packs:
        with Stager(path, window=6, batch_size=16, seed=3, device="cpu", **options) as st:
            plan = {name: value for name, value in st.plan.as_dict().items() if name not in ("disk_nbytes", "path")}
            batches = [
                (np.array(b.x).tobytes(), None if b.y is None else np.array(b.y).tobytes(), list(b.symbols),
                 np.array(b.times).tolist(), np.array(b.weight).tolist() if b.y is not None else None)
                for epoch in range(2) for b in st.batches(epoch)
            ]  # fmt: skip
            views = np.array(st.view(1, 2, 3)).tobytes()
            served.append((plan, batches, views))
    for other in served[1:]:
        for found, wanted in zip(other, served[0], strict=True):
            assert found == wanted


def test_folds_are_the_same(packs: tuple[Path, Path, Path]) -> None:
    told = []
    for path in packs:
        with Stager(path, window=6, target=Target(horizon=3), batch_size=16, device="cpu") as st:
            told.append(
                [
                    (fold.as_dict(), [np.array(batch.x).tobytes() for batch in fold.test.batches()])
                    for fold in st.split(WalkForward(2))
                ]
            )
    assert told[1] == told[0]
    assert told[2] == told[0]


def test_where_the_rows_lie(packs: tuple[Path, Path, Path]) -> None:
    for path, expected in zip(packs, ("mapped", "in memory", "mapped"), strict=True):
        with stage(path, device="cpu") as staged:
            assert (staged.path, staged.placement) == (expected, "host")
            assert staged.nbytes == staged.rows.nbytes
            assert staged.rows.tobytes() == open_pack(packs[0]).rows.tobytes()
            assert not staged.rows.flags.writeable


def test_memory_is_checked_before_rows_are_brought_together(
    packs: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stager.bars.memory.available_nbytes", lambda: 1000)
    with pytest.raises(StagingMemoryError, match=r"filled with the rows of all segments, 1000 B .* `stager compact`"):
        resident.stage(packs[1], device="cpu")
    resident.stage(packs[2], device="cpu").close()


def test_a_pack_that_grows_is_served_as_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "x.pack"
    pack(bar_table({"A": range(30)}), path)
    append(path, bar_table({"A": range(30, 40)}))
    with Stager(path, window=4, batch_size=8, device="cpu") as st:
        before = [np.array(batch.x).tobytes() for batch in st.batches()]
        append(path, bar_table({"A": range(40, 50)}))
        compact(path)
        assert [np.array(batch.x).tobytes() for batch in st.batches()] == before
        assert st.n_samples == 37
    with Stager(path, window=4, batch_size=8, device="cpu") as st:
        assert st.n_samples == 47


def test_rows_in_place_need_one_segment(packs: tuple[Path, Path, Path]) -> None:
    for path in (packs[0], packs[2]):
        resident.check_in_place(open_pack(path))
    with pytest.raises(StagingError, match=r"lie in 3 segments; merge them with `stager compact .*three\.pack`"):
        resident.check_in_place(open_pack(packs[1]))


@pytest.mark.parametrize("step", [20, 140, 10**6])
def test_bytes_as_they_lie_are_read_across_segments(packs: tuple[Path, Path, Path], step: int) -> None:
    """What a GPU gets, and where it puts it."""
    one, three = open_pack(packs[0]), open_pack(packs[1])
    held = three.held
    assert isinstance(held, Joined)
    came = np.zeros(three.rows_nbytes, np.uint8)
    for first in range(0, len(came), step):
        held.read(came[first : first + step], first)
    rows = came.view(np.uint32).reshape(three.rows.shape)
    sources, places = held.pieces.by_source()
    assert sources[0] == 0
    assert np.all(np.diff(sources) > 0)
    lengths = np.diff(sources, append=len(rows))
    ordered = np.zeros_like(rows)
    ordered[np.repeat(places - sources, lengths) + np.arange(len(rows))] = rows
    assert np.array_equal(ordered, np.asarray(one.rows).view(np.uint32))


def test_every_segment_is_read_ahead(packs: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    pack = open_pack(packs[1])
    monkeypatch.setattr("stager.batches.read_ahead._ask", lambda rows: lambda *span: asked.append((*span, rows.nbytes)))
    ask = read_ahead(pack)
    ask(0, 100)
    starts = np.cumsum([0, *(part.rows.nbytes for part in pack.parts)])
    assert asked == [(-start, 100 - start, part.rows.nbytes) for start, part in zip(starts, pack.parts, strict=False)]


def test_derived_packs_and_panels_are_the_same(packs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    recipe = stager.Derive(["log_return", "range"], fill="previous", cap=3)
    derived = [stager.derive(path, recipe, tmp_path / f"derived-{k}.pack") for k, path in enumerate(packs)]
    panels = [stager.panel(path, out=tmp_path / f"panel-{k}.pack") for k, path in enumerate(packs)]
    for made in (derived, panels):
        assert len({pack.fingerprint for pack in made}) == 1
        assert made[1].rows.tobytes() == made[0].rows.tobytes()
    with pytest.raises(
        PackError, match=r"panel-1\.pack: can't append to a panel; append to the pack that it came from"
    ):
        append(tmp_path / "panel-1.pack", bar_table({"A": [200]}))
    with pytest.raises(PackError, match="the input has no column"):
        append(tmp_path / "derived-1.pack", bar_table({"A": [200]}, extra=[1]))
