"""Bars from web servers and through fsspec: a local server whose answers a test chooses, and fsspec's memory.

Without fsspec and aiohttp (the extra ``remote``) these are skipped; ``STAGER_REQUIRE_REMOTE=1`` makes that a failure.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import os
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bars_fixtures import bar_table, csv_text

import stager
from stager.bars import remote
from stager.bars.decode import decode
from stager.bars.read import ReadOptions, read
from stager.bars.room import Room
from stager.bars.sources import find
from stager.errors import BarsError

DAYS = [bar_table({"A": range(day * 50, day * 50 + 50), "B": range(day * 50, day * 50 + 20)}) for day in range(3)]
HAS_FSSPEC = all(importlib.util.find_spec(name) is not None for name in ("fsspec", "aiohttp"))


@pytest.fixture(scope="module", autouse=True)
def _fsspec() -> None:
    if not HAS_FSSPEC:
        if os.environ.get("STAGER_REQUIRE_REMOTE") == "1":
            pytest.fail("STAGER_REQUIRE_REMOTE is set, and fsspec or aiohttp is not installed")
        pytest.skip("fsspec or aiohttp is not installed")


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def zipped(data: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("day.csv", data)
    return sink.getvalue()


FORMS: dict[str, Callable[[pa.Table], bytes]] = {
    "day.csv": lambda table: csv_text(table).encode(),
    "day.csv.gz": lambda table: gzip.compress(csv_text(table).encode()),
    "day.csv.zst": lambda table: pa.compress(csv_text(table).encode(), "zstd", asbytes=True),
    "day.zip": lambda table: zipped(csv_text(table).encode()),
    "day.parquet": parquet,
}


@dataclass
class Page:
    """What the server answers for a path."""

    data: bytes
    ranges: bool = True
    tells_size: bool = True
    status: int = 200
    # The connection ends after so many bytes of an answer.
    breaks_after: int | None = None
    kind: str = "application/octet-stream"


@dataclass
class Site:
    """A server's address and its pages; requests are counted."""

    address: str
    pages: dict[str, Page] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def put(self, path: str, data: bytes, **how: Any) -> str:
        self.pages[path] = Page(data, **how)
        return self.address + path


def serve(tls: ssl.SSLContext | None = None) -> tuple[ThreadingHTTPServer, Site]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            site.requests.append(f"{self.command} {path}")
            page = site.pages.get(path)
            if page is None or page.status != 200:
                self.send_response(404 if page is None else page.status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data, asked = page.data, self.headers.get("Range")
            if asked and page.ranges:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                data = page.data[int(first) : int(last) + 1]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(data) - 1}/{len(page.data)}")
            else:
                self.send_response(200)
            self.send_header("Content-Type", page.kind)
            if page.tells_size:
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Last-Modified", "Mon, 06 May 2024 13:30:00 GMT")
            else:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            if not with_body:
                return
            if not page.tells_size:
                data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
            if page.breaks_after is not None:
                self.wfile.write(data[: page.breaks_after])
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    site = Site(f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, site


@pytest.fixture
def site() -> Iterator[Site]:
    server, site = serve()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def in_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is large enough to be read in ranges."""
    monkeypatch.setattr(remote, "FETCHED_NBYTES", 0)


@pytest.mark.parametrize("how", [{}, {"ranges": False}, {"tells_size": False}], ids=["ranges", "no ranges", "no size"])
@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("name", FORMS)
def test_a_web_server_s_file_is_read_as_the_file_is(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str, size: str, how: dict[str, bool]
) -> None:
    if size == "large":
        monkeypatch.setattr(remote, "FETCHED_NBYTES", 0)
    address = site.put(f"/x/{name}", FORMS[name](DAYS[0]), **how)
    found = read(f"{address}?token=S3CRET")
    assert found.table.equals(read(DAYS[0]).table)
    assert [one.name for one in found.inputs] == [address]


def test_a_small_file_is_fetched_once(site: Site) -> None:
    read(site.put("/day.csv", FORMS["day.csv"](DAYS[0])))
    assert sum(request.startswith("GET") for request in site.requests) == 1


@pytest.mark.usefixtures("in_ranges")
@pytest.mark.parametrize("name", ["big.csv", "big.csv.gz", "big.parquet"])
def test_a_large_file_is_read_in_ranges_and_in_parts(site: Site, name: str) -> None:
    table = bar_table({"A": range(120_000), "B": range(60_000)})
    text = csv_text(table).encode()
    assert len(text) > 1 << 23
    data = {"big.csv": text, "big.csv.gz": gzip.compress(text, 1)}.get(name) or parquet(table)
    (source,) = find(site.put(f"/{name}", data))
    parts = list(decode(source, ReadOptions(), lambda tell: None, Room(source.name, 1 << 22)))
    assert len(parts) > 1
    for role in ("open", "close", "volume"):
        found = pa.chunked_array([chunk for part in parts for chunk in part.columns[role].chunks])
        assert found.to_pylist() == table[role].to_pylist()


def test_symbols_come_from_the_name_without_what_is_asked(site: Site) -> None:
    one = DAYS[0].filter(pa.compute.equal(DAYS[0]["symbol"], "A")).drop(["symbol"])
    address = site.put("/minute/BTC%2FUSD.parquet", parquet(one))
    assert read(f"{address}?download=1").symbols == ("BTC/USD",)


def test_a_page_of_links_is_a_directory_and_takes_globs(site: Site) -> None:
    names = [f"2024-{number}.csv" for number in range(3)]
    for name, day in zip(names, DAYS, strict=True):
        site.put(f"/days/{name}", csv_text(day).encode())
    links = "".join(f'<a href="{name}">{name}</a>' for name in [*names, "readme.md", "../"])
    site.put("/days/", f"<html>{links}</html>".encode(), kind="text/html")
    site.put("/days", f"<html>{links}</html>".encode(), kind="text/html")
    days = f"{site.address}/days/"
    for source, wanted in (("", names), ("2024-*.csv", names), ("*2.csv", names[2:])):
        assert [one.name for one in read(days + source).inputs] == [days + name for name in wanted]
    with pytest.raises(BarsError, match="no file matches"):
        read(f"{days}*-[12].csv")


def test_what_a_server_refuses_is_told_in_its_words(site: Site) -> None:
    for path, status, words in (("/none.csv", None, "there is no such file"), ("/closed.csv", 403, "answered 403"),
                                ("/ill.csv", 500, "answered 500")):  # fmt: skip
        address = site.address + path if status is None else site.put(path, b"", status=status)
        with pytest.raises(BarsError, match=words) as refused:
            read(f"{address}?token=S3CRET")
        assert str(refused.value).startswith(address)
        assert "S3CRET" not in str(refused.value)


def test_no_server_is_told() -> None:
    with pytest.raises(BarsError, match=r"http://127\.0\.0\.1:9/day\.csv: can't be opened: .*connect"):
        read("http://user:S3CRET@127.0.0.1:9/day.csv")


@pytest.mark.parametrize("fetched", [1 << 23, 0], ids=["small", "large"])
@pytest.mark.parametrize("how", [{}, {"ranges": False}, {"tells_size": False}], ids=["ranges", "no ranges", "no size"])
@pytest.mark.parametrize("name", FORMS)
def test_a_connection_that_breaks_is_an_error_and_nothing_is_written(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fetched: int, how: dict[str, bool]
) -> None:
    monkeypatch.setattr(remote, "FETCHED_NBYTES", fetched)
    data = FORMS[name](DAYS[0])
    # At the end of a line: what came could be a whole file.
    address = site.put(f"/{name}", data, breaks_after=data[: len(data) // 2].rfind(b"\n") + 1 or 100, **how)
    with pytest.raises(BarsError, match=r"try again|opened") as refused:
        stager.pack(address, f"{tmp_path}/x.pack")
    assert str(refused.value).startswith(address)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("in_ranges")
def test_a_file_that_shrinks_while_it_is_read_is_an_error(site: Site) -> None:
    data = csv_text(bar_table({"A": range(120_000)})).encode()
    address = site.put("/day.csv", data, ranges=True)
    page = site.pages["/day.csv"]

    class Shrinking(bytes):
        def __getitem__(self, key: Any) -> Any:
            return bytes(self)[: 1 << 20][key] if isinstance(key, slice) and (key.start or 0) < len(data) - 1 else b"x"

    page.data = Shrinking(data)
    with pytest.raises(BarsError, match="try again"):
        read(address)


def certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's context, and the file of the certificate it has signed itself."""
    pytest.importorskip("cryptography")
    import datetime as dt
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stager test")])
    now = dt.datetime.now(dt.UTC)
    signed = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - dt.timedelta(days=1)).not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    public, secret = folder / "server.crt", folder / "server.key"
    public.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, secret)
    return context, public


def test_https_is_read_where_the_certificate_is_trusted(tmp_path: Path) -> None:
    context, public = certificate(tmp_path)
    server, site = serve(context)
    try:
        address = site.put("/day.csv", FORMS["day.csv"](DAYS[0]))
        with pytest.raises(BarsError, match="certificate"):
            read(address)
        command = [sys.executable, "-m", "stager.cli", "pack", address, "-o", f"{tmp_path}/x.pack"]
        done = subprocess.run(command, env={**os.environ, "SSL_CERT_FILE": str(public)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    finally:
        server.shutdown()
        server.server_close()
    wanted = stager.pack(DAYS[0], f"{tmp_path}/y.pack")
    assert stager.open_pack(f"{tmp_path}/x.pack").fingerprint == wanted.fingerprint


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """fsspec's file system in memory, under the name of Google's."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem
    from fsspec.registry import _registry

    class Cloud(MemoryFileSystem):
        protocol = "gs"
        store: dict[str, Any] = {}  # noqa: RUF012 - as the parent has it
        pseudo_dirs = [""]  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return super()._strip_protocol(path.removeprefix("gs://"))

    fsspec.register_implementation("gs", Cloud, clobber=True)
    try:
        yield Cloud()
    finally:
        _registry.pop("gs", None)


@pytest.mark.parametrize("name", FORMS)
def test_a_store_that_fsspec_knows_is_read_as_files_are(cloud: Any, name: str) -> None:
    cloud.pipe(f"/market/day/{name}", FORMS[name](DAYS[0]))
    found = read(f"gs://market/day/{name}")
    assert found.table.equals(read(DAYS[0]).table)
    assert [one.name for one in found.inputs] == [f"gs://market/day/{name}"]


def test_a_store_s_folders_globs_and_partitions(cloud: Any, tmp_path: Path) -> None:
    for number, day in enumerate(DAYS):
        cloud.pipe(f"/market/days/2024-{number}.csv", csv_text(day).encode())
        cloud.pipe(f"/market/years/y{number}/day.csv", csv_text(day).encode())
        one = day.filter(pa.compute.equal(day["symbol"], "A")).drop(["symbol"])
        cloud.pipe(f"/market/parts/symbol=S{number}/day.parquet", parquet(one))
    cloud.pipe("/market/days/notes.json", b"{}")
    wanted = [f"gs://market/days/2024-{number}.csv" for number in range(3)]
    for source in (
        "gs://market/days",
        "gs://market/days/",
        "gs://market/days/2024-*.csv",
        "gs://market/days/2024-?.csv",
    ):
        assert [one.name for one in read(source).inputs] == wanted
    assert [one.name for one in read("gs://market/days/*-[!0].csv").inputs] == wanted[1:]
    assert len(read("gs://market/years/*/day.csv").inputs) == 3
    assert len(read("gs://market/**/day.csv").inputs) == 3
    assert read("gs://market/parts").symbols == ("S0", "S1", "S2")
    assert (
        stager.pack(wanted, f"{tmp_path}/x.pack").fingerprint
        == stager.pack(pa.concat_tables(DAYS), f"{tmp_path}/y.pack").fingerprint
    )
    for source, words in (("gs://market/none.csv", "no such file"), ("gs://market/x*.csv", "no file matches"),
                          ("gs://market/years", "no bar files")):  # fmt: skip
        with pytest.raises(BarsError, match=words):
            read(source)


def test_errors_name_the_file_and_the_line(cloud: Any) -> None:
    cloud.pipe("/market/wrong.csv", csv_text(DAYS[0]).replace("1000004.5", "oops").encode())
    with pytest.raises(BarsError) as refused:
        read("gs://market/wrong.csv", ReadOptions(interval="1min"))
    assert str(refused.value).startswith("gs://market/wrong.csv:6")


def test_any_error_of_a_store_s_client_is_told(cloud: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class QuotaError(Exception):
        pass

    class Failing(io.BytesIO):
        def read(self, n: int | None = -1) -> bytes:
            if self.tell() > 0:
                raise QuotaError("too many requests")
            return super().read(100)

    cloud.pipe("/market/day.csv", FORMS["day.csv"](DAYS[0]))
    data = cloud.cat("/market/day.csv")
    monkeypatch.setattr(type(cloud), "_open", lambda *_, **__: Failing(data))
    with pytest.raises(BarsError, match=r"gs://market/day.csv: reading broke off after 100 of .* too many requests"):
        read("gs://market/day.csv")


@pytest.mark.parametrize(
    ("uri", "hidden", "words"),
    [
        ("https://host/day.csv", "fsspec", r"pip install 'stager\[remote\]'"),
        ("https://host/day.csv", "aiohttp", "aiohttp"),
        ("gs://market/day.csv", "gcsfs", "gcsfs"),
        ("github://a:b@c/day.csv", "requests", "requests"),
        ("nonsense://host/day.csv", None, "nonsense:// is nothing that pyarrow or fsspec reads"),
    ],
)
def test_a_missing_package_is_named(uri: str, hidden: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if hidden is not None:
        for name in [
            name
            for name in sys.modules
            if name.startswith(("fsspec.implementations.http", "fsspec.implementations.github"))
        ]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, hidden, None)
    with contextlib.suppress(ImportError):
        from fsspec.registry import _registry

        for protocol in ("gs", "http", "https", "github"):
            _registry.pop(protocol, None)
    with pytest.raises(BarsError, match=words):
        read(uri)
