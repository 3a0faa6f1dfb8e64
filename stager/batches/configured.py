"""The arguments of a Stager from a TOML file."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from stager.batches.resident import Resident, StagingOptions, as_pack
from stager.config import read_toml, resolve
from stager.errors import ConfigError
from stager.packs.layout import Pack
from stager.samples.derive import Derive, derive
from stager.samples.features import Feature
from stager.samples.labels import Labels
from stager.samples.normalize import Normalize
from stager.samples.panel import Panel, panel
from stager.samples.select import Select
from stager.samples.targets import Target
from stager.samples.timeframes import TimeFrame

_TABLES = {"source", "derive", "panel", "batches", "target", "select", "staging", "split", "arena", "overflow"}


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Table ``[batches]`` of a configuration."""

    window: Annotated[int, msgspec.Meta(ge=1)]
    batch_size: Annotated[int, msgspec.Meta(ge=1)]
    dilation: Annotated[int, msgspec.Meta(ge=1)] = 1
    seed: int = 0
    shuffle: Literal["full", "block", "time"] | bool = "full"
    block: Annotated[int, msgspec.Meta(ge=1)] | None = None
    last: Literal["keep", "drop", "pad"] = "keep"
    sampling: Literal["once", "weighted"] = "once"
    weights: Literal["uniqueness"] | None = None
    normalize: Literal["none", "last", "zscore"] | dict[str, str] = "none"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"


class DeriveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Table ``[derive]`` of a configuration; see :class:`stager.Derive`."""

    columns: list[str | dict[str, Any]] = []
    fill: Literal["none", "previous"] = "none"
    cap: int | None = None
    keep: list[str] = []
    session: str | None = None
    close_inclusive: bool = False
    rolls: str | None = None
    splits: str | None = None
    zone: str | None = None


class FeatureOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A column of ``[derive]`` that a function computes; see :class:`stager.Feature`."""

    name: str
    function: str
    lookback: int


class PanelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Table ``[panel]`` of a configuration; see :class:`stager.Panel`."""

    symbols: list[str] | None = None
    columns: list[str] | None = None
    session: str | None = None
    close_inclusive: bool = False


@dataclass(frozen=True)
class Configuration:
    """What a configuration and overrides say.

    Attributes
    ----------
    source : Resident, Pack, path or Table
        The bars, before anything is derived from them.
    recipe : Derive or None
    panel : Panel or None
        What is set side by side, after the recipe.
    arguments : dict
        Keywords of a Stager.
    staging : StagingOptions or None
        How to stage the source; None for a Resident, which is.
    """

    source: Any
    recipe: Derive | None
    panel: Panel | None
    arguments: dict[str, Any]
    staging: StagingOptions | None

    @cached_property
    def derived(self) -> Pack:
        """The pack of the source, with what the recipe derives; read and made once."""
        pack = as_pack(self.source)
        return pack if self.recipe is None else derive(pack, self.recipe)

    def prepared(self) -> Any:
        """What is staged: the source as it is, or what the recipe and the panel make of it."""
        if self.recipe is None and self.panel is None:
            return self.source
        return self.derived if self.panel is None else panel(self.derived, self.panel)


def read_configuration(path: str | Path, overrides: dict[str, Any]) -> Configuration:
    """What the file and the overrides say.

    Raises
    ------
    ConfigError
    """
    overrides = dict(overrides)
    tables = read_toml(path)
    if unknown := sorted(set(tables) - _TABLES):
        raise ConfigError(f"{path}: there is no table [{unknown[0]}]; see configs/default.toml")
    source = overrides.pop("source", None)
    if source is None:
        if not isinstance(tables.get("source"), str):
            raise ConfigError(f'{path}: says no source; write source = "bars.pack" above the first table')
        source = Path(path).parent / tables["source"]
    recipe = None
    if "derive" in tables and not isinstance(source, Resident):
        told = resolve(DeriveOptions, "derive", toml=_beside(path, tables["derive"], "rolls", "splits"))
        recipe = Derive(**msgspec.structs.asdict(told) | {"columns": [_column(one) for one in told.columns]})
    side_by_side = None
    if "panel" in tables and not isinstance(source, Resident):
        asked = resolve(PanelOptions, "panel", toml=tables["panel"])
        side_by_side = Panel(**msgspec.structs.asdict(asked))
    arguments: dict[str, Any] = {
        name: overrides.pop(name) for name in ("target", "select", "normalize", "ranks", "weights") if name in overrides
    }
    places: dict[str, Any] = {name: overrides.pop(name) for name in ("device", "placement") if name in overrides}
    if "target" not in arguments and "target" in tables:
        several = tables["target"]
        if isinstance(several, list):
            arguments["target"] = [_target(path, one) for one in several]
        else:
            arguments["target"] = _target(path, several)
    if "select" not in arguments:
        table = _beside(path, tables.get("select"), "rolls", "splits", "universe")
        arguments["select"] = resolve(Select, "select", toml=table)
    options = resolve(BatchOptions, "batches", toml=tables.get("batches"), arguments=overrides)
    normalize = options.normalize
    if isinstance(normalize, dict):
        arguments.setdefault("normalize", resolve(Normalize, "batches.normalize", toml=normalize))
    arguments = msgspec.structs.asdict(options) | arguments
    if isinstance(source, Resident):
        return Configuration(source, None, None, arguments | places, None)
    staging = resolve(StagingOptions, "staging", toml=tables.get("staging"), arguments=places)
    return Configuration(source, recipe, side_by_side, arguments, staging)


def _column(told: str | dict[str, Any]) -> str | TimeFrame | Feature:
    """A derived column: its name, or what makes it."""
    if isinstance(told, str):
        return told
    if "interval" in told:
        return resolve(TimeFrame, "derive.columns", toml=told)
    if "function" in told:
        asked = resolve(FeatureOptions, "derive.columns", toml=told)
        return Feature(asked.name, _function(asked.function), lookback=asked.lookback)
    raise ConfigError(
        f"[derive] columns has {told!r}; a column is a name, {{interval = '1h', columns = [...]}} or "
        f"{{name = 'mine', function = 'module:function', lookback = 5}}"
    )


def _function(text: str) -> Any:
    """What is meant by ``module:function``, imported as Python would; nothing is added to where it looks."""
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise ConfigError(f"[derive.columns] function is {text!r}; write module:function, as in my_columns:mean")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"[derive.columns] function is {text!r}: {error}; install the module, or name its folder in PYTHONPATH"
        ) from error
    if not hasattr(found, name):
        raise ConfigError(f"[derive.columns] function is {text!r}: the module {found.__name__} has no {name!r}")
    return getattr(found, name)


def _target(path: str | Path, table: Any) -> Target | Labels:
    if isinstance(table, dict) and "table" in table:
        return resolve(Labels, "target", toml=_beside(path, table, "table"))
    return resolve(Target, "target", toml=table)


def _beside(path: str | Path, table: Any, *names: str) -> Any:
    """The table, its names of files that lie beside the configuration made whole."""
    if not isinstance(table, dict):
        return table
    files = {name: Path(path).parent / table[name] for name in names if isinstance(table.get(name), str)}
    return table | {name: str(file) for name, file in files.items() if file.is_file()}
