"""A training step that is named on the command line, and whose errors are told by its name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from stager.batches.batch import Batch
from stager.errors import ConfigError, StagerError


class StepError(StagerError):
    """The training step raised."""


class TrainingStep:
    """A function that is called with a :class:`stager.batches.batch.Batch`.

    Parameters
    ----------
    function : callable
    name : str, optional
        What errors call it.
    """

    def __init__(self, function: Callable[[Batch], Any], name: str | None = None) -> None:
        self._function = function
        self.name = name or getattr(function, "__qualname__", repr(function))

    def __call__(self, batch: Batch) -> Any:
        """Call it.

        Raises
        ------
        StepError
            If it raises, naming the error and the line.
        """
        try:
            return self._function(batch)
        except Exception as error:
            raise StepError(f"the step {self.name} raised {_told(error, 1)}") from error


def load_step(name: str) -> TrainingStep:
    """The function that a text names.

    Parameters
    ----------
    name : str
        "module:function", searched from the working directory too, or "file.py:function". What the module imports
        later on is searched there as well, so the folder stays in ``sys.path``.

    Raises
    ------
    ConfigError
        If there is no such module, file or function, or the module raises.
    """
    place, colon, attribute = name.rpartition(":")
    if not (colon and place and attribute):
        raise ConfigError(f"the step is {name!r}; write module:function or file.py:function, such as train.py:step")
    module = _of_file(name, Path(place)) if place.endswith(".py") else _of_module(name, place)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise ConfigError(
                f"the step {name}: {place} has no {attribute!r}; "
                + (f"it has {', '.join(sorted(there))}" if there else "it has no function at all")
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"the step {name} is {found!r}, which can't be called; name a function of one batch")
    return TrainingStep(found, name)


def _of_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"the step {name}: there is no file {path}")
    # A name of its own: a file may be called as a module that is imported already.
    spec = importlib.util.spec_from_file_location(f"stager_step_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    _search(path.resolve().parent)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"the step {name}: importing {path} raised {_told(error, 1)}") from error
    return module


def _of_module(name: str, module: str) -> ModuleType:
    _search(Path.cwd())
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        text = f"the step {name}: importing {module} raised {_told(error, 1)}"
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            text += "; name a module that Python finds from here, or a file.py"
        raise ConfigError(text) from error


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _told(error: BaseException, n_ours: int) -> str:
    """An error, and where in the user's file it was raised or what called it; the first frames are ours."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)[n_ours:]
        if not frame.filename.startswith("<frozen importlib") and "importlib" not in Path(frame.filename).parts
    ]
    text = str(error)
    told = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{told} ({frames[0].filename}, line {frames[0].lineno})" if frames else told
