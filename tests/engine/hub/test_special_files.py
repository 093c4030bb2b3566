"""Pipes, devices and directories in place of a model's files: an error, and nothing waits."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny import tiny_model_dir

from chairlift.engine.errors import ModelError
from chairlift.engine.hub.folder_check import check_directory, read_object
from chairlift.engine.hub.gguf.file import GGUFFile
from chairlift.engine.hub.inventory import stored_models
from chairlift.engine.hub.source import resolve

NAMES = (
    *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("generation_config.json", "chat_template.jinja", "preprocessor_config.json"),
    *("special_tokens_map.json", "model.safetensors.index.json"),
)


def _socket(path: Path) -> None:
    # A socket's path is at most about 100 characters long.
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"{short}/s")
        os.rename(f"{short}/s", path)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "socket": _socket,
    "directory": Path.mkdir,
    "link to a pipe": lambda path: (os.mkfifo(f"{path}.p"), path.symlink_to(f"{path}.p")),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_named(name: str, kind: str, folder: Path) -> None:
    check_directory(folder)
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    with pytest.raises(ModelError, match=f"^{re.escape(str(folder / name))}: ") as refused:
        check_directory(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["extra.json", "modeling_own.py", "own.jinja", "spiece.model"])
def test_files_of_unknown_names_may_be_folders_but_no_pipes(name: str, folder: Path) -> None:
    (folder / name).mkdir()
    (folder / "assets").mkdir()
    (folder / "broken.bin").symlink_to("nothing")
    (folder / "broken.json").symlink_to("nothing")
    check_directory(folder)
    (folder / name).rmdir()
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match=name):
        check_directory(folder)


def test_readers_of_single_files_do_not_wait_for_a_pipe(tmp_path: Path, model: Path) -> None:
    for name in ("config.json", "x.gguf"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "model.safetensors").symlink_to(model / "model.safetensors")
    with pytest.raises(ModelError, match="pipe"):
        read_object(tmp_path / "config.json")
    with pytest.raises(ModelError, match="no file"):
        GGUFFile(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match="neither a directory nor"):
        resolve(str(tmp_path / "x.gguf"))
    found = {Path(one.name).name: one.architecture for one in stored_models([tmp_path])}
    assert found["x.gguf"] == "(cannot be read: it is no file)"
    assert found[tmp_path.name] == "(config.json cannot be read)"
