"""Whatever a Stager takes is served elsewhere, bit for bit; what can't be sent is refused by name."""

from __future__ import annotations

import datetime as dt
import inspect
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import MINUTE, START, bar_table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from pyarrow import csv, flight, parquet
from service_fixtures import serving

import stager
from stager import Combinatorial, Labels, Normalize, PurgedKFold, Ranks, Select, Stager, Target, WalkForward
from stager.errors import ConfigError, SampleError, ServiceError, StagerError
from stager.samples.normalize import cast
from stager.service import carried, protocol, remote, sent
from stager.service.listening import Listener, read_listen
from stager.service.protocol import Serving, TablePart
from stager.service.remote import RemoteStager
from stager.service.sent import SentTables

TOKEN = "correct-horse-battery-staple"
N = {"A": 300, "B": 220, "C": 150}
FACTS = ("x", "y", "mask", "sample_ids", "times", "valid", "y_valid", "label_times", "weight")


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    rng = np.random.default_rng(5)
    n = sum(N.values())
    steps = {"A": range(N["A"]), "B": [*range(100), *range(103, N["B"] + 3)], "C": range(N["C"])}
    closes = np.round(50 + rng.normal(0, 0.2, n).cumsum(), 2)
    bars = bar_table(
        steps, close=closes, open=closes + 0.1, high=closes + 1, low=closes - 1, contract=np.arange(n) // 90
    )
    stager.pack(bars, folder / "prices.pack")
    made = stager.panel(folder / "prices.pack", stager.Panel())
    return {"prices": folder / "prices.pack", "panel": made.path}


@pytest.fixture(scope="module")
def service_and_url(packs):
    with tempfile.TemporaryDirectory(prefix="stg-") as folder:
        token = Path(folder) / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        with serving(Path(folder) / "run", packs["prices"]) as service:
            service.add("panel", packs["panel"])
            listener = Listener(service, read_listen("grpc+tcp://127.0.0.1:0", token))
            yield service, listener, f"grpc+tcp://127.0.0.1:{listener.outer_port}"
            assert service.n_errors == 0
            assert listener.end(20)


def remote_of(service_and_url, name="prices", **options):
    return RemoteStager(service_and_url[2], name, token=TOKEN, **options)


def bits(array):
    """An array as bytes of its own type; what tells nothing as it is."""
    return array if array is None else (array.dtype, array.shape, np.ascontiguousarray(array).tobytes())


def same(own, theirs, *, facts=False):
    assert (own.epoch, own.number) == (theirs.epoch, theirs.number)
    for name in FACTS if facts else FACTS[:7]:
        assert bits(getattr(own, name)) == bits(getattr(theirs, name)), name
    if facts:
        assert own.symbols == theirs.symbols


def same_epoch(own, theirs, epoch):
    assert (len(own), own.n_samples) == (len(theirs), theirs.n_samples)
    assert own.plan.columns == theirs.columns
    for number, (mine, other) in enumerate(zip(own.batches(epoch), theirs.batches(epoch), strict=True)):
        same(mine, other, facts=number in (0, len(own) - 1))


def times(*steps):
    return pa.array([START + step * MINUTE for step in steps], pa.timestamp("ns", "UTC"))


LABELS = pa.table(
    {"symbol": ["A"] * 280, "time": times(*range(280)), "label": np.arange(280) % 7 - 3.0,
     "label_end": times(*range(4, 284)), "of no use": [[1]] * 280}
)  # fmt: skip
UNIVERSE = pa.table({"symbol": ["A", "B"], "start": times(20, 0), "end": pa.array([None, START + 190 * MINUTE],
                    pa.timestamp("ns", "UTC"))})  # fmt: skip
ROLLS = pa.table({"symbol": pa.array(["A", "A"]).dictionary_encode(), "time": times(50, 120)})
SPLITS = pa.table({"symbol": ["B"], "time": times(60), "ratio": [2.0]})

targets = some.builds(
    Target,
    some.sampled_from(["close", "open"]),
    horizon=some.integers(1, 9),
    kind=some.sampled_from(["return", "difference", "value"]),
    across_gaps=some.sampled_from(["exclude", "allow"]),
    scale=some.sampled_from([None, "rank", "demean"]),
) | some.just(Target(horizon=3, kind="direction", threshold=0.001, classes=2))
labels = some.sampled_from([Labels(LABELS), Labels(LABELS, scale="demean")])
selects = some.builds(
    Select,
    symbols=some.sampled_from([None, ["A", "B"], ("B", "A")]),
    interval=some.sampled_from(
        [None, ("2024-01-01T00:10", None), (dt.datetime(2024, 1, 1, 0, 5), np.datetime64("2024-01-01T04:00:00", "ns"))]
    ),
    max_gap=some.sampled_from([0, 3]),
    session=some.sampled_from([None, "00:00-03:00 UTC"]),
    rolls=some.sampled_from([None, ROLLS, "contract"]),
    splits=some.sampled_from([None, SPLITS]),
    universe=some.sampled_from([None, UNIVERSE]),
    columns=some.sampled_from([None, ["close", "volume"], ["volume", "open", "close"]]),
    stride=some.sampled_from([1, 2]),
    min_history=some.sampled_from([0, 12]),
)
normalizes = some.sampled_from(
    ["none", "last", "zscore", Normalize("log1p", "zscore", "zscore"), Normalize("zscore", "none", fit="train")]
)
OPTIONS = {
    "window": some.integers(1, 12) | some.just(np.int32(5)),
    "dilation": some.sampled_from([1, 1, 3]),
    "target": some.none() | targets | labels | some.lists(targets, min_size=1, max_size=2),
    "batch_size": some.integers(20, 90),
    "seed": some.integers(0, 1 << 40),
    "shuffle": some.sampled_from(["full", "block", "time", False]),
    "last": some.sampled_from(["keep", "drop", "pad"]),
    "ranks": some.sampled_from([Ranks(), Ranks(), Ranks(0, 2), Ranks(2, 3)]),
    "select": some.just(Select()) | selects,
    "normalize": normalizes,
    "dtype": some.sampled_from(["float32", "float16"]),
}
REST = {"block": some.integers(1, 64), "sampling": some.just("weighted"), "weights": some.just("uniqueness")}


@some.composite
def arguments(draw):
    options = {name: draw(values) for name, values in OPTIONS.items()}
    if options["shuffle"] == "block" and draw(some.booleans()):
        options["block"] = draw(REST["block"])
    if options["shuffle"] == "full" and draw(some.booleans()):
        options |= {"sampling": "weighted", "weights": "uniqueness"}
    if options["ranks"].world_size > 1 and options["last"] == "keep":
        options["last"] = "pad"
    return options


def test_every_argument_of_a_stager_is_tried():
    names = set(inspect.signature(Stager.__init__).parameters) - {"self", "source", "device", "placement"}
    assert names == OPTIONS.keys() | REST.keys()


def told(make):
    """A Stager, or why there is none."""
    try:
        return make(), None
    except StagerError as error:
        return None, type(error)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments(), some.sampled_from(["prices", "panel"]), some.integers(0, 9))
def test_whatever_a_stager_takes_is_streamed_bit_for_bit(service_and_url, packs, options, name, epoch):
    own, refused = told(lambda: Stager(packs[name], device="cpu", **options))
    theirs, why = told(lambda: remote_of(service_and_url, name, **options))
    try:
        assert why == refused
        if own is not None:
            same_epoch(own, theirs, epoch)
    finally:
        for one in (own, theirs):
            if one is not None:
                one.close()


SCHEMES = [
    WalkForward(3),
    WalkForward(2, train=dt.timedelta(minutes=100), test="30min", expanding=False, embargo=np.timedelta64(0, "m")),
    PurgedKFold(4, embargo="10min"),
    Combinatorial(4, 2),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("name", ["prices", "panel"])
def test_folds_are_those_of_a_stager(service_and_url, packs, monkeypatch, name, scheme):
    options = {"window": 4, "target": Target(horizon=2), "batch_size": 16, "last": "pad", "ranks": Ranks(1, 2),
               "normalize": Normalize("zscore", fit="train")}  # fmt: skip
    real, n_splits = Stager.split, []
    monkeypatch.setattr(Stager, "split", lambda self, one=None: (n_splits.append(one), real(self, one))[1])
    with Stager(packs[name], device="cpu", **options) as own, remote_of(service_and_url, name, **options) as theirs:
        folds = own.split(scheme)
        for mine, other in zip(folds, theirs.split(scheme), strict=True):
            assert (mine.number, mine.n_folds, mine.counts) == (other.number, other.n_folds, other.counts)
            for part in ("train", "test"):
                same_epoch(getattr(mine, part), getattr(other, part), 3)
                getattr(other, part).close()
        # Once here, and once there for all of the parts.
        assert len(n_splits) == 2
        with pytest.raises(SampleError, match=r"split\(\) got 'walk_forward'"):
            theirs.split("walk_forward")
        with pytest.raises(SampleError, match="are too few for"):
            theirs.split(PurgedKFold(9_000))


def test_weights_go_along_and_follow_their_samples_into_folds(service_and_url, packs):
    with Stager(packs["prices"], device="cpu", window=4, batch_size=16) as plain:
        n = plain.n_samples
    weights = np.random.default_rng(3).random(n, np.float32)
    for given_ in (weights, weights.tolist(), weights > 0.5):
        options = {"window": 4, "batch_size": 16, "sampling": "weighted", "weights": given_}
        with Stager(packs["prices"], device="cpu", **options) as own, remote_of(service_and_url, **options) as theirs:
            same_epoch(own, theirs, 1)
            (mine, *_), (other, *_) = own.split(PurgedKFold(3)), theirs.split(PurgedKFold(3))
            same_epoch(mine.train, other.train, 2)
    for wrong in (weights[1:], weights[None], -weights, ["x"], "equal"):
        options = {"window": 4, "batch_size": 16, "sampling": "weighted", "weights": wrong}
        with pytest.raises(SampleError), Stager(packs["prices"], device="cpu", **options):
            pass
        with pytest.raises((SampleError, ConfigError), match="weight"):
            remote_of(service_and_url, **options)


def test_bfloat16_travels_as_its_bits(service_and_url, packs, monkeypatch):
    options = {"window": 6, "batch_size": 32, "normalize": "last", "dtype": "bfloat16"}
    plain = Stager(packs["prices"], device="cpu", **options | {"dtype": "float32"})
    seen = []
    monkeypatch.setattr(remote, "hand_out", lambda array, to, **how: (seen.append(how), array)[1])
    with remote_of(service_and_url, **options) as theirs:
        for mine, other in zip(plain.batches(2), theirs.batches(2), strict=True):
            assert other.x.dtype == np.uint16
            assert np.array_equal(cast(mine.x, "bfloat16"), other.x)
    assert {"bfloat16": True} in seen
    plain.close()


def test_batches_may_be_written_to_and_be_another_framework_s(service_and_url):
    with remote_of(service_and_url, window=4, batch_size=16, target=Target(horizon=2)) as theirs:
        for batch in theirs.batches(to="numpy"):
            batch.x += 1
            batch.y += 1
        with pytest.raises(SampleError, match="to is 'tensorflow'"):
            theirs.batches(to="tensorflow")


def test_tables_of_files_are_read_by_the_client(service_and_url, packs, tmp_path):
    parquet.write_table(UNIVERSE, tmp_path / "universe.parquet")
    csv.write_csv(SPLITS, tmp_path / "splits.csv")
    parquet.write_table(LABELS, tmp_path / "labels.pq")
    parquet.write_table(ROLLS, tmp_path / "rolls.parquet")
    options = {
        "window": 4, "batch_size": 16, "target": Labels(tmp_path / "labels.pq"),
        "select": Select(universe=tmp_path / "universe.parquet", splits=str(tmp_path / "splits.csv"),
                         rolls=str(tmp_path / "rolls.parquet")),
    }  # fmt: skip
    with Stager(packs["prices"], device="cpu", **options) as own, remote_of(service_and_url, **options) as theirs:
        same_epoch(own, theirs, 0)
    with pytest.raises(SampleError, match="can't be read"):
        remote_of(service_and_url, window=4, batch_size=16, select=Select(universe=tmp_path / "none.csv"))


def test_what_can_not_be_sent_is_refused_by_name(service_and_url):
    for options, error, match in (
        ({"device": "cpu"}, ConfigError, "device is 'cpu'; rows lie where the service staged them"),
        ({"placement": "host"}, ConfigError, "placement is 'host'"),
        ({"ranks": 3}, ConfigError, "ranks is 3"),
        ({"select": {"stride": 2}}, SampleError, "select is {'stride': 2}"),
        ({"target": "close"}, SampleError, "target is 'close'"),
        ({"normalize": len}, SampleError, "normalize is <built-in"),
        ({"seed": len}, SampleError, "seed is <built-in"),
        ({"seed": object()}, SampleError, "seed is <object"),
        ({"windows": 3}, TypeError, "windows"),
        ({"select": Select(universe=3)}, SampleError, "universe is 3"),
        ({"select": Select(rolls="wrong")}, SampleError, "no such column, but open"),
    ):
        with pytest.raises(error, match=match):
            remote_of(service_and_url, **{"window": 4, "batch_size": 16} | options)
    with pytest.raises(TypeError, match="batch_size"):
        remote_of(service_and_url, window=4)


# --------------------------------------------------------------------------------- tables


@given(
    some.integers(0, 40),
    some.lists(
        some.sampled_from([pa.int64(), pa.int8(), pa.float32(), pa.bool_(), pa.string(), pa.large_string(),
                           pa.timestamp("us"), pa.timestamp("ns", "UTC"), pa.date64(), pa.null()]),
        max_size=4,
    ),
    some.integers(0, 1 << 30),
)  # fmt: skip
@settings(deadline=None)
def test_a_table_comes_back_as_it_was(n, kinds, seed):
    rng = np.random.default_rng(seed)
    columns = {}
    for number, kind in enumerate(kinds):
        values = [None if rng.random() < 0.2 else int(one) for one in rng.integers(0, 100, n)]
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            values = [None if one is None else "ü" * (one % 5) for one in values]
        if pa.types.is_null(kind):
            values = [None] * n
        if pa.types.is_boolean(kind):
            values = [None if one is None else one % 2 == 0 for one in values]
        if pa.types.is_date(kind):
            values = [None if one is None else dt.date(2024, 1, 1 + one % 31) for one in values]
        array = pa.array(values, kind)
        columns[f"c{number}"] = pa.chunked_array([array.slice(3), array.slice(0, 3)], kind)
    table = pa.table(columns)
    assert carried.read_carried(carried.pack_table(table)).equals(table)


def test_noise_is_no_table():
    rng = np.random.default_rng(1)
    good = carried.pack_table(UNIVERSE)
    for _ in range(500):
        body = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            body[rng.integers(len(body))] = rng.integers(256)
        try:
            table = carried.read_carried(bytes(body))
        except ServiceError as error:
            assert "malformed" in str(error) or "no option takes" in str(error)  # noqa: PT017
        else:
            assert table.num_rows >= 0
            str(table)
    for body in (b"", b"x", good[:40], good + b"x", b"\x81" * 1000):
        with pytest.raises(ServiceError, match="malformed"):
            carried.read_carried(body)


def parts_of(raw, size=100, digest=None):
    from hashlib import blake2b

    name = digest or blake2b(raw, digest_size=16).hexdigest()
    return [TablePart(name, len(raw), first, raw[first : first + size]) for first in range(0, len(raw), size)]


def test_parts_are_taken_in_order_and_once():
    tables, parts = SentTables(), parts_of(carried.pack_table(UNIVERSE))
    name = parts[0].digest
    with pytest.raises(ServiceError, match="send the parts in order"):
        tables.put(parts[1])
    for part in parts[:-1]:
        tables.put(part)
        tables.put(part)  # of another client
        assert tables.missing({name}) == [name]
        with pytest.raises(ServiceError, match="not here"):
            tables.get(name)
    with pytest.raises(ServiceError, match="send the parts in order"):
        tables.put(protocol.TablePart(name, parts[0].nbytes, parts[-1].offset, b"x" * 101))
    tables.put(parts[-1])
    tables.put(parts[-1])
    assert tables.missing({name}) == []
    assert tables.get(name).equals(UNIVERSE)


def test_what_is_not_what_its_hash_says_is_forgotten():
    tables, parts = SentTables(), parts_of(carried.pack_table(UNIVERSE), digest="0" * 32)
    for part in parts[:-1]:
        tables.put(part)
    with pytest.raises(ServiceError, match="has the hash"):
        tables.put(parts[-1])
    assert tables.nbytes == 0


def test_tables_are_bounded_and_the_oldest_give_way(monkeypatch):
    raws = [carried.pack_table(pa.table({"time": [k] * 50})) for k in range(4)]
    monkeypatch.setattr(sent, "MOST_NBYTES", 3 * len(raws[0]) + 10)
    tables, names = SentTables(), []
    for raw in raws:
        (part,) = parts_of(raw, 1 << 20)
        tables.put(part)
        names.append(part.digest)
        if len(names) == 3:
            tables.get(names[0])
    assert tables.missing(set(names)) == [names[1]]
    with pytest.raises(ServiceError, match=r"at most .* are taken"):
        tables.put(TablePart("0" * 32, sent.MOST_NBYTES + 1, 0, b""))
    assert tables.nbytes <= sent.MOST_NBYTES


def test_tables_that_gave_way_are_sent_again(service_and_url, packs):
    service, listener, _ = service_and_url
    options = {"window": 4, "batch_size": 16, "target": Labels(LABELS)}
    with Stager(packs["prices"], device="cpu", **options) as own, remote_of(service_and_url, **options) as theirs:
        same_epoch(own, theirs, 0)
        # Both the Stager and its tables were forgotten meanwhile, as after a restart.
        listener._streams.close()
        listener._streams.tables._tables.clear()
        same_epoch(own, theirs, 1)
        listener._streams.close()
        listener._streams.tables._tables.clear()
        theirs._tables.clear()
        with pytest.raises(ServiceError, match="asks for a table"):
            list(theirs.batches(2))
    assert service.n_errors == 0


def test_a_table_of_several_parts_passes_the_gate(service_and_url, packs):
    """More than a call may send at once, in calls that each send less."""
    n = 200_000
    wide = pa.table({"symbol": ["A"] * n, "start": times(0).take(pa.array(np.zeros(n, int))),
                     "end": pa.nulls(n, pa.timestamp("ns", "UTC"))})  # fmt: skip
    assert len(carried.pack_table(wide)) > 3 << 20
    options = {"window": 4, "batch_size": 16, "select": Select(universe=wide)}
    with Stager(packs["prices"], device="cpu", **options) as own, remote_of(service_and_url, **options) as theirs:
        same_epoch(own, theirs, 0)


def test_any_arguments_are_served_or_refused(service_and_url):
    """Plain values of a stranger, in place of those of a client."""
    client = flight.FlightClient(service_and_url[2])
    headers = flight.FlightCallOptions(timeout=20, headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
    plain = (
        some.none() | some.booleans() | some.integers(-(1 << 70), 1 << 70) | some.floats(allow_nan=False) | some.text()
    )
    values = some.recursive(plain, lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(), inner))
    names = some.sampled_from(["window", "batch_size", "seed", "last", "weights", "normalize", "block", "dtype", "x"])
    fields = some.sampled_from(
        ["horizon", "table", "price", "symbols", "interval", "universe", "rolls", "session", "x"]
    )

    @settings(deadline=None, max_examples=150)
    @given(some.dictionaries(names, values), some.none() | some.dictionaries(fields, values),
           some.dictionaries(fields, values), some.none() | some.dictionaries(some.text(), values))  # fmt: skip
    def ask(batches, target, select, split):
        serving = Serving("prices", {"window": 4, "batch_size": 8} | batches, target, select)
        try:
            list(client.do_action(flight.Action("open", protocol.encode(protocol.Open(serving, 0, split))), headers))
        except flight.FlightServerError as error:
            assert "the service failed" not in str(error), serving  # noqa: PT017

    ask()
    client.close()
