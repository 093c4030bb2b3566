"""Keeps one rank's part of a model, by the model file's own ``shard``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx_lm.models

from chairlift.engine.errors import UnsupportedModel
from chairlift.engine.parallel.heads import pad_heads

# Names of the numbers of query heads and of key heads in mlx-lm's attention layers.
_HEADS = (
    ("n_heads", "n_kv_heads"),
    ("num_attention_heads", "num_key_value_heads"),
    ("num_heads", "num_kv_heads"),
)


class _KeyHeads(NamedTuple):
    """An attention layer before it is divided: its key heads, and the width of one."""

    layer: Any
    name: str
    heads: int
    width: int

    @property
    def whole(self) -> bool:
        """Whether the layer's part has whole heads."""
        rows: int = self.layer.k_proj.weight.shape[0]
        return rows == int(getattr(self.layer, self.name)) * self.width > 0


def shard(model: Any, group: Any) -> None:
    """Replaces a model's layers by this rank's part of them; no weight is computed.

    Raises:
        UnsupportedModel: the model file cannot do this, or the model cannot be divided evenly.
    """
    size = group.size()
    name = type(model).__module__.rpartition(".")[2]
    if not hasattr(model, "shard"):
        raise UnsupportedModel(
            f"the architecture {name} cannot be divided for --tensor-parallel-size {size}; "
            f"these can: {', '.join(shardable())}"
        )
    for layer in model.modules():
        for queries, keys in _HEADS:
            pad_heads(layer, queries, keys, size)
    before = list(_key_heads(model))
    try:
        model.shard(group)
    except Exception as error:  # a model file may raise anything
        text = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedModel(
            f"this {name} model cannot be divided among {size} ranks: {text}"
        ) from error
    for part in before:
        if not part.whole:
            raise UnsupportedModel(
                f"this {name} model cannot be divided among {size} ranks: a layer has "
                f"{part.heads} key heads"
            )


def shardable() -> list[str]:
    """The architectures whose model files can be divided, sorted."""
    files = (file for folder in mlx_lm.models.__path__ for file in Path(folder).glob("*.py"))
    method = re.compile(r"^class Model\(.*?^    def shard\(", re.MULTILINE | re.DOTALL)
    return sorted(file.stem for file in files if method.search(file.read_text(encoding="utf-8")))


def _key_heads(model: Any) -> Iterator[_KeyHeads]:
    for layer in model.modules():
        for _, name in _HEADS:
            heads = getattr(layer, name, None)
            if isinstance(heads, int) and heads > 0 and "k_proj" in layer.children():
                yield _KeyHeads(layer, name, heads, layer.k_proj.weight.shape[0] // heads)
                break
