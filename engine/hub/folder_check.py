"""Checks a model's directory before anything slow is imported or started."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.engine.errors import ModelError, UnsupportedModel

WEIGHTS = "model*.safetensors"
# More layers than any model has; mlx-lm would make them all before it compares them with the files.
MAX_LAYERS = 10_000
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
# One of these files has a tokenizer's vocabulary.
_TOKENIZERS = {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"}
# Other names of such a file; only a model's own code reads "qwen.tiktoken".
_TIKTOKEN = ("tiktoken.model", ".tiktoken")
_TOKENIZER_OBJECTS = {
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
    "generation_config.json",
}
# Files that some loader opens if there is an entry of that name, whatever it is.
_FILES = {
    *_TOKENIZERS,
    *_TOKENIZER_OBJECTS,
    *("chat_template.jinja", "merges.txt", "model.safetensors.index.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
}
# Types of files that loaders may open by other names.
_SUFFIXES = {".json", ".jinja", ".model", ".txt", ".tiktoken", ".safetensors", ".py"}
# The name of one part of a model: its number, and how many there are.
_PART = re.compile(r"(model.*-)(\d{5})-of-(\d{5})(\.safetensors)")
# A clone of a repository has such a text in place of a large file until "git lfs pull".
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# The configuration of a LoRA adapter, in mlx-lm's format and PEFT's.
_ADAPTER = "adapter_config.json"
# File names that an error lists at most.
_LISTED = 6
_OTHER_WEIGHTS = {
    ".bin": "PyTorch weights",
    ".pt": "PyTorch weights",
    ".pth": "PyTorch weights",
    ".ckpt": "PyTorch weights",
    ".npz": "NumPy weights",
    ".h5": "Keras weights",
    ".onnx": "an ONNX model",
}


def check_directory(path: Path) -> dict[str, Any]:
    """Checks that a directory has a configuration and weights; returns the configuration.

    Raises:
        ModelError: a file is missing or no file, or config.json is damaged; the message says what
            to do.
        UnsupportedModel: the weights have another format.
    """
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    if not names:
        raise ModelError(
            f"{path}: the directory is empty; name a directory with config.json and "
            f"{WEIGHTS}, a .gguf file, or a hub id"
        )
    if "config.json" not in names:
        raise _without_configuration(path, names)
    for name in names:
        try:
            _check_kind(path / name)
        except OSError as error:
            raise ModelError(f"{path / name}: {error.strerror}") from error
    config = read_config(path)
    shards = sorted(path.glob(WEIGHTS))
    if not shards:
        raise _without_weights(path, names)
    return config


def _check_kind(entry: Path) -> None:
    """Raises ModelError if a loader could open an entry that is no file: a pipe would block it."""
    if entry.is_file():
        return
    is_read = entry.name in _FILES or entry.match(WEIGHTS)
    if is_read and not entry.exists():
        raise ModelError(f"{entry}: a link to a file that does not exist; fetch it again")
    if is_read or (entry.suffix in _SUFFIXES and entry.exists() and not entry.is_dir()):
        raise _no_file(entry)


def _no_file(entry: Path) -> ModelError:
    kind = "a directory" if entry.is_dir() else "a pipe, socket or device"
    return ModelError(f"{entry}: {kind} instead of a file; fetch it again")


def absent_parts(path: Path) -> list[str]:
    """The files of weights that a directory lacks, by the numbers in the names of the others."""
    names = {file.name for file in path.glob(WEIGHTS)}
    counted = {
        (part[1], int(part[3]), part[4]) for name in names if (part := _PART.fullmatch(name))
    }
    expected = {
        f"{stem}{number:05d}-of-{count:05d}{suffix}"
        for stem, count, suffix in counted
        for number in range(1, count + 1)
    }
    return sorted(expected - names)


def damaged_file(file: Path, cause: str) -> ModelError:
    """The error for a file whose content is not what its name says.

    Args:
        cause: what is wrong with it, unless it is a pointer of Git LFS.
    """
    try:
        with file.open("rb") as opened:
            is_pointer = opened.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        is_pointer = False
    if is_pointer:
        cause = "this is Git LFS's pointer to the file; run 'git lfs pull' in its folder"
    return ModelError(f"{file}: {cause}")


def read_config(path: Path) -> dict[str, Any]:
    """Reads a directory's config.json, which must name the model's type.

    Raises:
        ModelError: it cannot be read, is no JSON object, or has no ``model_type``.
    """
    file = path / "config.json"
    config = read_object(file)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(f"{file}: lacks 'model_type', the name of the model's architecture")
    for key in _LAYER_KEYS:
        layers = config.get(key)
        if isinstance(layers, int) and not 0 < layers <= MAX_LAYERS:
            raise ModelError(f"{file}: damaged, {key} is {layers}; fetch it again")
    return config


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model, which may be all of it."""
    for whole in (config, config.get("thinker_config")):  # Qwen3-Omni's
        for name in ("text_config", "llm_config"):
            if isinstance(whole, dict) and isinstance(part := whole.get(name), dict) and part:
                return part
    return config


def read_object(file: Path, remedy: str = "fetch it again") -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        remedy: the end of the error's text.

    Raises:
        ModelError: it cannot be read, or is damaged.
    """
    try:
        if file.exists() and not file.is_file():
            raise _no_file(file)
        # Other readers of these files expect UTF-8, too; json.loads would also take UTF-16.
        content: Any = json.loads(file.read_bytes().decode())
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise damaged_file(file, f"damaged, this is not JSON: {cause}; {remedy}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: damaged, this is not a JSON object; {remedy}")
    return content


def check_tokenizer_files(path: Path) -> None:
    """Finds the file at fault when a directory's tokenizer cannot be loaded.

    Raises:
        ModelError: a file is missing or damaged.
    """
    files = {file.name for file in path.iterdir()}
    if not files & _TOKENIZERS and not any(name.endswith(_TIKTOKEN) for name in files):
        raise ModelError(
            f"{path}: it has no tokenizer ({', '.join(sorted(_TOKENIZERS))}); fetch it again"
        )
    for name in sorted(files & _TOKENIZER_OBJECTS):
        read_object(path / name)


def choices(prefix: str, files: list[str], joint: str = "or") -> str:
    """Lists names in an error, as of what can be served: "prefixA, prefixB or 3 more"."""
    shown = [prefix + name for name in files[:_LISTED]]
    more = len(files) - len(shown)
    return ", ".join(shown) + (f" {joint} {more} more" if more else "")


def gguf_files(names: list[str]) -> list[str]:
    """The names of GGUF files, sorted."""
    return sorted(name for name in names if name.lower().endswith(".gguf"))


def _without_configuration(path: Path, names: list[str]) -> ModelError:
    if files := gguf_files(names):
        return UnsupportedModel(
            f"{path}: it has GGUF files and no config.json; serve one of its files: "
            f"{choices(f'{path}/', files)}"
        )
    if _ADAPTER in names:
        return _adapter(path)
    inner = sorted(child.parent.name for child in path.glob("*/config.json"))
    if inner:
        return ModelError(
            f"{path}: it has no config.json, but its folders have; serve one of them: "
            f"{choices(f'{path}/', inner)}"
        )
    return ModelError(f"{path}: it has no config.json, so it is no model's directory")


def _without_weights(path: Path, names: list[str]) -> ModelError:
    if files := gguf_files(names):
        return UnsupportedModel(
            f"{path}: it has GGUF files and no {WEIGHTS}; serve one of its files: "
            f"{choices(f'{path}/', files)}"
        )
    for name in names:
        if kind := _OTHER_WEIGHTS.get(Path(name).suffix.lower()):
            return UnsupportedModel(
                f"{path}: it has no {WEIGHTS}, but {kind} ({name}); convert it: "
                f"python -m mlx_lm convert --hf-path {path} --mlx-path NEW"
            )
    if _ADAPTER in names:
        return _adapter(path)
    if files := [name for name in names if name.endswith(".safetensors")]:
        return UnsupportedModel(
            f"{path}: it has no {WEIGHTS}, but {choices('', files, 'and')}; fetch or export the "
            "model in Hugging Face's format, whose files have such names"
        )
    return ModelError(f"{path}: it has no {WEIGHTS}; the weights are missing, fetch them again")


def _adapter(path: Path) -> ModelError:
    return UnsupportedModel(
        f"{path}: a LoRA adapter, which is no model; serve its base model with --lora NAME={path}"
    )
