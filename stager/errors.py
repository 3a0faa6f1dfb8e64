"""Every error that stager raises on purpose.

::

    StagerError
    ├── ConfigError (ValueError)          an option or a configuration file is wrong
    ├── BarsError (ValueError)            an input file or table can't be read as bars
    ├── PackError (ValueError)            a pack can't be written or read
    │   ├── PackExistsError (FileExistsError)
    │   ├── NotAPackError
    │   ├── PackVersionError
    │   └── PackDamagedError
    ├── SampleError (ValueError)          the request leaves no sample, or can't be met
    ├── DeviceError (RuntimeError)        no usable GPU, CuPy or NVRTC
    ├── StagingError (RuntimeError)       rows could not be staged
    │   ├── StagingStalled (TimeoutError)
    │   ├── StagingMemoryError (MemoryError)
    │   └── CaptureActiveError
    ├── ClosedError (RuntimeError)        used after close()
    ├── ServiceError (RuntimeError)       the service refused a request, or what it holds can't be used
    │   └── NoServiceError (ConnectionError)
    ├── ArenaError (RuntimeError)         the arena was used against its contract
    │   └── ArenaEscapeError
    └── TimelineError (ValueError)        a file is no timeline of an arena

Each class also inherits the built-in error in brackets, so a caller may catch either. Running out of device memory
inside the arena is CuPy's ``OutOfMemoryError``, because CuPy's own code catches exactly that.
"""

from __future__ import annotations

from pathlib import Path


class StagerError(Exception):
    """Base class. The message says what was wrong, the value, what is allowed, and the remedy."""


class ConfigError(StagerError, ValueError):
    """An option, an environment variable or a configuration file has an unusable value."""


class BarsError(StagerError, ValueError):
    """An input can't be read as bars.

    Parameters
    ----------
    message : str
        What was wrong, and the remedy.
    path : str or Path, optional
        The file at fault.
    line : int, optional
        Line in the file, counted from 1 (the row of a table for Parquet and Arrow inputs).
    column : str, optional
        Name of the column at fault.
    """

    def __init__(
        self, message: str, *, path: str | Path | None = None, line: int | None = None, column: str | None = None
    ) -> None:
        self.message, self.path, self.line, self.column = message, path, line, column
        place = "" if path is None else str(path)
        if line is not None:
            place += f":{line}" if place else f"line {line}"
        if column is not None:
            place += f", column {column!r}" if place else f"column {column!r}"
        super().__init__(f"{place}: {message}" if place else message)


class PackError(StagerError, ValueError):
    """A pack can't be written or read."""


class PackExistsError(PackError, FileExistsError):
    """The target of a pack exists and overwriting was not asked for."""


class NotAPackError(PackError):
    """The path is no pack directory."""


class PackVersionError(PackError):
    """The pack was written by a newer stager."""


class PackDamagedError(PackError):
    """Files of a pack are missing, truncated, changed, or contradict each other."""


class SampleError(StagerError, ValueError):
    """The request leaves no sample, or asks for one that doesn't exist."""


class DeviceError(StagerError, RuntimeError):
    """There is no usable GPU, or CuPy or one of its libraries is missing."""


class StagingError(StagerError, RuntimeError):
    """Rows could not be staged; nothing stays allocated or registered."""


class StagingStalled(StagingError, TimeoutError):
    """A phase of staging made no progress for ``stall_timeout`` seconds."""


class StagingMemoryError(StagingError, MemoryError):
    """Device or host memory would not hold what was asked for."""


class CaptureActiveError(StagingError):
    """A stream is capturing a CUDA graph, and staging would break the capture."""


class ClosedError(StagerError, RuntimeError):
    """A closed object was used."""


class ServiceError(StagerError, RuntimeError):
    """The service refused a request, or what it holds can't be used from here."""


class NoServiceError(ServiceError, ConnectionError):
    """No service answers."""


class ArenaError(StagerError, RuntimeError):
    """The arena was used against its contract."""


class ArenaEscapeError(ArenaError):
    """Memory of a step outlived it, and ``on_escape="raise"`` was asked for."""


class TimelineError(StagerError, ValueError):
    """A file is no timeline of an arena; the message begins with the file, and the line where there is one."""

    def __init__(self, message: str, *, path: str | Path, line: int | None = None) -> None:
        super().__init__(f"{path}: {message}" if line is None else f"{path}:{line}: {message}")
