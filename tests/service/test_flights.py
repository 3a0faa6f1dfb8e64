"""Errors across Arrow Flight: what was said arrives, however long and odd it is."""

from __future__ import annotations

import pytest
from pyarrow import flight

from stager.service.flights import Told, told_by

pytestmark = pytest.mark.service

PLAIN = "window is 0; it must be an integer of at least 1 row"
ODD = {"ascii": "w", "control": "\x01", "quotes": '%"\\', "wide": "\U000f4a1b", "mixed": 'a\U000f4a1b"\n'}


class Complaining(flight.FlightServerBase):
    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        raise Told("SampleError", action.body.to_pybytes().decode()).as_error()


@pytest.mark.parametrize("kind", ODD)
def test_any_message_arrives(kind: str) -> None:
    with Complaining("grpc://127.0.0.1:0") as server:
        client = flight.FlightClient(f"grpc://127.0.0.1:{server.port}")
        for message in (PLAIN, "", ODD[kind] * 20, ODD[kind] * 100_000):
            with pytest.raises(flight.FlightServerError) as caught:
                list(client.do_action(flight.Action("complain", message.encode())))
            told = told_by(caught.value)
            assert told is not None
            assert told.error == "SampleError"
            assert told.message == message or told.message.endswith(" ...")
            assert message.startswith(told.message.removesuffix(" ..."))
            assert len(told.message) >= min(len(message), 150)
        client.close()
