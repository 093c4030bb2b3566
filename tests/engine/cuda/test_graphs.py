"""The limit of MLX's CUDA graphs."""

from __future__ import annotations

import os
import sys

import pytest

from chairlift.engine.cuda.graphs import lift_graph_limit

NAME = "MLX_MAX_MB_PER_BUFFER"


@pytest.mark.parametrize(("platform", "expected"), [("linux", "1000000"), ("darwin", None)])
def test_the_limit_is_lifted_where_mlx_may_use_cuda(
    platform: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os, "environ", {})
    lift_graph_limit()
    assert os.environ.get(NAME) == expected


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {NAME: "50"})
    lift_graph_limit()
    assert os.environ == {NAME: "50"}
