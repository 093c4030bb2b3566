"""The sampling that a GGUF file recommends: llama.cpp's metadata keys general.sampling.*.

The keys xtc_*, mirostat* and sequence are for sampling methods that this engine does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

# By the names of Hugging Face's generation_config.json.
SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
# NOTE: llama.cpp's penalty sees the last 64 tokens or this many; here it sees all.
_PENALTY_WINDOW = "general.sampling.penalty_last_n"


def sampling_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The values of SAMPLING_KEYS that the metadata has.

    llama.cpp's ways to turn a filter off become this engine's; other values stay as they are.
    """
    return {name: _value(name, metadata) for name, key in SAMPLING_KEYS.items() if key in metadata}


def _value(name: str, metadata: Mapping[str, Any]) -> object:
    value = metadata[SAMPLING_KEYS[name]]
    if type(value) not in (int, float):
        return value
    match name:
        case "temperature" | "top_k" | "min_p" if value <= 0:
            return 0
        case "top_p" if value >= 1:
            return 1.0
        case "repetition_penalty" if metadata.get(_PENALTY_WINDOW) == 0:
            return 1.0
    return _shortest(value) if type(value) is float else value


def _shortest(value: float) -> float:
    """The shortest decimal number with the same 32-bit value: 0.95 for 0.949999988079071."""
    single = np.float32(value)
    return float(str(single)) if float(single) == value else value
