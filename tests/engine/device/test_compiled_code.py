"""Compiled code comes from the cache folder, unless the file there is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.engine.device.compiled_code import cached


class Compiler:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, source: str) -> bytes:
        self.calls += 1
        return f"code of {source}".encode()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path))
    return tmp_path


def test_each_source_is_compiled_once_for_each_target(folder: Path) -> None:
    compiler = Compiler()
    for _ in range(2):
        for source in ("a", "b"):
            for target in ("here", "there"):
                assert cached(compiler, source, target) == f"code of {source}".encode()
    assert compiler.calls == 4


@pytest.mark.parametrize("damage", ["empty", "short", "changed", "a folder"])
def test_a_damaged_file_is_not_used(folder: Path, damage: str) -> None:
    compiler = Compiler()
    cached(compiler, "a", "here")
    [file] = (folder / "compiled").iterdir()
    whole = file.read_bytes()
    if damage == "a folder":
        file.unlink()
        file.mkdir()
    else:
        damaged = {"empty": b"", "short": whole[:-1], "changed": whole[:-1] + b"?"}
        file.write_bytes(damaged[damage])
    for _ in range(2):
        assert cached(compiler, "a", "here") == b"code of a"
    assert compiler.calls == (3 if damage == "a folder" else 2)
    assert [*(folder / "compiled").iterdir()] == [file], "no partial file is left"


def test_a_folder_that_cannot_be_written_costs_the_compilation(folder: Path) -> None:
    (folder / "compiled").write_text("not a folder")
    compiler = Compiler()
    for _ in range(2):
        assert cached(compiler, "a", "here") == b"code of a"
    assert compiler.calls == 2
