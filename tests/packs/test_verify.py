"""Damage of any kind is found and named; opening raises nothing but a StagerError."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import DAY, MINUTE, START, bar_table
from blake3 import blake3
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stager.bars.read import ReadOptions
from stager.errors import NotAPackError, PackDamagedError, PackError, PackVersionError, StagerError
from stager.packs import layout, packing
from stager.packs.appending import append
from stager.packs.layout import open_pack
from stager.packs.manifest import read_manifest
from stager.packs.packing import pack
from stager.packs.segment import write_arrow
from stager.packs.verify import verify

FILES = ("manifest.json", "segment-0/rows.npy", "segment-0/bars.arrow", "segment-0/symbols.arrow")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pack with two symbols, a gap and a missing value."""
    vwap = np.array([1.0, 2.0, np.nan, 4.0, 5.0, 6.0, 7.0])
    path = tmp_path_factory.mktemp("whole") / "x.pack"
    pack(bar_table({"Aé": [0, 1, 2, 5], "B": [0, 1, 2]}, vwap=vwap), path)
    assert verify(path) == []
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "x.pack"))


def assert_found(path: Path, file: str, *, is_version: bool = False) -> None:
    """Verify names the file, and opening raises at most a StagerError."""
    try:
        findings = verify(path)
    except PackVersionError:
        assert is_version
        findings = []
    else:
        assert findings
        assert any(file in finding for finding in findings), findings
    with contextlib.suppress(StagerError):
        open_pack(path)


class TestWhatIsNoPack:
    def test_nothing(self, tmp_path: Path) -> None:
        for look in (open_pack, verify):
            with pytest.raises(NotAPackError, match=r"no\.pack: there is no such pack; `stager pack`"):
                look(tmp_path / "no.pack")

    def test_a_directory(self, tmp_path: Path) -> None:
        for look in (open_pack, verify):
            with pytest.raises(NotAPackError, match=r"no pack \(it has no manifest\.json\); `stager pack`"):
                look(tmp_path)

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "bars.csv").write_text("time\n")
        for look in (open_pack, verify):
            with pytest.raises(NotAPackError, match=r"bars\.csv: no pack"):
                look(tmp_path / "bars.csv")

    def test_a_manifest_that_is_a_directory(self, tmp_path: Path) -> None:
        (tmp_path / "manifest.json").mkdir()
        with pytest.raises(NotAPackError, match="no pack"):
            open_pack(tmp_path)

    @pytest.mark.parametrize("name", ["x" * 5000, "a\0b", ""])
    def test_names_that_no_file_can_have(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.chdir(tmp_path)
        for look in (open_pack, verify):
            with pytest.raises(PackError):
                look(name)

    def test_a_file_that_may_not_be_read(self, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: Path, *arguments: Any, **keywords: Any) -> Any:
            if self.name != "manifest.json" or everything:
                raise PermissionError(13, "Permission denied", str(self))
            return read(self, *arguments, **keywords)

        read, everything = Path.open, False
        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(PackError, match=r"x\.pack: can't be read: Permission denied"):
            open_pack(copy)
        with pytest.raises(PackError, match=r"x\.pack: can't be read: Permission denied"):
            verify(copy)
        everything = True
        monkeypatch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(PackError, match=r"manifest\.json: can't be read: Permission denied"):
            open_pack(copy)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(copy: Path, file: str) -> None:
    (copy / file).unlink()
    if file == "manifest.json":
        with pytest.raises(NotAPackError):
            verify(copy)
        return
    assert_found(copy, file)
    with pytest.raises(PackDamagedError, match=rf"{file}: the file is missing; restore it or pack the bars again"):
        open_pack(copy)


@pytest.mark.parametrize("file", FILES)
def test_truncation_at_any_length(whole: Path, copy: Path, file: str) -> None:
    raw = (whole / file).read_bytes()
    for length in {*range(0, len(raw), 1 if file == "manifest.json" else 37), len(raw) - 1}:
        (copy / file).write_bytes(raw[:length])
        assert_found(copy, file)
        with pytest.raises(PackDamagedError, match=file):
            open_pack(copy)
    (copy / file).write_bytes(raw + b"\n")
    assert_found(copy, file)


def test_any_byte_of_the_manifest(whole: Path, copy: Path) -> None:
    raw = (whole / "manifest.json").read_bytes()
    version = raw.index(b'"format_version": 2') + 18
    for offset in range(len(raw)):
        for mask in (0x01, 0x20, 0x80, 0x08):
            damaged = bytearray(raw)
            damaged[offset] ^= mask
            (copy / "manifest.json").write_bytes(damaged)
            assert_found(copy, "manifest.json", is_version=offset == version)
            with pytest.raises(PackVersionError if damaged[version : version + 1] in b"3" else PackDamagedError):
                open_pack(copy)


def assert_flip_is_found(whole: Path, copy: Path, file: str, place: float, mask: int) -> None:
    """Flip bits of one byte of a file of the copy, and put it back."""
    raw = bytearray((whole / file).read_bytes())
    offset = int(place * len(raw))
    raw[offset] ^= mask
    (copy / file).write_bytes(raw)
    try:
        assert_found(copy, file, is_version=raw[offset - 18 : offset] == b'"format_version": ')
    finally:
        (copy / file).write_bytes((whole / file).read_bytes())


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
@example(file="segment-0/rows.npy", place=0.0, mask=1)
def test_any_flipped_byte(whole: Path, copy: Path, file: str, place: float, mask: int) -> None:
    assert_flip_is_found(whole, copy, file, place, mask)
    assert verify(copy) == []


@pytest.mark.parametrize("file", FILES[1:])
def test_headers_and_footers_of_any_content(whole: Path, copy: Path, file: str) -> None:
    """Also where the size is right, opening raises nothing but a StagerError, and never crashes."""
    raw = (whole / file).read_bytes()
    rng = np.random.default_rng(1)
    for _ in range(300):
        damaged = bytearray(raw)
        first = int(rng.choice([0, rng.integers(len(raw)), len(raw) - 64]))
        stretch = rng.integers(0, 256, min(int(rng.integers(1, 40)), len(raw) - first), np.uint8).tobytes()
        damaged[first : first + len(stretch)] = stretch
        if bytes(damaged) == raw:
            continue
        (copy / file).write_bytes(damaged)
        assert_found(copy, file)


def test_every_damaged_file_is_named(copy: Path) -> None:
    for file in FILES[1:]:
        raw = bytearray((copy / file).read_bytes())
        raw[len(raw) // 2] ^= 1
        (copy / file).write_bytes(raw)
    findings = verify(copy)
    assert len(findings) == 3
    for file in FILES[1:]:
        assert any(f"{file}: bytes 0 to" in finding and "damaged" in finding for finding in findings)


def test_damage_is_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BLOCK_NBYTES", 4096)
    path = tmp_path / "x.pack"
    pack(bar_table({"A": range(1000)}), path)
    assert verify(path) == []
    raw = bytearray((path / "segment-0" / "rows.npy").read_bytes())
    raw[9000] ^= 1
    raw[-1] ^= 1
    (path / "segment-0" / "rows.npy").write_bytes(raw)
    first, last = verify(path)
    assert "rows.npy: bytes 8,192 to 12,287 are damaged" in first
    assert f"to {len(raw) - 1:,} are damaged" in last


def test_rows_of_other_symbols_are_refused_at_open(copy: Path) -> None:
    file = copy / "segment-0" / "symbols.arrow"
    raw = file.read_bytes()
    place = raw.index(np.array([0, 4], "<i8").tobytes())
    file.write_bytes(raw[:place] + np.array([0, 3], "<i8").tobytes() + raw[place + 16 :])
    with pytest.raises(PackDamagedError, match=r"symbols\.arrow: its checksum"):
        open_pack(copy)


def test_progress_reaches_its_total(copy: Path) -> None:
    told: list[tuple[str, int, int]] = []
    verify(copy, progress=lambda *step: told.append(step))
    assert {phase for phase, _, _ in told} == {"verify"}
    assert told[-1][1] == told[-1][2] == sum((copy / file).stat().st_size for file in FILES[1:])


def test_a_newer_version(copy: Path) -> None:
    file = copy / "manifest.json"
    file.write_text(json.dumps({"format_version": 3, "shards": ["new"]}))
    for look in (open_pack, verify):
        with pytest.raises(PackVersionError, match=r"x\.pack: pack format 3; .* up to 2\. Update stager"):
            look(copy)


def test_an_older_version(copy: Path) -> None:
    reseal(copy, format_version=1)
    for look in (open_pack, verify):
        with pytest.raises(PackVersionError, match=r"x\.pack: pack format 1; .* reads 2\. Pack the bars again"):
            look(copy)


def test_checksums_of_another_kind(whole: Path, copy: Path) -> None:
    assert json.loads((whole / "manifest.json").read_bytes())["hashing"] == "blake3"
    reseal(copy, hashing="blake4")
    for look in (open_pack, verify):
        with pytest.raises(PackVersionError, match=r"x\.pack: its checksums .* by 'blake4'; .* knows blake3\. Update"):
            look(copy)


def test_checksums_are_blake3(whole: Path) -> None:
    manifest = json.loads((whole / "manifest.json").read_bytes())
    for segment in manifest["segments"]:
        for name, stored in segment["files"].items():
            raw = (whole / segment["name"] / name).read_bytes()
            assert stored["blocks"] == [blake3(raw).hexdigest(16)]


# A forged pack has right checksums, but what it says is not so.


def reseal(path: Path, **changes: Any) -> None:
    """Write sizes and checksums anew, and fields of the manifest as given."""
    raw = json.loads((path / "manifest.json").read_text())
    for name, stored in raw["segments"][0]["files"].items():
        file = path / "segment-0" / name
        if file.is_file():
            stored.update(size_nbytes=file.stat().st_size, blocks=layout.block_checksums(file))
    raw.update(changes)
    manifest = msgspec.convert({**raw, "checksum": "0" * 32}, type(read_manifest(path)))
    (path / "manifest.json").write_bytes(packing._encode(manifest))


def rewrite(file: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Change an Arrow file."""
    with pa.OSFile(str(file)) as source:
        table = change(pa.ipc.open_file(source).read_all())
    write_arrow(file, table)


def put(name: str, values: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        number = table.column_names.index(name)
        return table.set_column(number, name, pa.array(values(table[name].to_pylist()), table[name].type))

    return change


def manifest_of(path: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return raw


def rows_changed(path: Path) -> None:
    rows = np.load(path / "segment-0" / "rows.npy")
    rows[5, 3] += 1
    with (path / "segment-0" / "rows.npy").open("r+b") as file:
        file.seek(128)
        file.write(rows.tobytes())
    reseal(path)


def bars_changed(name: str, values: Any) -> Callable[[Path], None]:
    def forge(path: Path) -> None:
        rewrite(path / "segment-0" / "bars.arrow", put(name, values))
        reseal(path)

    return forge


def symbols_changed(name: str, values: Any) -> Callable[[Path], None]:
    def forge(path: Path) -> None:
        rewrite(path / "segment-0" / "symbols.arrow", put(name, values))
        reseal(path)

    return forge


def columns_changed(**changes: Any) -> Callable[[Path], None]:
    def forge(path: Path) -> None:
        columns = manifest_of(path)["columns"]
        columns[-1].update(changes)
        reseal(path, columns=columns)

    return forge


def bars_retyped(name: str, kind: pa.DataType) -> Callable[[Path], None]:
    def forge(path: Path) -> None:
        def change(table: pa.Table) -> pa.Table:
            return table.set_column(table.column_names.index(name), name, table[name].cast(kind, safe=False))

        rewrite(path / "segment-0" / "bars.arrow", change)
        reseal(path)

    return forge


def swapped(values: list[Any]) -> list[Any]:
    return [values[1], values[0], *values[2:]]


FORGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "rows differ": (rows_changed, r"rows\.npy: column 'close' differs from bars\.arrow in rows 0 to 6"),
    "a bar's value": (bars_changed("open", lambda v: [v[0] + 1, *v[1:]]), r"rows\.npy: column 'open' differs"),
    "less than float32": (bars_changed("open", lambda v: [np.nextafter(v[0], 9e9), *v[1:]]), "the fingerprint"),
    "times swapped": (bars_changed("time", swapped), r"bars\.arrow: times do not ascend after row 0"),
    "times twice": (bars_changed("time", lambda v: [v[1], *v[1:]]), r"bars\.arrow: times do not ascend after row 0"),
    "a time moved": (bars_changed("time", lambda v: [*v[:3], v[3] + (v[3] - v[0]), *v[4:]]), "the span"),
    "symbols swapped": (symbols_changed("symbol", swapped), r"symbols\.arrow: the symbols are not sorted"),
    "a symbol twice": (
        symbols_changed("symbol", lambda v: [v[0], v[0]]),
        r"symbols\.arrow: the symbols are not sorted",
    ),
    "a symbol renamed": (symbols_changed("symbol", lambda v: [*v[:1], "Z"]), r"bars\.arrow: its symbols are not those"),
    "symbols of bars": (bars_changed("symbol", lambda v: [*v[:3], "B", *v[4:]]), r"bars\.arrow: its symbols are not"),
    "first rows": (symbols_changed("first_row", lambda v: [0, 3]), r"symbols\.arrow: first rows and counts"),
    "counts": (symbols_changed("count", lambda v: [4, 4]), r"symbols\.arrow: first rows and counts"),
    "a count of none": (symbols_changed("count", lambda v: [7, 0]), r"symbols\.arrow: first rows and counts"),
    "a null": (bars_changed("close", lambda v: [None, *v[1:]]), r"bars\.arrow: its columns or rows"),
    "a null symbol": (symbols_changed("symbol", lambda v: [None, *v[1:]]), r"symbols\.arrow: its columns or rows"),
    "a price of no number": (
        bars_changed("close", lambda v: [float("nan"), *v[1:]]),
        "column 'close' misses 1 values, not 0",
    ),
    "another type": (bars_retyped("close", pa.float32()), r"bars\.arrow: its columns or rows"),
    "another zone": (bars_retyped("time", pa.timestamp("ns", "Europe/Paris")), r"bars\.arrow: its columns or rows"),
    "another unit": (bars_retyped("time", pa.timestamp("us", "UTC")), r"bars\.arrow: its columns or rows"),
    "symbols as text": (bars_retyped("symbol", pa.string()), r"bars\.arrow: its columns or rows"),
    "fewer bars": (
        lambda path: (rewrite(path / "segment-0" / "bars.arrow", lambda t: t.slice(0, 6)), reseal(path))[1],
        r"bars\.arrow: its columns or rows",
    ),
    "n_missing": (columns_changed(n_missing=0), r"manifest\.json: column 'vwap' misses 1 values, not 0"),
    "a column's name": (columns_changed(name="other"), r"bars\.arrow: its columns or rows"),
    "a column's name twice": (columns_changed(name="close"), r"manifest\.json: its columns"),
    "a column named time": (columns_changed(name="time"), r"manifest\.json: its columns"),
    "no columns": (lambda path: reseal(path, columns=[]), r"manifest\.json: its columns"),
    "the fingerprint": (lambda path: reseal(path, fingerprint="0" * 31 + "1"), r"manifest\.json: the fingerprint"),
    "the interval": (lambda path: reseal(path, interval="soon"), r"manifest\.json: .*interval is 'soon'"),
    "the span": (lambda path: reseal(path, span=["2020-01-01T00:00:00Z"] * 2), r"manifest\.json: the span"),
    "n_rows": (lambda path: reseal(path, n_rows=8), r"manifest\.json: 2 symbols of 8 rows"),
    "n_symbols": (lambda path: reseal(path, n_symbols=3), r"symbols\.arrow: its columns or rows"),
    "no symbols": (lambda path: reseal(path, n_symbols=0), r"manifest\.json: 0 symbols"),
    "no segment": (lambda path: reseal(path, segments=[]), r"manifest\.json: 2 symbols of 7 rows"),
    "a version of none": (lambda path: reseal(path, format_version=0), r"manifest\.json: format_version is 0"),
}


def forge_segment(**changes: Any) -> Callable[[Path], None]:
    def forge(path: Path) -> None:
        segments = manifest_of(path)["segments"]
        segments[0].update(changes)
        raw = manifest_of(path)
        raw.update(segments=segments, checksum="0" * 32)
        (path / "manifest.json").write_bytes(packing._encode(msgspec.convert(raw, type(read_manifest(path)))))

    return forge


STORED = {"size_nbytes": 1, "blocks": []}
FORGED |= {
    "a segment elsewhere": (forge_segment(name="../x.pack/segment-0"), r"manifest\.json: .* no name of a segment"),
    "a file elsewhere": (
        forge_segment(files={name: STORED for name in ("rows.npy", "bars.arrow", "symbols.arrow", "../../secret")}),
        r"manifest\.json: segment segment-0 lists",
    ),
    "a file less": (forge_segment(files={"rows.npy": STORED}), r"manifest\.json: segment segment-0 lists"),
    "a header of other rows": (
        lambda path: (
            (path / "segment-0" / "rows.npy").write_bytes(
                (path / "segment-0" / "rows.npy").read_bytes().replace(b"(7, 6)", b"(6, 7)")
            ),
            reseal(path),
        )[1],
        r"rows\.npy: its header",
    ),
    "a header of Python code": (
        lambda path: (
            (path / "segment-0" / "rows.npy").write_bytes(
                (path / "segment-0" / "rows.npy").read_bytes().replace(b"'<f4'", b"[()()")
            ),
            reseal(path),
        )[1],
        r"rows\.npy: its header",
    ),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_pack_is_named(copy: Path, what: str) -> None:
    forge, expected = FORGED[what]
    forge(copy)
    findings = verify(copy)
    assert findings
    assert any(re.search(expected, finding) for finding in findings), findings
    assert all(str(copy) in finding for finding in findings)
    with contextlib.suppress(PackDamagedError):
        open_pack(copy)


def test_resealing_alone_breaks_nothing(copy: Path) -> None:
    reseal(copy)
    assert verify(copy) == []


APPENDED = ("manifest.json", *(f"segment-{n}/{file.split('/')[1]}" for n in range(3) for file in FILES[1:]))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of three segments: later bars, a new symbol, bars in between."""
    path = tmp_path_factory.mktemp("several") / "x.pack"
    pack(bar_table({"Aé": [0, 1, 2, 5], "B": [0, 1, 2]}), path)
    append(path, bar_table({"Aé": [7, 8], "AA": [7]}))
    append(path, bar_table({"Aé": [3, 9], "B": [7]}))
    assert verify(path) == []
    assert len(manifest_of(path)["segments"]) == 3
    return path


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.sampled_from(APPENDED), place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_any_flipped_byte_of_several_segments(
    several: Path, tmp_path: Path, file: str, place: float, mask: int
) -> None:
    copy = tmp_path / "x.pack"
    if not copy.exists():
        shutil.copytree(several, copy)
    assert_flip_is_found(several, copy, file, place, mask)


@pytest.mark.parametrize("file", APPENDED[1:])
def test_a_cut_or_missing_file_of_several_segments(several: Path, tmp_path: Path, file: str) -> None:
    copy = Path(shutil.copytree(several, tmp_path / "x.pack"))
    raw = (copy / file).read_bytes()
    for length in (0, len(raw) // 2, len(raw) - 1):
        (copy / file).write_bytes(raw[:length])
        assert_found(copy, file)
        with pytest.raises(PackDamagedError, match=file):
            open_pack(copy)
    (copy / file).unlink()
    assert_found(copy, file)


def segments_changed(path: Path, change: Callable[[list[dict[str, Any]]], Any], **fields: Any) -> None:
    raw = manifest_of(path)
    change(raw["segments"])
    raw.update(fields, checksum="0" * 32)
    (path / "manifest.json").write_bytes(packing._encode(msgspec.convert(raw, type(read_manifest(path)))))


@pytest.mark.parametrize(
    ("n_rows", "expected"), [(14, r"two segments hold a bar of Aé at 2024-01-01T00:00:00.000000000Z")]
)
def test_a_segment_twice_under_two_names(copy: Path, n_rows: int, expected: str) -> None:
    shutil.copytree(copy / "segment-0", copy / "segment-1")
    segments_changed(copy, lambda some: some.append({**some[0], "name": "segment-1"}), n_rows=n_rows)
    (finding,) = (one for one in verify(copy) if "two segments" in one)
    assert re.search(expected, finding)
    with pytest.raises(PackDamagedError, match=expected):
        open_pack(copy).rows  # noqa: B018


def test_a_segment_twice_under_one_name(copy: Path) -> None:
    segments_changed(copy, lambda some: some.append(some[0]), n_rows=14)
    with pytest.raises(PackDamagedError, match="lists a segment twice"):
        open_pack(copy)


def test_symbols_of_several_segments_that_the_manifest_does_not_count(several: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(several, tmp_path / "x.pack"))
    segments_changed(copy, lambda some: None, n_symbols=4)
    assert re.search(r"manifest\.json: says 4 symbols, its segments have 3", verify(copy)[0])


def test_segments_may_come_in_any_order(several: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(several, tmp_path / "x.pack"))
    segments_changed(copy, lambda some: some.reverse())
    assert verify(copy) == []
    assert np.array_equal(open_pack(copy).rows, open_pack(several).rows)


def test_packs_of_every_kind_verify(tmp_path: Path) -> None:
    day = START // DAY
    for interval, unit in (("1min", MINUTE), ("1d", DAY), ("1w", 7 * DAY), ("7min", 7 * MINUTE)):
        path = tmp_path / interval
        pack(bar_table({"A": range(9), "B": [4]}, unit=unit), path, read=ReadOptions(interval=interval))
        assert verify(path) == []
    months = np.arange("2024-01", "2025-01", dtype="datetime64[M]").astype("datetime64[D]").astype(int) - day
    pack(bar_table({"A": months.tolist()}, unit=DAY), tmp_path / "1mo", read=ReadOptions(interval="1mo"))
    assert verify(tmp_path / "1mo") == []
    assert sorted(os.listdir(tmp_path)) == ["1d", "1min", "1mo", "1w", "7min"]
