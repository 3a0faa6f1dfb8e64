"""Bars from an object store."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from bars_fixtures import bar_table, csv_text
from s3_fixtures import Put, put, server

import stager
from stager.bars.read import ReadOptions, read
from stager.errors import BarsError

__all__ = ["put", "server"]

DAYS = [bar_table({"A": range(day * 50, day * 50 + 50), "B": range(day * 50, day * 50 + 20)}) for day in range(3)]


def parquet(table: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


FORMS = {
    "day.csv": lambda table: csv_text(table).encode(),
    "day.csv.gz": lambda table: gzip.compress(csv_text(table).encode()),
    "day.parquet": parquet,
}


@pytest.mark.parametrize("name", FORMS)
def test_an_object_is_read_as_the_file_is(put: Put, name: str) -> None:
    uri = put(f"forms/{name}", FORMS[name](DAYS[0]))
    found, wanted = read(uri), read(DAYS[0])
    assert found.table.equals(wanted.table)
    assert [one.name for one in found.inputs] == [uri]


def test_a_prefix_is_a_directory(put: Put) -> None:
    for number, day in enumerate(DAYS):
        put(f"days/2024-{number}.csv", csv_text(day).encode())
    put("days/readme.md", b"no bars")
    found = read("s3://market/days/")
    assert [one.name for one in found.inputs] == [f"s3://market/days/2024-{number}.csv" for number in range(3)]
    assert len(found.table) == 210


def test_bars_are_packed_and_appended_from_a_store(put: Put, tmp_path: Path) -> None:
    uris = [put(f"grow/{number}.csv", csv_text(day).encode()) for number, day in enumerate(DAYS)]
    target = f"{tmp_path}/x.pack"
    stager.pack(uris[:2], target)
    found = stager.append(target, uris[2])
    at_once = stager.pack(uris, f"{tmp_path}/y.pack")
    assert found.fingerprint == at_once.fingerprint
    assert found.rows.tobytes() == at_once.rows.tobytes()
    assert [one.name for one in found.manifest.inputs] == uris


def test_what_is_not_there_is_named(put: Put) -> None:
    for uri in ("s3://market/no.csv", "s3://no-such-bucket/day.csv"):
        with pytest.raises(BarsError, match=uri):
            read(uri)


def test_errors_name_the_object_and_the_line(put: Put) -> None:
    text = csv_text(DAYS[0]).replace("1000004.5", "oops")
    uri = put("wrong.csv", text.encode())
    with pytest.raises(BarsError) as refused:
        read(uri, ReadOptions(interval="1min"))
    assert str(refused.value).startswith(f"{uri}:6")


def test_options_and_secrets_of_a_uri_are_used_and_not_told(
    server: str, put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, day in enumerate(DAYS[:2]):
        put(f"told/{number}.csv", csv_text(day).encode())
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    host = server.removeprefix("http://")
    options = f"scheme=http&endpoint_override={host}&region=us-east-1"
    for uri, names in (
        (f"s3://KEYID:S3CRET@market/told/0.csv?{options}", ["s3://market/told/0.csv"]),
        (f"s3://KEYID:S3CRET@market/told?{options}", [f"s3://market/told/{number}.csv" for number in range(2)]),
    ):
        found = stager.pack(uri, f"{tmp_path}/{len(names)}.pack")
        assert [one.name for one in found.manifest.inputs] == names
        assert b"S3CRET" not in (tmp_path / f"{len(names)}.pack" / "manifest.json").read_bytes()
    with pytest.raises(BarsError) as refused:
        read(f"s3://KEYID:S3CRET@market/none.csv?{options}")
    assert "s3://market/none.csv" in str(refused.value)
    assert "S3CRET" not in str(refused.value)
