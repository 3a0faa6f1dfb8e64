"""Folds against a plain loop over samples: who trains, who tests, and why the others don't."""

from __future__ import annotations

import datetime as dt
import itertools
import math
from typing import Any

import numpy as np
import pytest
from bars_fixtures import DAY, MINUTE, START, memory_pack
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.samples import folds as folds_module
from stager.samples.building import build_index
from stager.samples.folds import FOLD_REASONS, FoldSamples, cut_folds, in_time
from stager.samples.index import SampleIndex
from stager.samples.instants import by_instant, distinct
from stager.samples.schemes import Combinatorial, Division, PurgedKFold, Scheme, WalkForward
from stager.samples.select import Select
from stager.samples.targets import Target

Intervals = list[tuple[int, int]]


def label_ends(pack: Pack, target: Target | None) -> Any:
    return None if target is None else lambda rows: pack.available_at(rows + target.reach)


def rows_of(index: SampleIndex) -> list[int]:
    return index.rows(np.arange(index.n_samples)).tolist()


def at(instant: int) -> str:
    return str(np.datetime64(instant, "ns"))


def model(pack: Pack, index: SampleIndex, ends: Any, train: Intervals, test: Intervals,
          embargo: int | None) -> tuple[list[int], list[int], dict[str, int]]:  # fmt: skip
    """Rows that train and that test, and the rest by reason; intervals of decisions are half-open."""
    samples = []
    for row in rows_of(index):
        decision = int(pack.times[row]) + pack.interval.nanoseconds
        end = decision if ends is None else int(ends(np.array([row]))[0])
        samples.append((row, decision, end, int(pack.times[row - index.window + 1])))

    def within(decision: int, intervals: Intervals) -> bool:
        return any(first <= decision < stop for first, stop in intervals)

    tests = [sample for sample in samples if within(sample[1], test)]
    kept, reasons = [], dict.fromkeys(FOLD_REASONS, 0)
    for row, decision, end, opened in samples:
        if not within(decision, train):
            reasons["outside the fold"] += 1
            continue
        later = [other[1] for other in tests if other[1] > decision]
        earlier = [other[2] for other in tests if other[1] < decision]
        if (later and end > min(later)) or (earlier and decision < max(earlier)):
            reasons["purge"] += 1
        elif earlier and (opened < max(earlier) if embargo is None else decision < max(earlier) + embargo):
            reasons["embargo"] += 1
        else:
            kept.append(row)
    in_order = [sample[0] for sample in sorted(tests, key=lambda sample: (sample[1], sample[0]))]
    return kept, in_order, reasons


def intervals_of(scheme: Scheme, instants: list[int]) -> list[tuple[Intervals, Intervals]] | None:
    """Train and test intervals of each fold, by the words of the schemes; None where the instants are too few."""
    first, end = instants[0], instants[-1] + 1
    if not isinstance(scheme, WalkForward):
        n, k = (scheme.folds, 1) if isinstance(scheme, PurgedKFold) else (scheme.n, scheme.k)
        if len(instants) < n:
            return None
        starts = [int(part[0]) for part in np.array_split(instants, n)]
        blocks = list(zip(starts, [*starts[1:], end], strict=True))
        return [
            ([blocks[i] for i in range(n) if i not in chosen], [blocks[i] for i in chosen])
            for chosen in itertools.combinations(range(n), k)
        ]
    n = scheme.folds
    train, test = (None if d is None else int(d / np.timedelta64(1, "ns")) for d in (scheme.train, scheme.test))
    rest = instants if train is None else [instant for instant in instants if instant >= first + train]
    if test is not None:
        starts = [end - test * (n - i) for i in range(n)]
    elif len(rest) < n + (train is None):
        return None
    elif train is not None:
        starts = [int(part[0]) for part in np.array_split(rest, n)]
    else:
        starts = [instants[len(instants) - (n - i) * (len(instants) // (n + 1))] for i in range(n)]
    begin = first if train is None else starts[0] - train
    if len(instants) < n + (train is None) or starts[0] <= first or begin < first:
        return None
    return [
        ([(begin if scheme.expanding else begin + start - starts[0], start)], [(start, stop)])
        for start, stop in zip(starts, [*starts[1:], end], strict=True)
    ]


def assert_equals_the_model(pack: Pack, window: int, target: Target | None, scheme: Scheme, ends: Any) -> bool:
    """Whether there are such folds; if not, the refusal is the right one."""
    index = build_index(pack, window, target, Select())
    instants = sorted({int(pack.times[row]) + pack.interval.nanoseconds for row in rows_of(index)})
    intervals = intervals_of(scheme, instants)
    if intervals is None:
        with pytest.raises(SampleError, match=r"too few for|are longer than the"):
            cut_folds(pack, index, ends, scheme)
        return False
    embargo = None if scheme.embargo is None else int(scheme.embargo / np.timedelta64(1, "ns"))
    wanted = [model(pack, index, ends, *fold, embargo) for fold in intervals]
    for number, (kept, tests, _) in enumerate(wanted, 1):
        if not (kept and tests):
            with pytest.raises(
                SampleError, match=f"fold {number} of .* no sample to {'train' if tests else 'test'} on"
            ):
                cut_folds(pack, index, ends, scheme)
            return False
    for fold, (kept, tests, reasons) in zip(cut_folds(pack, index, ends, scheme), wanted, strict=True):
        assert rows_of(fold.train) == kept
        assert {reason: fold.train.reasons[reason] for reason in FOLD_REASONS} == reasons
        test = in_time(pack, index, fold)
        assert rows_of(test) == tests
        outside = {"outside the fold": index.n_samples - len(tests), "purge": 0, "embargo": 0}
        assert test.reasons == index.reasons | outside
        for part in (fold.train, test):
            assert part.n_samples + sum(part.reasons.values()) == pack.n_rows
            assert part.y is index.y
            assert part.rows_between(0, part.n_samples).tolist() == rows_of(part)
        check_zones(pack, fold, kept, tests)
    return True


def check_zones(pack: Pack, fold: FoldSamples, kept: list[int], tests: list[int]) -> None:
    for kind, rows in (("train", kept), ("test", tests)):
        decisions = pack.available_at(np.array(rows))
        zones = fold.of(kind)
        assert sum(zone.n_samples for zone in zones) == len(rows)
        assert (min(zone.first for zone in zones), max(zone.last for zone in zones)) == (
            decisions.min(), decisions.max()
        )  # fmt: skip
        for zone in zones:
            assert ((decisions >= zone.first) & (decisions <= zone.last)).sum() == zone.n_samples
    for one, other in itertools.pairwise(fold.of("test")):
        assert any(one.last < zone.first < other.first or zone.kind != "test" for zone in fold.zones), (
            "blocks that follow each other are one"
        )


@st.composite
def schemes(draw: st.DrawFn) -> Scheme:
    minutes = st.integers(1, 30).map(lambda n: np.timedelta64(n, "m"))
    embargo = draw(st.none() | st.integers(0, 12).map(lambda n: np.timedelta64(n, "m")))
    which = draw(st.integers(0, 2))
    if which == 0:
        return PurgedKFold(draw(st.integers(2, 6)), embargo=embargo)
    if which == 1:
        n = draw(st.integers(2, 5))
        return Combinatorial(n, draw(st.integers(1, n - 1)), embargo=embargo)
    return WalkForward(
        draw(st.integers(1, 5)),
        train=draw(st.none() | minutes),
        test=draw(st.none() | minutes),
        expanding=draw(st.booleans()),
        embargo=embargo,
    )


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_equals_the_model(data: st.DataObject) -> None:
    steps = {
        symbol: sorted(data.draw(st.sets(st.integers(0, 70), min_size=1, max_size=70)))
        if data.draw(st.booleans())
        else list(range(data.draw(st.integers(0, 10)), data.draw(st.integers(11, 70))))
        for symbol in data.draw(st.lists(st.sampled_from("ABC"), min_size=1, unique=True))
    }
    steps["D"] = list(range(20))
    pack = memory_pack(steps)
    window = data.draw(st.integers(1, 5))
    target = data.draw(st.none() | st.builds(Target, horizon=st.integers(1, 5), delay=st.integers(0, 2)))
    ends = label_ends(pack, target)
    if target is not None and data.draw(st.booleans()):
        # Labels of any length, as the triple-barrier method gives.
        lengths = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 15, pack.n_rows) * MINUTE
        ends = lambda rows: pack.available_at(rows) + lengths[rows]  # noqa: E731
    assert_equals_the_model(pack, window, target, data.draw(schemes()), ends)


@pytest.mark.parametrize("size", [1, 7, 50])
def test_parts_have_no_seam(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(folds_module, "_CHUNK_SAMPLES", size)
    pack = memory_pack({"A": range(60), "B": [*range(20), *range(25, 60)], "C": range(30, 50)})
    target = Target(horizon=2)
    for scheme in (WalkForward(3), PurgedKFold(3), Combinatorial(4, 2, embargo=np.timedelta64(3, "m"))):
        assert assert_equals_the_model(pack, 3, target, scheme, label_ends(pack, target))


@pytest.mark.parametrize(("delay", "horizon"), [(0, 1), (1, 3), (2, 5)])
def test_the_purge_is_delay_and_horizon_to_the_bar(delay: int, horizon: int) -> None:
    """The last that trains knows its label at the very instant of the first test decision."""
    pack = memory_pack({"A": range(200)})
    target = Target(delay=delay, horizon=horizon)
    index = build_index(pack, 4, target, Select())
    (fold,) = cut_folds(pack, index, label_ends(pack, target), WalkForward(1))
    first = rows_of(in_time(pack, index, fold))[0]
    assert rows_of(fold.train)[-1] == first - (delay + horizon)
    assert fold.train.reasons["purge"] == delay + horizon - 1
    (_, middle, _) = cut_folds(pack, index, label_ends(pack, target), PurgedKFold(3))
    tests = rows_of(in_time(pack, index, middle))
    after = [row for row in rows_of(middle.train) if row > tests[-1]]
    # The window of 4 rows begins with the bar that opens when the last test label ends.
    assert after[0] == tests[-1] + delay + horizon + 4
    assert middle.train.reasons["embargo"] == 4


def test_a_test_keeps_all_its_samples_and_its_windows_look_back() -> None:
    pack = memory_pack({"A": range(100)})
    index = build_index(pack, 10, Target(horizon=1), Select())
    folds = cut_folds(pack, index, label_ends(pack, Target(horizon=1)), PurgedKFold(4))
    served = [row for fold in folds for row in rows_of(in_time(pack, index, fold))]
    assert served == rows_of(index)


def test_training_between_two_test_blocks_stays() -> None:
    pack = memory_pack({"A": range(120)})
    target = Target(horizon=1, delay=0)
    index = build_index(pack, 1, target, Select())
    folds = cut_folds(pack, index, label_ends(pack, target), Combinatorial(7, 2, embargo="0"))
    assert len(folds) == math.comb(7, 2)
    fold = folds[2]  # blocks 0 and 3 test
    assert [zone.kind for zone in fold.zones] == ["test", "train", "test", "train"]
    assert fold.train.reasons["purge"] == fold.train.reasons["embargo"] == 0
    assert len(folds[0].of("test")) == 1


def test_a_symbol_that_ends_early_is_split_at_the_same_instant() -> None:
    pack = memory_pack({"A": range(100), "B": range(30)})
    index = build_index(pack, 1, None, Select())
    (fold,) = cut_folds(pack, index, None, WalkForward(1))
    assert max(rows_of(in_time(pack, index, fold))) < 100
    assert set(range(100, 130)) <= set(rows_of(fold.train))


def test_the_longest_label_of_a_block_counts() -> None:
    pack = memory_pack({"A": range(40)})
    index = build_index(pack, 1, Target(horizon=1, delay=0), Select())
    ends = label_ends(pack, Target(horizon=1, delay=0))

    def long(rows: np.ndarray) -> np.ndarray:
        return np.where(rows == 2, pack.available_at(rows) + 20 * MINUTE, ends(rows))

    fold = cut_folds(pack, index, long, PurgedKFold(4, embargo="0min"))[0]
    # Bar 2 is decided at minute 3, so its label ends at 23, when bar 22 closes.
    assert rows_of(fold.train)[0] == 22


def test_lengths_of_time_and_a_window_that_moves_along() -> None:
    pack = memory_pack({"A": range(60)}, interval="1d", unit=DAY)
    index = build_index(pack, 1, None, Select())
    moving = WalkForward(3, train="20d", test=dt.timedelta(days=10), expanding=False)
    folds = cut_folds(pack, index, None, moving)
    assert [rows_of(fold.train) for fold in folds] == [list(range(s, s + 20)) for s in (10, 20, 30)]
    assert [rows_of(in_time(pack, index, fold)) for fold in folds] == [list(range(s, s + 10)) for s in (30, 40, 50)]
    growing = cut_folds(pack, index, None, WalkForward(3, train="20d", test="10d"))
    assert [rows_of(fold.train) for fold in growing] == [list(range(10, s)) for s in (30, 40, 50)]
    even = cut_folds(pack, index, None, WalkForward(4, train="20d"))
    assert [rows_of(in_time(pack, index, fold)) for fold in even] == [list(range(s, s + 10)) for s in (20, 30, 40, 50)]


def test_folds_of_a_fold_add_up() -> None:
    pack = memory_pack({"A": range(100), "B": range(80)})
    target = Target(horizon=2)
    index = build_index(pack, 3, target, Select())
    outer = cut_folds(pack, index, label_ends(pack, target), PurgedKFold(4))[1]
    for inner in cut_folds(pack, outer.train, label_ends(pack, target), PurgedKFold(3)):
        for part in (inner.train, in_time(pack, outer.train, inner)):
            assert part.n_samples + sum(part.reasons.values()) == pack.n_rows
            assert set(rows_of(part)) <= set(rows_of(outer.train))


def test_instants_on_and_off_the_grid() -> None:
    from stager.bars.interval import Interval

    rng = np.random.default_rng(5)
    minute = Interval.parse("1min")
    on = START + rng.integers(0, 500, 1000) * MINUTE
    far = START + rng.integers(0, 1 << 20, 1000) * MINUTE
    ends = np.array([-(2**63) + 1, 2**63 - 1])
    for decisions in (on, on + rng.integers(0, 2, 1000), np.append(on, 2**62), ends, far, np.tile(far, 3), on[:1]):
        for interval in (minute, Interval.parse("1mo"), Interval.parse("1ns")):
            assert np.array_equal(distinct(decisions, interval), np.unique(decisions))
            assert np.array_equal(by_instant(decisions, interval), np.argsort(decisions, kind="stable"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: WalkForward(0), "folds is 0; it must be an integer from 1"),
        (lambda: WalkForward(2.0), "folds is 2.0"),
        (lambda: WalkForward(True), "folds is True"),
        (lambda: WalkForward(10**9), "to 10,000"),
        (lambda: WalkForward(2, expanding="no"), "expanding is 'no'"),
        (lambda: WalkForward(2, train=30), "train is 30; write a duration of fixed length such as '30d'"),
        (lambda: WalkForward(2, test="1mo"), "test is '1mo'"),
        (lambda: WalkForward(2, test="soon"), "test is 'soon'"),
        (lambda: WalkForward(2, test="0d"), "test is '0d'; it must be longer than 0"),
        (lambda: WalkForward(2, test=dt.timedelta(-1)), "longer than 0"),
        (lambda: WalkForward(2, test=np.timedelta64("NaT", "s")), "write a duration"),
        (lambda: WalkForward(2, test=np.timedelta64(10**9, "D")), "and finite"),
        (lambda: WalkForward(2, test=dt.timedelta.max), "and finite"),
        (lambda: WalkForward(2, train=np.timedelta64(1, "Y")), "train is"),
        (lambda: WalkForward(2, embargo=dt.timedelta(-1)), "embargo is .*at least 0"),
        (lambda: PurgedKFold(1), "from 2"),
        (lambda: PurgedKFold(3, embargo=5), "embargo is 5"),
        (lambda: Combinatorial(4, 4), "k is 4; of n = 4 blocks 1 to 3"),
        (lambda: Combinatorial(4, 0), "k is 0"),
        (lambda: Combinatorial(1, 1), "n is 1"),
        (lambda: Combinatorial(100, 50), "make 100,891,344,545,564,193,334,812,497,256 folds"),
    ],
)
def test_schemes_that_are_refused(make: Any, words: str) -> None:
    with pytest.raises(SampleError, match=words):
        make()


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (PurgedKFold(11), "10 decision instants are too few for 11 blocks"),
        (WalkForward(10), "10 decision instants are too few for 10 test blocks and training before"),
        (WalkForward(2, train="9min"), "1 decision instants are too few for 2 test blocks after training of 0:09:00"),
        (WalkForward(2, train="90d"), "0 decision instants are too few"),
        (WalkForward(2, test="5min"), "2 folds of test 0:05:00 and some training before them are longer than"),
        (WalkForward(2, test="3min", train="5min"), "2 folds of test 0:03:00 and train 0:05:00 are longer than"),
        (WalkForward(1, train="1min"), "fold 1 of 1 has no sample to train on: of 1 in its training .* 1 are purged"),
        (PurgedKFold(2, embargo="1h"), "fold 1 of 2 .* no sample to train on: of 5 .* 2 are purged and 3 lie"),
        (
            WalkForward(2, test="1s"),
            "fold 1 of 2 has no sample to test on from 2024-01-01 00:09:58Z to 2024-01-01 00:09:59Z",
        ),
    ],
)
def test_folds_that_have_no_samples_are_refused(scheme: Scheme, words: str) -> None:
    pack = memory_pack({"A": range(10)})
    ends = lambda rows: pack.available_at(rows) + 3 * MINUTE  # noqa: E731
    with pytest.raises(SampleError, match=words):
        cut_folds(pack, build_index(pack, 1, None, Select()), ends, scheme)


def test_the_drawing_of_purge_and_embargo() -> None:
    """The numbers of docs/samples.md; bar i is decided at minute i + 1, so decision 100 is that of bar 99."""
    pack = memory_pack({"A": range(212)})
    target = Target(delay=1, horizon=3)
    index = build_index(pack, 4, target, Select())
    edges = np.array([START + minute * MINUTE for minute in (4, 100, 108, 300)])
    scheme = PurgedKFold(3)
    division = Division(edges, ((np.array([0, 2]), np.array([1])),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PurgedKFold, "divide", lambda self, instants: division)
        (fold,) = cut_folds(pack, index, label_ends(pack, target), scheme)
    told = [(zone.kind, (zone.first - START) // MINUTE, (zone.last - START) // MINUTE) for zone in fold.zones]
    assert told == [
        ("train", 4, 96), ("purge", 97, 99), ("test", 100, 107), ("purge", 108, 110), ("embargo", 111, 114),
        ("train", 115, 208),
    ]  # fmt: skip
