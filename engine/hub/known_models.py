"""Sampling that model cards recommend, for models whose files hold no such values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class KnownModel(NamedTuple):
    """A model with recommended sampling.

    A GGUF file is this model only if all of name, architecture and sizes agree: fine-tuned models
    often keep some of them.

    Attributes:
        hub_id: its repository on the hub, whose model card is the source.
        gguf_names: the values of general.name in its GGUF files, in lower case.
        architecture: the value of general.architecture.
        layers: its number of layers.
        hidden_size: its hidden size.
        sampling: the recommended values.
    """

    hub_id: str
    gguf_names: tuple[str, ...]
    architecture: str
    layers: int
    hidden_size: int
    sampling: Mapping[str, float]


_SMOLLM2 = {"temperature": 0.2, "top_p": 0.9}

# GGUF files have the name of the checkpoint in training, or the one of the repository.
KNOWN_MODELS = (
    KnownModel(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        ("smollm2 135m 8k lc100k mix1 ep2", "smollm2 135m instruct"),
        *("llama", 30, 576, _SMOLLM2),
    ),
    KnownModel(
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        ("smollm2 360m 8k lc100k mix1 ep2", "smollm2 360m instruct"),
        *("llama", 32, 960, _SMOLLM2),
    ),
    KnownModel(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        ("smollm2 1.7b 8k mix7 ep2 v2", "smollm2 1.7b instruct"),
        *("llama", 24, 2048, _SMOLLM2),
    ),
)


def known_gguf(metadata: Mapping[str, Any]) -> KnownModel | None:
    """The known model with this GGUF metadata, or None."""
    name, architecture = metadata.get("general.name"), metadata.get("general.architecture")
    sizes = (
        metadata.get(f"{architecture}.block_count"),
        metadata.get(f"{architecture}.embedding_length"),
    )
    for model in KNOWN_MODELS:
        if (
            str(name).lower() in model.gguf_names
            and architecture == model.architecture
            and sizes == (model.layers, model.hidden_size)
        ):
            return model
    return None


def known_repository(name: str) -> KnownModel | None:
    """The known model with this hub id, or None."""
    return next((model for model in KNOWN_MODELS if model.hub_id == name), None)
