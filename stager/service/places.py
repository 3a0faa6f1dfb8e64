"""Where a service is found: a socket in a directory that only its user may enter.

::

    $XDG_RUNTIME_DIR/stager/  or  /tmp/stager-UID/      mode 0700
        service.sock                                    mode 0600; service.sock.inner, .stream: behind the gate
        service.sock.lock                               locked by the server for as long as it lives
        service.sock.clients/ID                         locked by a client for as long as it uses what it attached

Locks are ``flock``: the system gives them up when the process ends, however it ends, and keeps them while it is
stopped. So they tell of life what no time-out can, across the containers of a pod too.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import msgspec

from stager.config import resolve
from stager.errors import NoServiceError, ServiceError

# Longer ones don't fit the system's address of a unix socket.
_MOST_SOCKET_BYTES = 100
# In an address, gRPC takes these for something else, also when they are quoted.
_SPECIAL = frozenset("%#?:,")
# A client that has just made its file may not have locked it yet.
_STALE_SECONDS = 60.0
_ID = re.compile(r"[0-9a-f]{32}")
_LET_GO = b"let go\n"


class ServiceOptions(msgspec.Struct, frozen=True):
    """Table ``[service]``. An empty `socket` is the user's own place."""

    socket: str = ""


def socket_path(socket: str | Path | None = None) -> Path:
    """The socket meant: the argument, else ``STAGER_SERVICE_SOCKET``, else the user's own place.

    Raises
    ------
    ServiceError
        If the path is too long for a socket, or holds a character that can't be in its address.
    """
    told = resolve(ServiceOptions, "service", arguments={"socket": None if socket is None else str(socket)}).socket
    if told:
        path = Path(told).expanduser().absolute()
    else:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        folder = Path(runtime) / "stager" if runtime else Path(tempfile.gettempdir()) / f"stager-{os.getuid()}"
        path = folder / "service.sock"
    if len(os.fsencode(path)) > _MOST_SOCKET_BYTES:
        raise ServiceError(
            f"the socket's path {path} has {len(os.fsencode(path))} bytes, the system takes {_MOST_SOCKET_BYTES}; give "
            f"a shorter one with --socket or STAGER_SERVICE_SOCKET"
        )
    if set(str(path)) & _SPECIAL:
        raise ServiceError(f"the socket's path {path} holds one of {' '.join(sorted(_SPECIAL))}, which gRPC can't take")
    return path


def location(socket: Path) -> str:
    """Arrow Flight's address of a socket."""
    return f"grpc+unix://{quote(os.fsencode(socket))}"


def check_private(folder: Path) -> None:
    """Raise unless `folder` is a directory of this user that nobody else may enter.

    Raises
    ------
    ServiceError
    """
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise ServiceError(f"{folder} is no directory (links are not followed); choose another --socket")
    if status.st_uid != os.geteuid():
        raise ServiceError(f"{folder} belongs to user {status.st_uid}, not to you ({os.geteuid()}); choose another")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ServiceError(
            f"{folder} has mode {stat.S_IMODE(status.st_mode):04o}, so others may enter it, and whoever reaches the "
            f"socket can write the shared memory; choose a directory of mode 0700 (chmod 700 {folder})"
        )


def check_service(path: Path) -> None:
    """Raise unless a socket of this user is there.

    Raises
    ------
    NoServiceError, ServiceError
    """
    try:
        check_private(path.parent)
        there = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        there = False
    except PermissionError as error:
        raise ServiceError(f"{path}: {error.strerror}; a service is for the processes of its own user") from None
    if not there:
        raise NoServiceError(f"no service at {path}; start one with `stager serve PACK`, or give its --socket")


class ServerPlace:
    """The server's hold on a socket's place: makes the directory, locks it, clears what dead servers left.

    Raises
    ------
    ServiceError
        If another server has the place, or others may enter the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.clients = path, path.with_name(path.name + ".clients")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(path.parent)
        self._lock_path = path.with_name(path.name + ".lock")
        self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ServiceError(f"another service has {path}; stop it, or give another --socket") from None
        if path.exists() and not path.is_socket():
            os.close(self._lock)
            raise ServiceError(f"{path} is there and is no socket; give another --socket")
        #: The sockets of Arrow Flight itself, for this machine and for others.
        self.inner, self.stream = path.with_name(path.name + ".inner"), path.with_name(path.name + ".stream")
        self._unlink()
        self.clients.mkdir(mode=0o700, exist_ok=True)
        for file in self.clients.iterdir():
            # Those of living clients of a dead server stay: they are theirs.
            if not is_locked(file) and time.time() - file.stat().st_mtime > _STALE_SECONDS:
                file.unlink(missing_ok=True)

    def life(self, name: str) -> Path:
        """The file of a client."""
        assert _ID.fullmatch(name)
        return self.clients / name

    def _unlink(self) -> None:
        for file in (self.path, self.inner, self.stream):
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave nothing behind but the files of clients that live on."""
        self._unlink()
        for file in self.clients.iterdir():
            if not is_locked(file):
                file.unlink(missing_ok=True)
        if not any(self.clients.iterdir()):
            shutil.rmtree(self.clients)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)


class Life:
    """A client's file, locked for as long as it uses what it attached.

    Parameters
    ----------
    socket : Path
        Of the service.
    name : str
        The attachment's id.

    Raises
    ------
    NoServiceError
    """

    def __init__(self, socket: Path, name: str) -> None:
        self.path = socket.with_name(socket.name + ".clients") / name
        self._process = os.getpid()
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise NoServiceError(f"no service at {socket}; start one with `stager serve PACK`") from None
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def end(self) -> None:
        """Tell that everything was let go. Not in a forked child, whose lock is the same one."""
        if self._process != os.getpid() or self._file < 0:
            return
        file, self._file = self._file, -1
        os.write(file, _LET_GO)
        self.path.unlink(missing_ok=True)
        os.close(file)

    def remove(self) -> None:
        """Leave no file behind at the process's end; the lock stays until then."""
        if self._process == os.getpid():
            self.path.unlink(missing_ok=True)


class Watched:
    """The server's look at a client's file. Kept open, so that it tells the truth also when the file is removed.

    Raises
    ------
    ServiceError
        If there is no such file, or nobody has it locked.
    """

    def __init__(self, file: Path) -> None:
        try:
            self._file = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ServiceError(f"{file}: a client makes and locks this file before it attaches: {error}") from None
        if not self.is_locked:
            self.close()
            raise ServiceError(f"{file}: a client locks this file before it attaches, and it is not locked")

    @property
    def is_locked(self) -> bool:
        """Whether a living process, running or stopped, holds the lock."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return False

    @property
    def let_go(self) -> bool:
        """Whether the client said itself that it has let go of everything."""
        return os.pread(self._file, len(_LET_GO), 0) == _LET_GO

    def close(self) -> None:
        file, self._file = self._file, -1
        os.close(file)


def is_locked(file: Path) -> bool:
    """Whether a living process holds the file's lock; a file that is gone is held by nobody."""
    try:
        watched = Watched(file)
    except ServiceError:
        return False
    watched.close()
    return True


def start_of(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where there is none, or only its entry is left."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
