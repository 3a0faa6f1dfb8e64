"""What decoding an input may take, memory and threads, and the error of one that takes more."""

from __future__ import annotations

from dataclasses import dataclass, field

from stager.bars.threads import thread_count
from stager.config import format_nbytes
from stager.errors import BarsError


@dataclass(frozen=True)
class Room:
    """Memory and threads for decoding an input.

    Attributes
    ----------
    name : str
        The input.
    nbytes : int or None
        None: no limit.
    n_threads : int
        At most so many; other inputs may be decoded meanwhile.
    """

    name: str
    nbytes: int | None = None
    n_threads: int = field(default_factory=thread_count)

    def holds(self, nbytes: int) -> bool:
        """Whether so many bytes fit."""
        return self.nbytes is None or nbytes <= self.nbytes

    def check(self, nbytes: int, why: str, *, line: int | None = None, column: str | None = None) -> None:
        """Refuse what does not fit; ``why`` it can't be read in parts, and what helps; perhaps what shows it.

        Raises
        ------
        BarsError
        """
        if not self.holds(nbytes):
            assert self.nbytes is not None  # else it would fit
            raise BarsError(
                f"reading it takes about {format_nbytes(nbytes)} of memory, and {format_nbytes(self.nbytes)} of "
                f"--memory are for one input; {why}, or give more --memory or fewer --workers",
                path=self.name,
                line=line,
                column=column,
            )
