"""The servers of the comparison, each with the flags that make it fastest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from chairlift.loadtest.errors import ServerError
from chairlift.loadtest.servers.child import ServerSpec
from chairlift.loadtest.servers.ports import free_port

# llama.cpp gives every slot an equal share of the context, in multiples of 256.
_CONTEXT_BLOCK = 256

_MLX_LM_LAUNCHER = (
    "from chairlift.engine.cpu.blas import load_fast_blas; load_fast_blas(); "
    "from mlx_lm.server import main; main()"
)


def ours(model: Path, extra: Sequence[str] = ()) -> ServerSpec:
    """This Chairlift, with default settings and the flags ``extra``."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "chairlift", "serve", str(model)]
    return ServerSpec(
        name="ours",
        command=[*command, "--port", str(port), *extra],
        port=port,
        body={"ignore_eos": True},
        notes=("full length by ignore_eos",),
        min_tokens=True,
    )


def mlx_lm(model: Path, streams: int) -> ServerSpec:
    """mlx_lm.server with the same weights in float32, the same BLAS, and rows for all streams.

    Raises:
        ServerError: the model cannot be converted.
    """
    port = free_port()
    directory = _converted(model)
    return ServerSpec(
        name="mlx-lm",
        command=[
            *(sys.executable, "-c", _MLX_LM_LAUNCHER),
            *("--model", str(directory)),
            *("--port", str(port)),
            *("--decode-concurrency", str(streams)),
            *("--prompt-concurrency", str(streams)),
            *("--log-level", "WARNING"),
        ],
        port=port,
        # Its list of models comes from the hub's cache; this name means the model of --model.
        model="default_model",
        # Prevents network access.
        env={"HF_HUB_OFFLINE": "1"},
        notes=(
            "the weights in float32, and the BLAS that ours has",
            f"decode and prompt concurrency {streams}",
            "full length because its copy of the model names no end-of-text token"
            " (it has no ignore_eos; logit_bias would cost it time in every step)",
        ),
    )


def llama(
    binary: Path, model: Path, streams: int, tokens_per_stream: int, extra: Sequence[str]
) -> ServerSpec:
    """llama-server with one slot for each stream and the flags ``extra``."""
    port = free_port()
    threads = os.cpu_count() or 1
    blocks = -(-tokens_per_stream // _CONTEXT_BLOCK)
    return ServerSpec(
        name="llama",
        command=[
            str(binary),
            *("-m", str(model)),
            *("--port", str(port)),
            *("-np", str(streams)),
            *("-c", str(streams * blocks * _CONTEXT_BLOCK)),
            *("-t", str(threads)),
            *extra,
        ],
        port=port,
        body={"ignore_eos": True},
        env={"LD_LIBRARY_PATH": str(binary.parent)},
        notes=(
            "the file's own quantization",
            " ".join([f"{threads} threads", *extra]),
            "full length by ignore_eos",
        ),
    )


def _converted(model: Path) -> Path:
    """The model as a folder for mlx_lm.server, converted in a child process, which loads MLX."""
    result = subprocess.run(
        [sys.executable, "-m", "chairlift.loadtest.convert", str(model)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if result.returncode:
        raise ServerError(f"{model} cannot be converted for mlx_lm.server")
    return Path(result.stdout.strip())
