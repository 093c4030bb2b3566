"""The trial of the decode kernel at start accepts a right kernel, and no wrong one."""

from __future__ import annotations

import mlx.core as mx
import pytest

from chairlift.engine.cuda import selftest
from chairlift.engine.cuda.kernel import KeysValues


@pytest.mark.parametrize("wrong", ["", "one stop for all", "writes nothing", "a column too many"])
@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("sinks", [False, True])
def test_wrong_kernels_are_found(
    wrong: str, count: int, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(
        queries: mx.array,
        new: KeysValues,
        buffers: KeysValues,
        lengths: mx.array,
        stops: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        if wrong == "one stop for all":
            stops = mx.broadcast_to(stops[:1] % 256 + 1, stops.shape)
        if wrong == "a column too many":
            lengths = lengths + 1
        columns = buffers.keys.shape[2]
        every, newest = mx.arange(len(queries)), stops - 1
        before = [mx.array(buffer) for buffer in buffers]
        for buffer, array in zip(buffers, new, strict=True):
            buffer[every, :, newest] = array[:, :, 0]
        behind = (stops[:, None] - 1 - mx.arange(columns)) % columns
        mask = (behind < lengths[:, None])[:, None, None]
        result = mx.fast.scaled_dot_product_attention(
            queries, *buffers, scale=scale, mask=mask, sinks=sinks
        )
        mx.eval(result)
        if wrong == "writes nothing":
            for buffer, old in zip(buffers, before, strict=True):
                buffer[:] = old
        return result

    monkeypatch.setattr(selftest, "decode_attention", kernel)
    assert selftest.decodes_right(count, sinks) == (wrong == "")
