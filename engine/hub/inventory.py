"""Lists the models on disk: Chairlift's own, those in the hub's cache, and those in folders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from chairlift.engine.config import DEFAULT_MODEL, cache_dir
from chairlift.engine.errors import ModelError
from chairlift.engine.hub.fetch import SMOLLM2
from chairlift.engine.hub.folder_check import read_object
from chairlift.engine.hub.gguf.file import GGUFFile

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on disk.

    Attributes:
        name: the argument of ``chairlift serve`` for it.
        architecture: as named by its configuration or header; Chairlift may not support it.
        size: bytes of all its files.
        path: its file or folder.
    """

    name: str
    architecture: str
    size: int
    path: Path


def stored_models(folders: Iterable[Path] = ()) -> list[StoredModel]:
    """All models on disk, sorted by name; ``folders`` are searched recursively for more."""
    found = {model.path: model for model in _own_models()}
    for model in _hub_models():
        found.setdefault(model.path, model)
    for folder in folders:
        for model in _models_below(folder):
            found.setdefault(model.path, model)
    return sorted(found.values(), key=lambda model: (model.name.lower(), model.path))


def _own_models() -> Iterator[StoredModel]:
    for path in (cache_dir() / "models").glob("*.gguf"):
        default = path.name == Path(SMOLLM2.member).name
        yield _gguf(path, DEFAULT_MODEL if default else str(path))


def _hub_models() -> Iterator[StoredModel]:
    # Imported here because the import takes half a second.
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return
    for repository in cache.repos:
        if repository.repo_type != "model" or not repository.revisions:
            continue
        newest = max(repository.revisions, key=lambda revision: revision.last_modified)
        path = newest.snapshot_path
        if (path / "config.json").is_file():
            yield StoredModel(repository.repo_id, _architecture(path), newest.size_on_disk, path)
        for file in path.rglob("*.gguf"):
            yield _gguf(file, str(file))


def _models_below(folder: Path) -> Iterator[StoredModel]:
    for file in folder.rglob("*.gguf"):
        yield _gguf(file.absolute(), str(file))
    for file in folder.rglob("config.json"):
        path = file.parent
        # Other tools also use this file name.
        if any(path.glob("model*.safetensors")):
            size = sum(part.stat().st_size for part in path.iterdir() if part.is_file())
            yield StoredModel(str(path), _architecture(path), size, path.absolute())


def _gguf(path: Path, name: str) -> StoredModel:
    try:
        architecture = GGUFFile(path).get("general.architecture", str, UNKNOWN)
    except ModelError as error:
        architecture = f"({str(error).removeprefix(f'{path}: ')})"
    # The target of a link may be missing.
    size = path.stat().st_size if path.exists() else 0
    return StoredModel(name, architecture, size, path)


def _architecture(folder: Path) -> str:
    try:
        architecture = read_object(folder / "config.json").get("model_type")
    except ModelError:
        return "(config.json cannot be read)"
    return architecture if isinstance(architecture, str) else UNKNOWN
