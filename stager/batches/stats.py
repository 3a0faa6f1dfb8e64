"""What a Stager has served so far, and who waited for whom."""

from __future__ import annotations

from dataclasses import dataclass

from stager.config import format_nbytes


@dataclass(frozen=True)
class ServingStats:
    """Since the Stager was made.

    Attributes
    ----------
    n_batches, n_samples, nbytes : int
        What was handed out: x, y and mask.
    n_copied_batches : int
        Those that were handed out as copies, because a few batches that are kept held many groups.
    gather_seconds : float
        Work of the gathers: on a GPU from their begin to their end on its stream, on the host of all threads.
    gather_nbytes : int
        Bytes written in that time: on a GPU those of the groups whose events were done when this was asked.
    consumer_waited_seconds : float
        How long consumers waited for a gather: on a GPU their streams, on the host their threads. Much of it means that
        the training step is shorter than the gather.
    gather_waited_seconds : float
        How long the gather's stream waited until consumers had done with its memory: it could have served more.
    """

    n_batches: int = 0
    n_samples: int = 0
    nbytes: int = 0
    n_copied_batches: int = 0
    gather_seconds: float = 0.0
    gather_nbytes: int = 0
    consumer_waited_seconds: float = 0.0
    gather_waited_seconds: float = 0.0

    @property
    def gather_gbps(self) -> float:
        """10^9 bytes written in a second of gathering; 0 where nothing is known yet."""
        return self.gather_nbytes / self.gather_seconds / 1e9 if self.gather_seconds else 0.0

    def lines(self) -> list[tuple[str, str]]:
        """What and how much, for a table."""
        return [
            ("served", f"{self.n_batches:,} batches, {self.n_samples:,} samples, {format_nbytes(self.nbytes)}"),
            ("copied", f"{self.n_copied_batches:,} batches, because kept ones held many groups"),
            ("gather", f"{self.gather_seconds:.3g} s, {self.gather_gbps:.1f} GB/s written"),
            ("consumer waited", f"{self.consumer_waited_seconds:.3g} s for the gather"),
            ("gather waited", f"{self.gather_waited_seconds:.3g} s for the consumer"),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{name:15s}  {value}" for name, value in self.lines())
