"""The limits of MLX's CUDA graphs."""

from __future__ import annotations

import os
import sys

import pytest

from chairlift.engine.cuda.graphs import set_graph_limits

LIMITS = {
    "MLX_MAX_MB_PER_BUFFER": "1000000",
    "MLX_MAX_OPS_PER_BUFFER": "12",
    "MLX_CUDA_GRAPH_CACHE_SIZE": "2048",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}


DIVIDED = LIMITS | {"MLX_USE_CUDA_GRAPHS": "0"}


@pytest.mark.parametrize(
    ("platform", "ranks", "expected"),
    [("linux", 1, LIMITS), ("linux", 2, DIVIDED), ("darwin", 1, {}), ("darwin", 2, {})],
)
def test_the_limits_are_set_where_mlx_may_use_cuda(
    platform: str, ranks: int, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os, "environ", {})
    set_graph_limits(ranks)
    assert os.environ == expected


@pytest.mark.parametrize("name", DIVIDED)
def test_the_environment_wins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {name: "50"})
    set_graph_limits(2)
    assert os.environ == DIVIDED | {name: "50"}
