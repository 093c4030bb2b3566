"""The cached list of transformers' classes equals the list that transformers makes itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.engine.device.transformers_cache import Scan, cached

_IMPORT = """
import json, sys
from chairlift.engine.device.transformers_cache import cache_transformers_scan
if sys.argv[1] == "cached":
    cache_transformers_scan()
import transformers
from transformers.utils.import_utils import define_import_structure
models = transformers.__path__[0] + "/models"
lists = [define_import_structure(path, prefix) for path, prefix in (
    (models, "models"), (models + "/__init__.py", None), (models + "/llama", None))]
print(json.dumps([sorted(
    (sorted(backends), name, sorted(classes))
    for backends, names in found.items() for name, classes in names.items()
) for found in lists]))
print(transformers.AutoTokenizer.__name__)
"""


def _lists(folder: Path, how: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT, how],
        env={**os.environ, "CHAIRLIFT_CACHE": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    lists, name = done.stdout.splitlines()
    assert name == "AutoTokenizer"
    return json.loads(lists)


@pytest.mark.slow
def test_the_list_is_the_one_of_transformers(tmp_path: Path) -> None:
    expected = _lists(tmp_path, "not cached")
    assert [len(each) > least for each, least in zip(expected, (500, 500, 0), strict=True)]
    assert not list(tmp_path.iterdir())
    assert _lists(tmp_path, "cached") == expected
    [file] = (tmp_path / "transformers").iterdir()
    modified = file.stat().st_mtime_ns
    assert _lists(tmp_path, "cached") == expected
    assert file.stat().st_mtime_ns == modified


@pytest.mark.parametrize(
    "damage", [b"", b"[[", b'{"set": ["a"]}', b"[1]", b'[["a", {}]]', b'[[["a"], {"b": [1]}]]']
)
def test_a_damaged_file_is_written_anew(tmp_path: Path, damage: bytes) -> None:
    scan = {frozenset({"torch"}): {"modeling": {"A"}}}
    calls: list[Any] = []
    file = tmp_path / "file"

    def read(path: Any, prefix: str | None) -> Scan:
        calls.append(path)
        return scan

    assert cached(read, tmp_path, file)(tmp_path) == scan
    whole = file.read_bytes()
    file.write_bytes(damage)
    assert cached(read, tmp_path, file)(tmp_path) == scan
    assert len(calls) == 2
    assert file.read_bytes() == whole


TEXT = st.text(max_size=3)
FILES = st.dictionaries(TEXT, st.sets(TEXT, max_size=3), max_size=3)
SCANS = st.dictionaries(st.frozensets(TEXT, max_size=2), FILES, max_size=3)


@given(SCANS)
def test_every_scan_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, scan: Scan
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    calls = []

    def read(path: Any, prefix: str | None) -> Scan:
        calls.append((path, prefix))
        return scan

    models = folder / "models"
    for _ in range(2):
        wrapped = cached(read, models, folder / "file")
        assert wrapped(models) == scan
        assert wrapped(str(models / "__init__.py")) == scan
        assert wrapped(models, "a") == {
            backends: {f"a.{name}": found for name, found in files.items()}
            for backends, files in scan.items()
        }
    assert calls == [(models, None)]
    assert wrapped(models / "one", "b") == scan
    assert calls[1:] == [(models / "one", "b")]


def test_a_folder_that_cannot_be_written_costs_the_scan(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    scan = {frozenset({"a"}): {"b": {"c"}}}
    wrapped = cached(lambda path, prefix: scan, tmp_path, tmp_path / "file" / "cache")
    assert wrapped(tmp_path) == scan
    assert wrapped(tmp_path) == scan
