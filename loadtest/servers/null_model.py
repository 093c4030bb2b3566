"""``python -m chairlift.loadtest.servers.null_model DIR STEP_MS``: writes the null model.

The null model has almost no work in a step, so that everything around the model can be measured.

The server loads the folder like any other model, with ``--trust-remote-code``.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from chairlift.loadtest.data.words import WORDS
from chairlift.loadtest.servers import null_code
from chairlift.loadtest.servers.random_model import SPECIALS, word_tokenizer
from chairlift.loadtest.shapes import random_model

# One layer of width 8: a step costs only the overhead of its few operations.
_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "model_file": "null_code.py",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": len(SPECIALS) + len(WORDS),
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


def write_null_model(folder: Path, step_ms: float = 0.0) -> None:
    """Writes a llama with one layer of width 8 and random weights, whose tokens are words.

    Each step sleeps for ``step_ms`` milliseconds. Every token of greedy output has text, because
    the logits of special tokens are 0 and that of some word is always above.
    """
    model = random_model(_CONFIG, mx.float32)
    model.lm_head.weight[: len(SPECIALS)] = 0
    weights: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), {"format": "mlx"})
    config = {**_CONFIG, "step_seconds": step_ms / 1e3}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(null_code.__file__, folder / _CONFIG["model_file"])
    word_tokenizer(WORDS).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m chairlift.loadtest.servers.null_model", description=__doc__
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "step_ms", type=float, metavar="STEP_MS", help="how long each step sleeps, in milliseconds"
    )
    options = parser.parse_args()
    write_null_model(options.folder, options.step_ms)
