"""The arguments of a Stager from a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from stager.batches.resident import Resident, StagingOptions
from stager.config import read_toml, resolve
from stager.errors import ConfigError
from stager.samples.select import Select
from stager.samples.targets import Target

_TABLES = {"source", "batches", "target", "select", "staging", "split", "arena", "overflow"}


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Table ``[batches]`` of a configuration."""

    window: Annotated[int, msgspec.Meta(ge=1)]
    batch_size: Annotated[int, msgspec.Meta(ge=1)]
    seed: int = 0
    shuffle: Literal["full"] | bool = "full"
    last: Literal["keep", "drop"] = "keep"


def read_arguments(path: str | Path, overrides: dict[str, Any]) -> tuple[Any, dict[str, Any], StagingOptions | None]:
    """What the file and the overrides say.

    Returns
    -------
    source : Resident, Pack, path or Table
    arguments : dict
        Keywords of a Stager.
    staging : StagingOptions or None
        How to stage the source; None for a Resident, which is.

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
    arguments: dict[str, Any] = {name: overrides.pop(name) for name in ("target", "select") if name in overrides}
    places: dict[str, Any] = {name: overrides.pop(name) for name in ("device", "placement") if name in overrides}
    if "target" not in arguments and "target" in tables:
        arguments["target"] = resolve(Target, "target", toml=tables["target"])
    if "select" not in arguments:
        arguments["select"] = resolve(Select, "select", toml=tables.get("select"))
    options = resolve(BatchOptions, "batches", toml=tables.get("batches"), arguments=overrides)
    arguments |= msgspec.structs.asdict(options)
    if isinstance(source, Resident):
        return source, arguments | places, None
    return source, arguments, resolve(StagingOptions, "staging", toml=tables.get("staging"), arguments=places)
