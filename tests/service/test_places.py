"""Where a service is found, who may enter, and what locks tell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from stager.errors import NoServiceError, ServiceError
from stager.service.places import Life, ServerPlace, Watched, check_service, is_locked, socket_path, start_of

ID = "0123456789abcdef" * 2


def test_the_socket_is_told_by_argument_then_environment_then_the_users_place(monkeypatch, tmp_path):
    monkeypatch.delenv("STAGER_SERVICE_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert str(socket_path()) == "/run/user/7/stager/service.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(socket_path()).endswith(f"/stager-{os.getuid()}/service.sock")
    monkeypatch.setenv("STAGER_SERVICE_SOCKET", "/a/b.sock")
    assert str(socket_path()) == "/a/b.sock"
    assert str(socket_path("/c.sock")) == "/c.sock"
    with pytest.raises(ServiceError, match="the system takes 100"):
        socket_path("/" + "x" * 120)
    with pytest.raises(ServiceError, match=r"holds one of # % , : \?"):
        socket_path("/tmp/a:b/s.sock")


def test_a_place_is_private_and_belongs_to_one_server(run_dir):
    place = ServerPlace(run_dir / "deep" / "s.sock")
    assert (run_dir / "deep").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ServiceError, match="another service has"):
        ServerPlace(place.path)
    place.close()
    assert list((run_dir / "deep").iterdir()) == []
    ServerPlace(place.path).close()


def test_a_directory_that_others_may_enter_is_refused(run_dir):
    run_dir.chmod(0o750)
    with pytest.raises(ServiceError, match="mode 0750, so others may enter"):
        ServerPlace(run_dir / "s.sock")
    with pytest.raises(ServiceError, match="others may enter"):
        check_service(run_dir / "s.sock")
    run_dir.chmod(0o700)
    (run_dir / "link").symlink_to(run_dir)
    with pytest.raises(ServiceError, match="links are not followed"):
        ServerPlace(run_dir / "link" / "s.sock")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(run_dir):
    (run_dir / "other").mkdir(mode=0o700)
    os.chown(run_dir / "other", 12345, 12345)
    with pytest.raises(ServiceError, match="belongs to user 12345"):
        ServerPlace(run_dir / "other" / "s.sock")


def test_what_is_no_socket_is_not_removed(run_dir):
    (run_dir / "s.sock").write_text("mine")
    with pytest.raises(ServiceError, match="is no socket"):
        ServerPlace(run_dir / "s.sock")
    assert (run_dir / "s.sock").read_text() == "mine"
    with pytest.raises(NoServiceError, match=r"stager serve"):
        check_service(run_dir / "s.sock")
    with pytest.raises(NoServiceError):
        check_service(run_dir / "nowhere" / "s.sock")


def test_a_life_is_locked_until_it_ends_and_tells_that_it_let_go(run_dir):
    place = ServerPlace(run_dir / "s.sock")
    life = Life(place.path, ID)
    watched = Watched(place.life(ID))
    assert watched.is_locked
    assert is_locked(place.life(ID))
    assert not watched.let_go
    life.end()
    life.end()
    assert not watched.is_locked
    assert watched.let_go
    assert not place.life(ID).exists()
    watched.close()
    place.close()


def test_a_file_that_is_not_locked_is_no_life(run_dir):
    place = ServerPlace(run_dir / "s.sock")
    with pytest.raises(ServiceError, match="makes and locks this file"):
        Watched(place.life(ID))
    place.life(ID).touch()
    with pytest.raises(ServiceError, match="it is not locked"):
        Watched(place.life(ID))
    place.life(ID).unlink()
    place.life(ID).symlink_to("/etc/hostname")
    with pytest.raises(ServiceError, match="makes and locks"):
        Watched(place.life(ID))
    place.close()


HOLDER = """
import sys, time
from pathlib import Path
from stager.service.places import Life
life = Life(Path(sys.argv[1]), sys.argv[2])
print("held", flush=True)
time.sleep(60)
"""


def test_a_stopped_process_lives_and_a_killed_one_does_not(run_dir):
    place = ServerPlace(run_dir / "s.sock")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place.path), ID], stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert holder.stdout.readline() == "held\n"
    watched = Watched(place.life(ID))
    started = start_of(holder.pid)
    holder.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    assert watched.is_locked
    # Also when something cleans the directory up, and when the server's place is taken over.
    place.life(ID).unlink()
    assert watched.is_locked
    assert start_of(holder.pid) == started
    holder.kill()
    deadline = time.monotonic() + 10
    while watched.is_locked:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not watched.let_go
    # Not reaped yet, and gone all the same.
    while start_of(holder.pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    holder.wait()
    holder.stdout.close()
    watched.close()
    place.close()


def test_a_new_server_removes_what_the_dead_left_and_nothing_of_the_living(run_dir):
    place = ServerPlace(run_dir / "s.sock")
    living = Life(place.path, ID)
    for name, age in (("a" * 32, 3600), ("b" * 32, 0)):
        place.life(name).touch()
        os.utime(place.life(name), (time.time() - age,) * 2)
    os.utime(place.life(ID), (time.time() - 3600,) * 2)
    os.close(place._lock)  # as its death would
    again = ServerPlace(place.path)
    # What was made just now may be about to be locked.
    assert {file.name for file in again.clients.iterdir()} == {ID, "b" * 32}
    again.close()
    assert {file.name for file in again.clients.iterdir()} == {ID}
    living.end()
