"""Chooses the next token of each row in one kernel: greedily, or with top_k, top_p and min_p.

MLX reads and writes all logits in each operation, and a threshold that is found by halving takes
hundreds of them (``engine.sampling.filters``). With 256 rows of 152,000 logits, that takes as long
as the rest of a step. The kernel reads a row at most eight times and writes one number.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.engine.cuda.constants import constant
from chairlift.engine.cuda.source import included, launch_bounds

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Sums of more weights might exceed 64 bits.
MAX_VOCABULARY = 1 << 21
_THREADS = 512


class Draws(NamedTuple):
    """What the rows that are not greedy need.

    Attributes:
        options: ``[4, rows]`` float32: temperature (0: greedy), top_k (0: off), top_p (1: off) and
            min_p (0: off).
        uniform: ``[rows, 1 + ceil(vocabulary / parts)]`` float32, from 0 to below 1: the first
            number draws a part, the others are for the tokens of that part.
    """

    options: mx.array
    uniform: mx.array


def sample(
    logits: mx.array,
    raw: mx.array | None,
    masked: bool,
    draws: Draws | None,
    nonfinite: int,
    no_choice: int,
    parts: int,
) -> mx.array:
    """The tokens of all rows, or failure codes: ``[rows]`` int32.

    Args:
        logits: ``[rows, vocabulary]`` of one of DTYPES, at most MAX_VOCABULARY.
        raw: ``[rows, vocabulary]`` of one of DTYPES, the model's own logits, if ``logits`` were
            made from them; else None.
        masked: whether a mask may have ruled out every token of a row with finite logits.
        draws: None: all rows are greedy.
        nonfinite, no_choice: the codes of ``engine.sampling.outcomes``.
        parts: of the vocabulary, of which one is drawn first: a divisor of 16.
    """
    nothing = constant(0.0, mx.float32)
    rows, vocabulary = logits.shape
    result: mx.array
    (result,) = _kernel()(
        inputs=[
            *(logits, nothing if raw is None else raw, *(draws or (nothing, nothing))),
            *(constant(flag, mx.int32) for flag in (masked, draws is not None)),
        ],
        template=[
            *(("T", logits.dtype), ("CHANGED", raw is not None), ("WIDE", vocabulary % 8 == 0)),
            *(("NONFINITE", -nonfinite), ("NO_CHOICE", -no_choice)),
            *(("THREADS", _THREADS), ("PARTS", parts)),
        ],
        grid=(rows * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows,)],
        output_dtypes=[mx.int32],
    )
    return result


@functools.cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="chairlift_sample",
        input_names=["logits", "raw", "options", "uniform", "masked", "drawn"],
        output_names=["out"],
        header=launch_bounds(_THREADS, 1),
        source=included("sample"),
    )
