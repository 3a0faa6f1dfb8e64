"""Errors of the service across Arrow Flight, which has classes of its own."""

from __future__ import annotations

from typing import Any

import msgspec
from pyarrow import flight


class Told(msgspec.Struct, frozen=True):
    """What an error says: the name of its class in :mod:`stager.errors`, and its text."""

    error: str
    message: str

    def as_error(self) -> flight.FlightServerError:
        """What a handler raises so that the client reads this with :func:`told_by`."""
        kind: Any = flight.FlightServerError
        made: flight.FlightServerError = kind(self.message, extra_info=msgspec.json.encode(self))
        return made


#: Ends a lease whose memory is to be freed.
FORCED = Told("forced", "the pack was released by force")
#: Ends a lease when the service does.
ENDING = Told("ending", "the service is ending")

#: Answers a ticket whose tables gave way to others: the client opens it again, and sends them.
LOST = Told("lost", "tables that were sent are not here any more; open it again")


def told_by(error: Any) -> Told | None:
    """What the service said; None if the error is not its own."""
    try:
        return msgspec.json.decode(getattr(error, "extra_info", None) or b"", type=Told)
    except msgspec.MsgspecError:
        return None
