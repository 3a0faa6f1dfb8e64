"""Messages have bounds, and nothing else is taken for one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.errors import ServiceError
from stager.service import protocol
from stager.service.protocol import MAX_MESSAGE_NBYTES, REQUESTS, decode, encode

ID = "0123456789abcdef" * 2
ME = protocol.Process(1, 2, "train.py")

GOOD = [
    protocol.ListPacks(),
    protocol.Describe("prices"),
    protocol.Attach(ID, "prices", ME),
    protocol.Detach(ID),
    protocol.Stats(),
    protocol.Stage("prices", "/data/prices.pack"),
    protocol.Release("prices", force=True, sure=True),
    protocol.Share(ID, ID, 7),
]


@pytest.mark.parametrize("message", GOOD, ids=lambda m: type(m).__name__)
def test_a_message_comes_back_as_it_was(message):
    assert decode(encode(message), type(message), "it") == message
    assert type(message) in REQUESTS.values()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (protocol.Describe, b'{"name": ""}'),
        (protocol.Describe, b'{"name": "a/b"}'),
        (protocol.Describe, b'{"name": "a\\nb"}'),
        (protocol.Describe, b'{"name": 7}'),
        (protocol.Describe, b'{"name": "a", "more": 1}'),
        (protocol.Describe, b"[]"),
        (protocol.Describe, b""),
        (protocol.Describe, b"\xff\xfe"),
        (protocol.Describe, b'{"name": "\xff"}'),
        (protocol.Describe, b"[" * 50_000),
        (protocol.Detach, b'{"id": "../../../../etc/passwd"}'),
        (protocol.Detach, b'{"id": "0123"}'),
        (protocol.Detach, b'{"id": "' + ID.upper().encode() + b'"}'),
        (protocol.Stage, b'{"name": "a", "path": "relative.pack"}'),
        (protocol.Stage, b'{"name": "a", "path": "/a\\u0000b"}'),
        (protocol.Share, b'{"id": "%s", "digest": "%s", "nbytes": -1}' % (ID.encode(), ID.encode())),
        (protocol.Beat, b'{"n_batches": -1}'),
        (protocol.Beat, b'{"n_batches": 1e400}'),
        (protocol.Beat, b'{"n_batches": 1, "attach_seconds": NaN}'),
        (protocol.Beat, b'{"n_batches": 4611686018427387904}'),
    ],
)
def test_what_is_malformed_is_refused(kind, body):
    with pytest.raises(ServiceError, match="the message is malformed"):
        decode(body, kind, "the message")


def test_what_is_too_long_is_refused_unread():
    body = b'{"name": "a"}' + b" " * MAX_MESSAGE_NBYTES
    with pytest.raises(ServiceError, match=r"has 65,549 bytes; at most 65,536"):
        decode(body, protocol.Describe, "the message")


@given(st.binary(max_size=200), st.sampled_from(sorted(REQUESTS)))
def test_any_bytes_are_a_message_or_refused(body, name):
    kind = REQUESTS[name]
    try:
        message = decode(body, kind, "it")
    except ServiceError:
        return
    assert msgspec.json.decode(encode(message), type=kind) == message
