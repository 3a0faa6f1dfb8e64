"""The arguments of a Stager as data that travels, and back: options as plain values, tables by their hash.

Which options there are is told by the Stager, its dataclasses and the table ``[batches]`` of configurations alone;
nothing here names them again, so what they take a service serves. The service reads no file for anybody: where an
option takes a path, the client reads the table and sends it.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pyarrow as pa

from stager.batches.configured import BatchOptions
from stager.batches.ranks import Ranks, check_ranks
from stager.batches.stager import Stager
from stager.config import resolve
from stager.errors import ConfigError, SampleError, ServiceError
from stager.samples.labelling import as_targets
from stager.samples.labels import Labels
from stager.samples.normalize import Normalize, as_normalize
from stager.samples.schemes import SCHEMES, Scheme
from stager.samples.select import Select, check_select, nanoseconds
from stager.samples.tables import read_table
from stager.samples.targets import Target
from stager.service.protocol import Serving

_WEIGHTS = "weight"
_PLACES = ("device", "placement")
_HASH = "digest"


class _Carried(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table without compression, whose sizes so are those that are sent: Arrow's schema, and buffers as they lie."""

    schema: bytes
    n_rows: int
    columns: list[list[bytes | None]]


# ---------------------------------------------------------------------------------- client


def asked(name: str, arguments: Mapping[str, Any]) -> tuple[Serving, Ranks, dict[str, bytes]]:
    """What a service is asked to serve, this client's rank, and the tables that go with it, by hash.

    Parameters
    ----------
    name : str
        The pack.
    arguments : mapping
        Of :class:`stager.Stager`.

    Raises
    ------
    TypeError
        If a Stager has no such argument, or needs another one.
    ConfigError, SampleError
        If a value is not allowed, or can't be sent.
    """
    bound = inspect.signature(Stager.__init__).bind(None, name, **arguments)
    bound.apply_defaults()
    told = dict(list(bound.arguments.items())[2:])
    for place in _PLACES:
        if (value := told.pop(place)) != "auto":
            raise ConfigError(
                f"{place} is {value!r}; rows lie where the service staged them (stager serve --device), so leave it out"
            )
    target, select, ranks = told.pop("target"), told.pop("select"), told.pop("ranks")
    check_ranks(ranks)
    check_select(select)
    tables: dict[str, bytes] = {}
    targets: list[Any] = [_fields(one, tables) for one in as_targets(target)]
    normalize, weights = told.pop("normalize"), told.pop("weights")
    batches = {one: _plain(one, value) for one, value in told.items()}
    as_normalize(normalize)
    batches["normalize"] = _fields(normalize, tables) if isinstance(normalize, Normalize) else normalize
    batches["weights"] = weights
    if weights is not None and not isinstance(weights, str):
        batches["weights"] = _put(tables, _weights_table(weights))
    chosen = _fields(select, tables)
    if select.interval is not None:
        # As written, an instant may depend on who reads it.
        chosen["interval"] = [
            None if one is None else str(np.datetime64(nanoseconds(one), "ns")) for one in select.interval
        ]
    try:
        serving = msgspec.convert(
            {
                "name": name,
                "batches": batches,
                "target": targets if isinstance(target, (list, tuple)) else targets[0] if targets else None,
                "select": chosen,
                "n_ranks": ranks.world_size,
            },
            Serving,
        )
    except msgspec.ValidationError as error:
        raise SampleError(f"what is asked for can't be streamed: {error}") from None
    return serving, ranks, tables


def asked_split(scheme: Any) -> dict[str, Any]:
    """A scheme of folds as plain values.

    Raises
    ------
    SampleError
    """
    if not isinstance(scheme, Scheme):
        raise SampleError(f"split() got {scheme!r}; give WalkForward(5), PurgedKFold(5) or Combinatorial(10, 2)")
    name = next(name for name, kind in SCHEMES.items() if type(scheme) is kind)
    return {"scheme": name} | _fields(scheme, {})


def _fields(value: Any, tables: dict[str, bytes]) -> dict[str, Any]:
    """The fields of one of the dataclasses; tables are put among `tables`, and named by their hash."""
    found, files = {}, _table_fields(type(value))
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        if field.name in files and held is not None and not _may_be_a_column(type(value), field.name, held):
            found[field.name] = _put(tables, read_table(held, f"{type(value).__name__.lower()} {field.name}"))
        else:
            found[field.name] = _plain(field.name, held)
    return found


def _table_fields(kind: type[Any]) -> set[str]:
    """Fields that take a table."""
    if kind not in (Select, Labels):
        return set()
    hints = get_type_hints(kind)
    return {field.name for field in dataclasses.fields(kind) if hints[field.name] is Any}


def _may_be_a_column(kind: type[Any], field: str, value: Any) -> bool:
    """Contract rolls may be told by a column of the pack, which only the service knows; files have a suffix."""
    return kind is Select and field == "rolls" and isinstance(value, str) and "." not in value


def _plain(name: str, value: Any) -> Any:
    """A value as JSON has it."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    # Before integers, which NumPy takes durations for.
    if isinstance(value, (dt.timedelta, np.timedelta64)):
        return _duration(value)
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    if isinstance(value, (dt.date, np.datetime64)):
        return str(np.datetime64(nanoseconds(value), "ns"))
    if isinstance(value, (list, tuple)):
        return [_plain(name, one) for one in value]
    raise SampleError(f"{name} is {value!r:.80}, which is no data that a service could be sent; give texts or numbers")


def _duration(value: dt.timedelta | np.timedelta64) -> str:
    if isinstance(value, dt.timedelta):
        count = ((value.days * 86_400 + value.seconds) * 10**6 + value.microseconds) * 1000
    else:
        count = int(value.astype("timedelta64[ns]").astype(np.int64))
    return f"{count}ns"


def _weights_table(weights: Any) -> Any:
    try:
        given = np.asarray(weights)
    except (TypeError, ValueError) as error:
        raise SampleError(f"weights can't be read as a NumPy array: {error}; give one number for each sample") from None
    if given.dtype.kind not in "biuf" or given.ndim != 1:
        raise SampleError(
            f"weights are of {given.dtype} and shape {given.shape}; give one number for each sample, or 'uniqueness'"
        )
    # As a Stager takes them.
    return pa.table({_WEIGHTS: given.astype(np.float64)})


def _put(tables: dict[str, bytes], table: Any) -> dict[str, str]:
    raw = pack_table(table)
    digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
    tables[digest] = raw
    return {_HASH: digest}


def _travels(kind: Any) -> bool:
    is_some = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_timestamp, pa.types.is_date,
               pa.types.is_string, pa.types.is_large_string, pa.types.is_null)  # fmt: skip
    return any(one(kind) for one in is_some)


def pack_table(table: Any) -> bytes:
    """The bytes of a table, of those columns that an option may read: texts, numbers, instants."""
    names, arrays = [], []
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if not _travels(kind):
            continue
        whole: Any = pa.concat_arrays([*column.cast(kind).chunks, pa.array([], kind), pa.array([], kind)])
        names.append(name)
        arrays.append(whole)
    schema = pa.schema([pa.field(name, one.type) for name, one in zip(names, arrays, strict=True)])
    columns = [[None if part is None else part.to_pybytes() for part in one.buffers()] for one in arrays]
    return msgspec.msgpack.encode(_Carried(schema.serialize().to_pybytes(), table.num_rows, columns))


# --------------------------------------------------------------------------------- service


def read_carried(raw: bytes) -> Any:
    """The table of :func:`pack_table`, checked in full: it came from a stranger.

    Raises
    ------
    ServiceError
    """
    try:
        told = msgspec.msgpack.decode(raw, type=_Carried)
        schema: Any = pa.ipc.read_schema(pa.py_buffer(told.schema))
        if len(schema) != len(told.columns) or not all(_travels(field.type) for field in schema):
            raise ServiceError("a table has columns that no option takes")
        arrays = [
            pa.Array.from_buffers(
                field.type, told.n_rows, [None if one is None else pa.py_buffer(one) for one in parts]
            )
            for field, parts in zip(schema, told.columns, strict=True)
        ]
        table: Any = pa.table(arrays, schema=schema)
        table.validate(full=True)
    except (msgspec.MsgspecError, pa.ArrowException, ValueError, OverflowError, OSError) as error:
        raise ServiceError(f"a table that was sent is malformed: {error}") from None
    return table


def tables_of(serving: Serving) -> set[str]:
    """Hashes of the tables that a serving needs."""
    parts = [serving.select, serving.batches, *_targets(serving)]
    return {value[_HASH] for part in parts for value in part.values() if _is_reference(value)}


def arguments_of(serving: Serving, columns: tuple[str, ...], table: Callable[[str], Any]) -> dict[str, Any]:
    """Keywords of a Stager, of rank 0.

    Parameters
    ----------
    serving : Serving
    columns : tuple of str
        Of the pack.
    table : callable(hash)
        A table that was sent before.

    Raises
    ------
    ConfigError, SampleError, ServiceError
        If an option is unknown, a value is not allowed, or a file is named.
    """
    batches = dict(serving.batches)
    weights, normalize = batches.pop("weights", None), batches.get("normalize")
    if not _is_reference(weights):
        batches["weights"] = weights
    options = msgspec.structs.asdict(resolve(BatchOptions, "batches", toml=batches, environ={}))
    if _is_reference(weights):
        options["weights"] = table(weights[_HASH]).column(_WEIGHTS).to_numpy()
    if isinstance(normalize, dict):
        options["normalize"] = resolve(Normalize, "normalize", toml=normalize, environ={})
    targets = [_made(Labels if "table" in one else Target, "target", one, columns, table) for one in _targets(serving)]
    options["target"] = targets if isinstance(serving.target, list) else targets[0] if targets else None
    options["select"] = _made(Select, "select", serving.select, columns, table)
    options["ranks"] = Ranks(0, serving.n_ranks)
    return options


def split_of(told: Mapping[str, Any]) -> Scheme:
    """The scheme of folds that was asked for.

    Raises
    ------
    ConfigError, SampleError
    """
    values = dict(told)
    name = values.pop("scheme", None)
    if not isinstance(name, str) or name not in SCHEMES:
        raise ConfigError(f"split scheme is {name!r:.80}; there are: {', '.join(SCHEMES)}")
    return resolve(SCHEMES[name], "split", toml=values, environ={})


def _targets(serving: Serving) -> list[dict[str, Any]]:
    if serving.target is None:
        return []
    return serving.target if isinstance(serving.target, list) else [serving.target]


def _is_reference(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {_HASH} and isinstance(value[_HASH], str)


def _made(kind: Any, section: str, told: dict[str, Any], columns: tuple[str, ...], table: Callable[[str], Any]) -> Any:
    values = dict(told)
    for name in _table_fields(kind) & set(values):
        value = values[name]
        if _is_reference(value):
            values[name] = table(value[_HASH])
        elif value is not None and not (_may_be_a_column(kind, name, value) and value in columns):
            raise SampleError(
                f"{section}.{name} is {value!r:.80}; the service opens no files for others"
                + (f", and the pack has no such column, but {', '.join(columns)}" if name == "rolls" else "")
                + "; send the table itself"
            )
    return resolve(kind, section, toml=values, environ={})
