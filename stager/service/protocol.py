"""What client and server say to each other: typed messages with bounds, as JSON in Arrow Flight's actions.

An action's type names its message: ``list``, ``describe``, ``attach``, ``detach``, ``stats``, ``stage``, ``release``,
``share``. An exchange whose command is a :class:`Lease` is the lease of an attachment; its metadata are :class:`Beat`.
A ticket is a :class:`Ticket`. Everything else is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from stager.errors import ServiceError

PROTOCOL = 1
MAX_MESSAGE_NBYTES = 1 << 16
MAX_BEAT_NBYTES = 256

T = TypeVar("T")

Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^/\x00-\x1f\x7f]+$")]
PathText = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^/[^\x00]*$")]
Id = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Text = Annotated[str, Meta(max_length=400)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what is sent."""


class ListPacks(Message, frozen=True):
    """Which packs are there."""


class Describe(Message, frozen=True):
    """One pack."""

    name: Name


class Process(Message, frozen=True):
    """A client as it tells itself: process number, its start in clock ticks since boot, and what it runs."""

    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    started: Count
    command: Text


class Attach(Message, frozen=True):
    """Use a pack. `id` names the attachment and the file whose lock tells that the client lives."""

    id: Id
    name: Name
    process: Process
    protocol: Annotated[int, Meta(ge=1, lt=1 << 31)] = PROTOCOL
    on_cpu: bool = False


class Detach(Message, frozen=True):
    """The client has let go of its attachment."""

    id: Id


class Stats(Message, frozen=True):
    """Everything that `stager top` shows."""


class Stage(Message, frozen=True):
    """Hold a pack; under a name that is there already it is a new version."""

    name: Name
    path: PathText


class Release(Message, frozen=True):
    """Offer a pack no longer. `force` frees it under its clients; without `sure` it is only told what would break."""

    name: Name
    force: bool = False
    sure: bool = False


class Share(Message, frozen=True):
    """A table that other clients of the same pack may have, too; `digest` is of its bytes. Once it is filled, the
    service puts it on the GPU for who asks for that."""

    id: Id
    digest: Id
    nbytes: Annotated[int, Meta(ge=1, lt=1 << 48)]
    filled: bool = False
    on_device: bool = False


REQUESTS: dict[str, type[Message]] = {
    "list": ListPacks,
    "describe": Describe,
    "attach": Attach,
    "detach": Detach,
    "stats": Stats,
    "stage": Stage,
    "release": Release,
    "share": Share,
}


class Lease(Message, frozen=True):
    """Command of the exchange that is an attachment's lease."""

    id: Id


class Beat(Message, frozen=True):
    """A sign of life: batches served so far, and seconds from attaching to having the rows."""

    n_batches: Count
    attach_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class Fold(Message, frozen=True):
    """One part of one fold. `split` are the fields of a scheme and its name, as in table ``[split]``."""

    split: dict[str, Any]
    number: Count
    part: Literal["train", "test"]


class Serving(Message, frozen=True):
    """A Stager that the service is to serve from, by its arguments as :mod:`stager.service.carried` has them.

    `batches` are those of table ``[batches]``, `target` and `select` the fields of the classes. A table is named by its
    hash, ``{"digest": ...}``, and sent before. The batch size is of one rank.
    """

    name: Name
    batches: dict[str, Any]
    target: dict[str, Any] | Annotated[list[dict[str, Any]], Meta(max_length=64)] | None = None
    select: dict[str, Any] = {}
    n_ranks: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    fold: Fold | None = None


class Open(Message, frozen=True):
    """What a :class:`Serving` would serve, to one rank; with `split`, the folds of a scheme too."""

    serving: Serving
    rank: Count = 0
    split: dict[str, Any] | None = None


class TablePart(Message, frozen=True):
    """A part of a table that a serving names; parts of one table come in order. `digest` is of all its bytes."""

    digest: Id
    nbytes: Annotated[int, Meta(ge=1, lt=1 << 48)]
    offset: Count
    data: bytes


class Ticket(Message, frozen=True):
    """Batches ``first : stop`` of an epoch for one rank; `fingerprint` is of the data that they are to be of. With
    `facts` what a batch tells of its samples when asked, without the batch itself; with `latest` the one batch of the
    newest windows instead."""

    serving: Serving
    fingerprint: Id
    epoch: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    first: Count
    stop: Count
    rank: Count = 0
    facts: bool = False
    latest: bool = False


# ---------------------------------------------------------------------------------- answers


class DeviceHandle(msgspec.Struct, frozen=True):
    """Device memory as :class:`stager.cuda.ipc.Handle` has it."""

    uuid: str
    handle: bytes
    offset: int
    nbytes: int


class Probe(msgspec.Struct, frozen=True):
    """Some of the rows: the first, how many, and hash of their bytes."""

    first: int
    count: int
    digest: str


class PackInfo(msgspec.Struct, frozen=True):
    """A pack that is held. `device` is "cpu", the UUID of a GPU, or how many GPUs: "2 GPUs"."""

    name: str
    version: int
    path: str
    fingerprint: str
    checksum: str
    n_rows: int
    n_columns: int
    nbytes: int
    device: str
    placement: str
    staged_at: float
    seconds: float
    offered: bool
    n_clients: int


class Blocks(msgspec.Struct, frozen=True):
    """Where rows lie on GPUs, laid out as :class:`stager.cuda.spread.Layout` says."""

    handles: list[DeviceHandle]
    base_rows: int
    halo: int


class Grant(msgspec.Struct, frozen=True):
    """Leave to use a pack; without blocks the client maps the file."""

    pack: PackInfo
    blocks: Blocks | None
    probes: list[Probe]
    beat_seconds: float


class Pending(msgspec.Struct, frozen=True):
    """The pack is being staged; ask again."""

    phase: str
    done_nbytes: int
    total_nbytes: int


class Answer(msgspec.Struct, frozen=True):
    """What came of `attach` or `stage`: one of the two."""

    pending: Pending | None = None
    grant: Grant | None = None
    pack: PackInfo | None = None


class Opened(msgspec.Struct, frozen=True):
    """What is served: batches of an epoch, and the shape of one sample. `y_shape` is None without a target; `symbols`
    are those of a panel; `begin` is the state before the first batch, see :meth:`stager.Stager.state_dict`; `folds` are
    the numbers of samples of each fold, where a scheme was asked for."""

    fingerprint: str
    n_batches: int
    n_samples: int
    columns: list[str]
    x_shape: list[int]
    y_shape: list[int] | None
    mask_shape: list[int] | None
    symbols: list[str] | None
    begin: dict[str, Any]
    folds: list[dict[str, int]] | None = None


class ClientInfo(msgspec.Struct, frozen=True):
    """A client. `state`: "attaching", "live", "late" (no sign of life for a while) or "cut off" (its lease's connection
    has ended, the process has not)."""

    id: str
    name: str
    version: int
    pid: int
    command: str
    state: str
    on_cpu: bool
    attached_at: float
    silent_seconds: float
    n_batches: int
    batches_per_second: float


class Released(msgspec.Struct, frozen=True):
    """What a release did. `freed_nbytes` is 0 while clients keep the memory; `done` is false where nothing was done."""

    done: bool
    freed_nbytes: int
    clients: list[ClientInfo]


class Shared(msgspec.Struct, frozen=True):
    """Where a shared table lies; `filled` is false where the client is to fill it in."""

    path: str
    filled: bool
    handle: DeviceHandle | None = None


class StatsInfo(msgspec.Struct, frozen=True):
    """Everything about a service."""

    protocol: int
    version: str
    pid: int
    device: str
    started_at: float
    draining: bool
    packs: list[PackInfo]
    clients: list[ClientInfo]
    resident_nbytes: int
    table_nbytes: int
    n_attached: int
    n_batches: int
    n_refused: dict[str, int]
    n_errors: int
    attach_seconds: float


def decode(raw: Any, kind: type[T], what: str, limit: int = MAX_MESSAGE_NBYTES) -> T:
    """A message from its bytes, or a buffer of them.

    Raises
    ------
    ServiceError
        If it is too long or not of that kind.
    """
    if len(raw) > limit:
        raise ServiceError(f"{what} has {len(raw):,} bytes; at most {limit:,} are allowed")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ServiceError(f"{what} is malformed: {error}") from None


def encode(message: Any) -> bytes:
    """The bytes of a message."""
    return msgspec.json.encode(message)
