"""Reads the sampling that a model's makers recommend, and its end-of-text ids.

A directory has them in generation_config.json, a GGUF file in its metadata. Values are read as they
are: ``api.schemas.sampling_defaults`` checks their types and ranges. Imports no MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from chairlift.engine.errors import ModelError
from chairlift.engine.hub.folder_check import read_object
from chairlift.engine.hub.known_models import KnownModel, known_gguf, known_repository

if TYPE_CHECKING:  # it imports tqdm and asyncio, which worker processes do without
    from chairlift.engine.hub.source import ModelSource

AUTO: Literal["auto"] = "auto"
NONE: Literal["none"] = "none"
FILE_NAME = "generation_config.json"
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
EOS_KEY = "eos_token_id"
KEYS = (*SAMPLING_KEYS, EOS_KEY)
OVERRIDE_FLAG = "--override-generation-config"


class Found(NamedTuple):
    """A value and its place for errors, like "/models/x/generation_config.json: top_k"."""

    value: object
    place: str


class GenerationConfig(NamedTuple):
    """The values of a generation config that are not null.

    Attributes:
        values: by KEYS, which are keys of generation_config.json.
        origin: a few words for the log.
    """

    values: Mapping[str, Found]
    origin: str


def read_generation_config(
    source: ModelSource, choice: str = AUTO, override: Mapping[str, Any] | None = None
) -> GenerationConfig:
    """Reads the generation config of a model.

    Args:
        source: the model.
        choice: "auto" reads the model's own, "none" none; or the path of another one, a file or the
            folder of a generation_config.json.
        override: values that replace those of the file, by the same keys.

    Raises:
        ModelError: the file cannot be read, or is not a JSON object.
    """
    if choice == NONE:
        config = GenerationConfig({}, "no generation config")
    elif choice != AUTO:
        config = _from_file(config_file(choice))
    elif source.kind == "gguf":
        config = _from_gguf(source.path)
    else:
        config = _from_directory(source)
    if not override:
        return config
    overridden = found_in(override, OVERRIDE_FLAG)
    return GenerationConfig({**config.values, **overridden}, f"{config.origin}, {OVERRIDE_FLAG}")


def end_token_ids(config: GenerationConfig) -> frozenset[int]:
    """The ids that end a text, as the config's eos_token_id: one, a list, or none.

    Raises:
        ModelError: the value is something else.
    """
    if EOS_KEY not in config.values:
        return frozenset()
    value, place = config.values[EOS_KEY]
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise ModelError(f"{place} is {value!r:.64}, but should be a token id or a list of them")
    return frozenset(ids)


def config_file(text: str) -> Path:
    """The file that a path means: itself, or the generation_config.json in the folder.

    Raises:
        ModelError: there is no such file.
    """
    try:
        path = Path(text).expanduser()
        file = path / FILE_NAME if text and path.is_dir() else path
        if file.is_file():
            return file
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{text!r}: {error}") from error
    raise ModelError(f"{str(file)!r}: no such file")


def _from_directory(source: ModelSource) -> GenerationConfig:
    file = source.path / FILE_NAME
    config = _from_file(file) if file.is_file() else GenerationConfig({}, f"no {FILE_NAME}")
    return _recommended(config, known_repository(source.name))


def _from_file(file: Path) -> GenerationConfig:
    values = read_object(file, "--generation-config none leaves it out")
    return GenerationConfig(found_in(values, str(file)), str(file))


def found_in(values: Mapping[str, Any], place: str) -> dict[str, Found]:
    """The values of KEYS that are not null; ``place`` is where they are, for errors."""
    return {
        key: Found(values[key], f"{place}: {key}") for key in KEYS if values.get(key) is not None
    }


def _from_gguf(path: Path) -> GenerationConfig:
    # They import numpy and the package gguf, which only these files need.
    from chairlift.engine.hub.gguf.file import GGUFFile
    from chairlift.engine.hub.gguf.sampling import SAMPLING_KEYS as GGUF_KEYS
    from chairlift.engine.hub.gguf.sampling import sampling_metadata

    metadata = GGUFFile(path).metadata
    found = {
        name: Found(value, f"{path}: {GGUF_KEYS[name]}")
        for name, value in sampling_metadata(metadata).items()
    }
    origin = "the GGUF file's metadata" if found else "no general.sampling keys in the GGUF file"
    return _recommended(GenerationConfig(found, origin), known_gguf(metadata))


def _recommended(config: GenerationConfig, known: KnownModel | None) -> GenerationConfig:
    """The model card's values if the model's files hold no sampling at all."""
    if known is None or any(key in config.values for key in SAMPLING_KEYS):
        return config
    origin = f"the model card of {known.hub_id}"
    return GenerationConfig({**config.values, **found_in(known.sampling, origin)}, origin)
