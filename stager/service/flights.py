"""Errors of the service across Arrow Flight, which has classes of its own."""

from __future__ import annotations

from typing import Any

import msgspec
from pyarrow import flight

# A message goes as a header of at most 8 KiB, percent-encoded, and again in one as base64.
_MOST_NBYTES, _ENCODED_NBYTES = 2000, 12


class Told(msgspec.Struct, frozen=True):
    """What an error says: the name of its class in :mod:`stager.errors`, and its text."""

    error: str
    message: str

    def as_error(self) -> flight.FlightServerError:
        """What a handler raises so that the client reads this with :func:`told_by`."""
        kind: Any = flight.FlightServerError
        told = Told(self.error, _short(self.message))
        made: flight.FlightServerError = kind(told.message, extra_info=msgspec.json.encode(told))
        return made


def _short(message: str) -> str:
    """The message, cut where it takes more room than there is; it may quote what a stranger sent."""
    room = _MOST_NBYTES
    for place, character in enumerate(message):
        is_plain = character.isascii() and character.isprintable() and character not in '%"\\'
        room -= 1 if is_plain else _ENCODED_NBYTES
        if room < 0:
            return f"{message[:place]} ..."
    return message


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
