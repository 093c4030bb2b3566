"""Checks that mlx-lm knows a model's architecture, before its weights are read."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import mlx_lm.models
from mlx_lm.utils import MODEL_REMAPPING, _get_classes

from chairlift.engine.errors import UnsupportedModel
from chairlift.engine.hub.folder_check import read_config
from chairlift.engine.model.vision.families import is_installed, vision_type

# Names that an error suggests at most.
_NEAREST = 3


def served_vision_type(config: dict[str, Any], text_only: bool) -> str | None:
    """The type of a model that is served with images; None if it is served without."""
    return vision_type(config) if is_installed() and not text_only else None


def check_architecture(path: Path, config: dict[str, Any], text_only: bool = False) -> None:
    """Checks a configuration's ``model_type``.

    Args:
        path: the model's directory, for the error.
        text_only: a vision model is served without images, by mlx-lm.

    Raises:
        UnsupportedModel: mlx-lm has no such architecture; the message names the nearest.
    """
    if config.get("model_file") is not None:  # the folder has its own code; see ``load_model``
        return
    if served_vision_type(config, text_only) is not None:
        return
    try:
        _get_classes(config)
    except Exception as error:
        # An unknown type, a module of mlx-lm that is no model, or one that needs another package.
        name = str(config["model_type"])
        known = known_architectures()
        if name in known:
            cause = " ".join(str(error.__cause__ or error).split())
            raise UnsupportedModel(f"{path}: {name} cannot be imported: {cause}") from error
        if vision_type(config) is not None and not text_only:
            raise UnsupportedModel(
                f"{path}: {name} needs the extra: pip install 'chairlift[vision]'"
            ) from error
        nearest = difflib.get_close_matches(name, known, _NEAREST)
        hint = f"; the nearest known: {', '.join(nearest)}" if nearest else ""
        raise UnsupportedModel(
            f"{path / 'config.json'}: the model_type {name[:64]!r} is not supported{hint}"
        ) from error


def argument_class(path: Path) -> type | None:
    """The dataclass of the fields that mlx-lm reads from a directory's config.json, if it has one.

    A folder's own code and models that are served with images have others.
    """
    try:
        config = read_config(path)
        has_others = config.get("model_file") is not None or served_vision_type(config, False)
        return None if has_others else _get_classes(config)[1]
    except Exception:  # of any type, as in ``check_architecture``; only an error's text lacks it
        return None


def known_architectures() -> list[str]:
    """The values of ``model_type`` that mlx-lm can load, sorted."""
    modules = (file for folder in mlx_lm.models.__path__ for file in Path(folder).glob("*.py"))
    names = {file.stem for file in modules if "\nclass Model(" in file.read_text(encoding="utf-8")}
    return sorted(names | MODEL_REMAPPING.keys())
