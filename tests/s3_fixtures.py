"""An object store of the tests: a local S3 server (moto), which they fill over HTTP.

Without moto such tests are skipped; ``STAGER_REQUIRE_S3=1`` makes that a failure.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

Put = Callable[[str, bytes], str]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server with a bucket ``market``."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        reason = "moto[server] is not installed"
        if os.environ.get("STAGER_REQUIRE_S3") == "1":
            pytest.fail(f"STAGER_REQUIRE_S3 is set, and {reason}")
        pytest.skip(reason)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(150):
            try:
                send(f"{address}/market", b"")
                break
            except urllib.error.URLError:
                assert process.poll() is None, "the S3 server ended"
                time.sleep(0.2)
        else:
            pytest.fail("the S3 server did not answer")
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def put(server: str, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Store an object and return its URI."""
    for name, value in {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1",
                        "AWS_ENDPOINT_URL": server, "AWS_EC2_METADATA_DISABLED": "true"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)

    def store(key: str, data: bytes) -> str:
        send(f"{server}/market/{key}", data)
        return f"s3://market/{key}"

    return store


def send(url: str, data: bytes) -> None:
    headers = {"Content-Type": "application/octet-stream"}
    urllib.request.urlopen(urllib.request.Request(url, data, headers, method="PUT"), timeout=30).close()
