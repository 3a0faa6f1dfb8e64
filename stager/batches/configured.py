"""The arguments of a Stager from a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from stager.batches.resident import Resident, StagingOptions
from stager.config import read_toml, resolve
from stager.errors import ConfigError
from stager.samples.schemes import SCHEMES, Scheme
from stager.samples.select import Select
from stager.samples.targets import Target

_TABLES = {"source", "batches", "target", "select", "split", "staging", "arena", "overflow"}


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Table ``[batches]`` of a configuration."""

    window: Annotated[int, msgspec.Meta(ge=1)]
    batch_size: Annotated[int, msgspec.Meta(ge=1)]
    seed: int = 0
    shuffle: Literal["full"] | bool = "full"
    last: Literal["keep", "drop"] = "keep"


class _SchemeName(msgspec.Struct, frozen=True):
    scheme: str


def read_scheme(path: str | Path) -> Scheme | None:
    """The scheme of table ``[split]``; None without the table.

    Raises
    ------
    ConfigError, SampleError
        If it names no scheme, or a value of the scheme is not allowed.
    """
    table = read_toml(path).get("split")
    if table is None:
        return None
    named = {name: table[name] for name in table if name == "scheme"} if isinstance(table, dict) else table
    name = resolve(_SchemeName, "split", toml=named).scheme
    if name not in SCHEMES:
        raise ConfigError(f"[split] scheme is {name!r}; there are: {', '.join(SCHEMES)}")
    return resolve(SCHEMES[name], "split", toml={name: value for name, value in table.items() if name != "scheme"})


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
