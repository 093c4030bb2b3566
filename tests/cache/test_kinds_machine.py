"""Every kind of cache in a batch, against mlx-lm's own caches of one sequence each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache
from support.cache.kind_machine import GROUP, KindMachine

from chairlift.cache.quantized import Quantization


class QuantizedMachine(KindMachine):
    """Full attention in 8 or 4 bits.

    We keep a token's codes, scales and biases side by side, mlx-lm in three arrays. Both quantize
    each token and head alone, so that all bits are equal.
    """

    def begin_kind(self) -> None:
        self.quantization = Quantization(self.bits, GROUP)

    def model_caches(self) -> list[Any]:
        return [KVCache()]

    def solo_caches(self) -> list[Any]:
        return [QuantizedKVCache(GROUP, self.bits)]

    def forward(self, layers: Sequence[Any], tokens: np.ndarray) -> list[mx.array]:
        return [self.attention(layers[0], tokens)]

    def can_rewind(self, row: int, offset: int) -> bool | None:
        return True


class QuantizedWindowMachine(KindMachine):
    """A sliding window in 8 or 4 bits. mlx-lm's is not quantized: the comparison quantizes it."""

    def begin_kind(self) -> None:
        self.quantization = Quantization(self.bits, GROUP)

    def model_caches(self) -> list[Any]:
        return [RotatingKVCache(self.window)]

    def forward(self, layers: Sequence[Any], tokens: np.ndarray) -> list[mx.array]:
        return [self.attention(layers[0], tokens)]

    def can_rewind(self, row: int, offset: int) -> bool | None:
        length = len(self.rows[row].tokens)
        if length < self.window or offset in (0, length):
            return True
        # At least so many; a ring that has grown has columns that were never written.
        lost = length - self.batch.parts[0].ring.columns
        return False if lost > max(0, offset - self.window + 1) else None


class HalfMachine(KindMachine):
    """Full attention in float16. The comparison rounds each token by itself."""

    half = True

    def model_caches(self) -> list[Any]:
        return [KVCache()]

    def solo_caches(self) -> list[Any]:
        return [_HalfKVCache()]

    def forward(self, layers: Sequence[Any], tokens: np.ndarray) -> list[mx.array]:
        return [self.attention(layers[0], tokens)]

    def can_rewind(self, row: int, offset: int) -> bool | None:
        return True


class _HalfKVCache(KVCache):
    """mlx-lm's cache of keys and values that are rounded to float16."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        rounded = (mx.clip(new, -65504, 65504).astype(mx.float16) for new in (keys, values))
        all_keys, all_values = super().update_and_fetch(*rounded)
        return all_keys.astype(mx.float32), all_values.astype(mx.float32)


class StateMachine(KindMachine):
    """A recurrent layer; only a row's own tokens may enter its state."""

    def model_caches(self) -> list[Any]:
        return [ArraysCache(2)]

    def forward(self, layers: Sequence[Any], tokens: np.ndarray) -> list[mx.array]:
        return [self.recurrence(layers[0], tokens)]

    def can_rewind(self, row: int, offset: int) -> bool | None:
        return offset in (0, len(self.rows[row].tokens))


class NestedMachine(StateMachine):
    """Attention and recurrence in one layer, as hybrid models nest them."""

    def model_caches(self) -> list[Any]:
        return [CacheList(KVCache(), ArraysCache(2)), KVCache()]

    def forward(self, layers: Sequence[Any], tokens: np.ndarray) -> list[mx.array]:
        both, after = layers
        assert type(both) is CacheList
        kv, arrays = both[0], both[1]
        return [
            self.recurrence(arrays, tokens),
            self.attention(kv, tokens),
            self.attention(after, tokens),
        ]


BOUNDED = settings(
    max_examples=30,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestQuantized = pytest.mark.slow(QuantizedMachine.TestCase)
TestQuantizedWindow = pytest.mark.slow(QuantizedWindowMachine.TestCase)
TestHalf = pytest.mark.slow(HalfMachine.TestCase)
TestState = pytest.mark.slow(StateMachine.TestCase)
TestNested = pytest.mark.slow(NestedMachine.TestCase)
TestQuantized.settings = TestQuantizedWindow.settings = BOUNDED
TestHalf.settings = TestState.settings = TestNested.settings = BOUNDED
