"""The smallest slice of ``make conformance-vision``: one type for each way to call mlx-vlm."""

from __future__ import annotations

import pytest
from conformance.vision.check import check
from conformance.vision.types import NOT_APPLICABLE, NOT_TRIED, TYPES, type_names

from chairlift.engine.model.vision.families import FAMILIES


@pytest.mark.parametrize(
    "model_type", ["granite4_vision", "lfm2_vl", "minicpmo", "molmo", "phi4_siglip", "qwen3_5"]
)
def test_batched_tokens_are_those_of_mlx_vlm_alone(model_type: str) -> None:
    result = check(model_type, seeds=(1,))
    assert result.outcome == "passed", result


def test_each_type_is_checked_or_left_out_for_a_reason() -> None:
    assert set(type_names()) == TYPES.keys() | NOT_APPLICABLE.keys() | NOT_TRIED.keys()
    assert not TYPES.keys() & (NOT_APPLICABLE.keys() | NOT_TRIED.keys())
    assert FAMILIES.keys() <= TYPES.keys()
