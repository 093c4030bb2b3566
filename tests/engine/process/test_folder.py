"""The engine's folder is removed when no process uses it any more, and never before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
from support.api.server_process import short_folder

from chairlift.engine.process.folder import (
    BLACK_BOX,
    SOCKET,
    EngineFolder,
    remove,
    remove_abandoned,
)

NAME = "chairlift-engine-abcdefgh"
SERVER = """
import time
from chairlift.engine.process.folder import EngineFolder
folder = EngineFolder()
(folder.path / "computing").touch()
(folder.path / "socket").touch()
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = short_folder(tmp_path / "tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("length", [20, 40, 60, 70, 71, 72, 73, 74, 75, 76, 80, 130])
@pytest.mark.parametrize("letter", ["a", "é"])
def test_a_socket_path_fits_for_any_length_of_the_temporary_folder(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, length: int, letter: str
) -> None:
    long = temporary / (letter * (length - len(str(temporary)) - 1))
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = EngineFolder()
    try:
        with zmq.Context() as context, context.socket(zmq.PULL) as socket:
            socket.bind(f"ipc://{folder.path / SOCKET}")
    finally:
        folder.close()
    assert not folder.path.exists()


def test_a_folder_is_private_and_is_removed_with_its_files() -> None:
    folder = EngineFolder()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    for name in (SOCKET, BLACK_BOX):
        (folder.path / name).touch()
    folder.close()
    assert not folder.path.exists()
    remove(folder.path)  # a second time is no error


def test_folders_of_killed_servers_are_removed_and_others_stay(temporary: Path) -> None:
    ours = EngineFolder()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    servers = [
        subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, env=environment)
        for _ in range(3)
    ]
    try:
        folders = [Path(s.stdout.readline().decode().strip()) for s in servers if s.stdout]
        remove_abandoned()
        assert set(temporary.iterdir()) == {ours.path, *folders}
        for killed in (0, 2):
            servers[killed].send_signal(signal.SIGSTOP)  # a stopped process still counts
            remove_abandoned()
            assert folders[killed].exists()
            servers[killed].kill()
            servers[killed].wait()
        remove_abandoned()
        assert set(temporary.iterdir()) == {ours.path, folders[1]}
        assert sorted(p.name for p in folders[1].iterdir()) == [BLACK_BOX, SOCKET]
    finally:
        for server in servers:
            server.kill()
            server.communicate()
        ours.close()


def test_files_of_other_programs_are_left_alone(temporary: Path) -> None:
    victim = temporary / "victim"
    victim.mkdir()
    (victim / SOCKET).write_text("precious")
    (temporary / NAME).symlink_to(victim, target_is_directory=True)
    (temporary / "chairlift-engine-afile").write_text("a file")
    full = temporary / "chairlift-engine-full"
    full.mkdir()
    (full / "of-somebody").touch()
    (full / "folder").mkdir()
    near = temporary / "chairlift-engine-a.b"
    near.mkdir()
    linked = temporary / "chairlift-engine-linked"
    linked.mkdir()
    (linked / SOCKET).symlink_to(victim / SOCKET)
    before = sorted(temporary.iterdir())
    remove_abandoned()
    assert sorted(temporary.iterdir()) == [path for path in before if path != linked]
    assert (victim / SOCKET).read_text() == "precious"
    assert sorted(path.name for path in full.iterdir()) == ["folder", "of-somebody"]


def test_folders_of_other_users_are_left_alone(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary / NAME).mkdir()
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    remove_abandoned()
    assert (temporary / NAME).exists()
    monkeypatch.undo()
    tempfile.tempdir = str(temporary)
    remove_abandoned()
    assert not (temporary / NAME).exists()


def test_folders_survive_a_cleanup_during_their_creation() -> None:
    """Between creating and locking a folder, another server may remove it."""

    def make(_: int) -> bool:
        folder = EngineFolder()
        (folder.path / BLACK_BOX).touch()
        remove_abandoned()
        existed = (folder.path / BLACK_BOX).exists()
        folder.close()
        return existed and not folder.path.exists()

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(make, range(400)))
