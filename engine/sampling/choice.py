"""Chooses the next token of each row from its logits after bias, penalties and mask.

On CUDA one kernel does this, if a trial shows that it chooses as MLX's operations do.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled import compiled_sampling
from chairlift.engine.cpu.compiled.compiled_sampling import Highest
from chairlift.engine.cpu.compiled.llvm.sampling.choice import PARTS
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cuda.sampling import DTYPES, MAX_VOCABULARY, Draws, sample
from chairlift.engine.messages import SamplingParams
from chairlift.engine.model.trials.trial import Trial
from chairlift.engine.sampling.draw import sample_categorical, uniform_numbers
from chairlift.engine.sampling.drawing import GREEDY_BELOW, Drawing
from chairlift.engine.sampling.filters import thresholds
from chairlift.engine.sampling.host.choice import choose
from chairlift.engine.sampling.math import exp
from chairlift.engine.sampling.outcomes import NO_CHOICE, NONFINITE, row_outcomes, soundness

log = logging.getLogger(__name__)


def host_samples() -> bool:
    """Whether ``sampling.host`` is faster than MLX's operations, and exists for this CPU."""
    return mx.default_device().type == mx.DeviceType.cpu and compiled_sampling.available()


class SamplingMode(NamedTuple):
    """How the sampling of a batch is computed.

    Attributes:
        size: rounds a number of rows up to one that recurs, where shapes that recur are faster.
        upload: copies random keys to the device.
        lazy: logits may not be evaluated, because another thread does that.
    """

    size: Callable[[int], int] = int
    upload: Callable[[NDArray[np.uint32]], mx.array] = mx.array
    lazy: bool = False

    @property
    def on_host(self) -> bool:
        """Whether ``sampling.host`` chooses tokens."""
        return not self.lazy and host_samples()


DEFAULT_MODE = SamplingMode()


class TokenChoice:
    """Chooses tokens for rows with certain parameters.

    Attributes:
        drawn: the numbers of the rows that are not greedy.

    Args:
        params: the parameters of the rows.
        mode: how the tokens are chosen.
    """

    def __init__(self, params: Seq[SamplingParams], mode: SamplingMode = DEFAULT_MODE) -> None:
        self.drawn = [row for row, one in enumerate(params) if one.temperature >= GREEDY_BELOW]
        self._params = params
        self._mode = mode
        # What ``_drawing`` has made, by the number of lines.
        self._drawings: dict[int, Drawing] = {}

    def __call__(
        self, logits: mx.array, raw: mx.array, generated: Seq[int], masked: bool
    ) -> mx.array:
        """Chooses a token for every line.

        Args:
            logits: ``[lines, vocabulary]``, at least one line for each row. They are ``raw``, or
                float32 and made from ``raw``.
            raw: ``[lines, vocabulary]`` of any float type, the model's own logits.
            generated: each row's number of output tokens so far; may be empty if all are greedy.
            masked: whether a mask may have ruled out every token of a row with finite logits.

        Returns:
            ``[lines]`` int32, tokens or failure codes; see ``sampling.outcomes``.
        """
        if logits.shape[1] <= MAX_VOCABULARY and kernel_works(raw.dtype):
            return self.by_kernel(logits, raw, generated, masked)
        return self.by_operations(logits, raw, generated, masked)

    def by_kernel(
        self, logits: mx.array, raw: mx.array, generated: Seq[int], masked: bool
    ) -> mx.array:
        """The call by one kernel for CUDA."""
        draws = None
        if self.drawn:
            drawing = self._drawing(range(len(self._params)), len(logits))
            keys = self._mode.upload(drawing.keys(generated))
            draws = Draws(drawing.options, uniform_numbers(keys, logits.shape[1]))
        changed = None if logits is raw else raw
        return sample(logits, changed, masked, draws, NONFINITE, NO_CHOICE, PARTS)

    def by_operations(
        self, logits: mx.array, raw: mx.array, generated: Seq[int], masked: bool
    ) -> mx.array:
        """The call by operations of MLX."""
        logits, raw = logits.astype(mx.float32), raw.astype(mx.float32)
        chosen, best = _highest(logits)
        drawn = len(self.drawn)
        if drawn and drawn == len(self._params):
            drawing = self._drawing(self.drawn, len(logits))
            keys = self._mode.upload(drawing.keys(generated))
            chosen = lazy_draw(logits, best, chosen, drawing, keys)
        elif drawn:
            drawing = self._drawing(self.drawn, self._mode.size(drawn))
            index = drawing.rows
            keys = self._mode.upload(drawing.keys(generated))
            picked = lazy_draw(logits[index], best[index], chosen[index], drawing, keys)
            own = index[:drawn]
            chosen = chosen.at[own].add(picked[:drawn] - chosen[own])
        sound, any_possible = soundness(raw)
        return row_outcomes(chosen, best[:, 0], sound, any_possible if masked else None)

    def on_host(
        self, logits: Floats, best: Highest, raw: Floats, generated: Seq[int], masked: bool
    ) -> NDArray[np.int32]:
        """The call by compiled functions; arguments as those of ``choose``."""
        drawing = self._drawing(self.drawn, len(self.drawn)) if self.drawn else None
        return choose(logits, best, raw, drawing, generated, masked)

    def _drawing(self, rows: Seq[int], lines: int) -> Drawing:
        """The ``Drawing`` of some rows, padded to ``lines`` with copies of the first of them."""
        if lines not in self._drawings:
            padded = [*rows, *[rows[0]] * (lines - len(rows))]
            self._drawings[lines] = Drawing.of(self._params, padded)
        return self._drawings[lines]


@functools.cache
def kernel_works(dtype: mx.Dtype) -> bool:
    """Whether the kernel exists and chooses as MLX's operations do, from such logits."""
    if dtype not in DTYPES or not hasattr(mx, "cuda") or not mx.cuda.is_available():
        return False
    rows, vocabulary = 64, 4096
    params = [
        SamplingParams(
            *(1, row),
            temperature=(0.0, 0.6, 1.0, 1.5)[row % 4],
            top_k=(0, 20, 200)[row % 3],
            top_p=(1.0, 0.95)[row // 16 % 2],
            min_p=(0.0, 0.05)[row // 32],
        )
        for row in range(rows)
    ]
    raw = mx.random.normal((rows, vocabulary), dtype, scale=3.0, key=mx.random.key(0))
    choice, generated = TokenChoice(params), [0] * rows
    both = [raw, raw.astype(mx.float32) + 0.5]

    def with_all(call: Callable[..., mx.array]) -> mx.array:
        return mx.concatenate([call(logits, raw, generated, False) for logits in both])

    return _TRIAL.passes(lambda: with_all(choice.by_operations), lambda: with_all(choice.by_kernel))


def _mostly_equal(actual: mx.array, expected: mx.array) -> bool:
    """Whether the tokens of all rows but a few are the same: rounding may decide a draw."""
    return bool(((actual == expected).mean() >= 0.95).item())


_TRIAL = Trial(
    _mostly_equal,
    log,
    error="no CUDA kernel for sampling: %s",
    level=logging.WARNING,
    mismatch="the CUDA kernel for sampling is wrong on this device; it is not used",
)


def _highest(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Each line's likeliest token, ``[lines]`` int32, and its logit, ``[lines, 1]``."""
    tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    return tokens, mx.take_along_axis(logits, tokens[:, None], axis=-1)


def lazy_draw(
    logits: mx.array, best: mx.array, likeliest: mx.array, drawing: Drawing, keys: mx.array
) -> mx.array:
    """Samples one token from each row's distribution, by operations that any device has.

    Args:
        logits: ``[rows, vocabulary]``.
        best: ``[rows, 1]``, each row's highest logit.
        likeliest: ``[rows]`` int32, the token with that logit; no filter removes it.
        drawing: the rows' parameters.
        keys: ``[rows, 2]`` uint32; see ``Drawing.keys``.
    """
    # Subtract the highest logit first, so that nothing overflows at any temperature.
    weights = exp((logits - best) / drawing.temperature)
    if any(one is not None for one in drawing.filters):
        least = thresholds(weights, *drawing.filters, drawing.largest_k)
        weights = mx.where(weights >= least, weights, 0.0)
    tokens = sample_categorical(weights, keys)
    weight = mx.take_along_axis(weights, tokens[:, None], axis=-1)[:, 0]
    return mx.where(weight > 0, tokens, likeliest)
