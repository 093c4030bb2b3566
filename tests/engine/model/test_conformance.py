"""A part of ``make conformance``: one or two architectures for each kind of cache."""

from __future__ import annotations

import pytest
from conformance.check import Result, check
from conformance.configs import model_names, reason_not_applicable, tiny_config
from conformance.overrides import HELPERS, NOT_APPLICABLE, OVERRIDES
from conformance.report import TEXT_PAGE, passes, report
from conformance.schedule import random_schedule
from conformance.values import WINDOW
from conformance.weights import tiny_model

from chairlift.engine.errors import UnsupportedModel
from chairlift.engine.model.adapters import adapt
from chairlift.engine.model.trials.probe import probe

SLICE = {
    "llama": "windows and full attention",
    "gpt_oss": "the same, with attention sinks",
    "deepseek_v3": "multi-head latent attention",
    "deepseek_v32": "a list of two caches: attention and its indexer",
    "falcon_h1": "a list of two caches: recurrent and full attention",
    "qwen3_next": "recurrent layers and full attention",
    "kimi_linear": "recurrent layers and latent attention",
    "rwkv7": "recurrent layers only",
    "nemotron-nas": "layers that never write to their cache",
    "gemma3n": "layers that read another layer's keys",
    "llama4": "chunks, and queries scaled by position",
    "afm7": "layers that read another layer's keys, adapted",
    "deepseek_v41": "groups of tokens that close in different steps",
    "gpt_bigcode": "learned positions",
    "minimax_m3_vl": "blocks of positions",
    "recurrent_gemma": "a first token unlike the others",
}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("deepseek_v41", "cache kind LayerCache is not supported"),
        ("gpt_bigcode", "fails on batched caches"),
    ],
)
def test_models_that_cannot_be_batched_are_refused_at_start(name: str, why: str) -> None:
    """These two cannot be batched until they are adapted."""
    with pytest.raises(UnsupportedModel, match=f"{name} cannot be served: .*{why}"):
        probe(tiny_model(name), name)
    model = tiny_model(name)
    adapt(model)
    probe(model, name)


# A schedule that has all that others have, in two thirds of the steps.
FEW_STEPS = 40


@pytest.mark.slow
@pytest.mark.parametrize("name", SLICE)
def test_batched_sequences_equal_sequences_alone(name: str) -> None:
    result = check(name, seeds=(FEW_STEPS,))
    assert result.outcome == "passed", f"{SLICE[name]}: {result.detail}"


def test_every_model_file_has_a_config_or_a_reason() -> None:
    names = model_names()
    assert len(names) > 100
    for name in names:
        if not reason_not_applicable(name):
            assert tiny_config(name)["model_type"]
    assert not HELPERS & set(names)
    assert set(NOT_APPLICABLE) | set(OVERRIDES) <= set(names), (
        "an entry names a file that no longer exists"
    )


def test_a_schedule_has_prompts_and_chunks_on_both_sides_of_the_window() -> None:
    schedules = [random_schedule(seed, pads=True) for seed in range(10)]
    assert random_schedule(0, pads=True) == schedules[0]
    sequences = [sequence for schedule in schedules for sequence in schedule.sequences]
    assert {len(sequence.prompt) - sequence.prefilled for sequence in sequences} == {0, 1}
    chunks = {chunk for sequence in sequences for chunk in sequence.chunks}
    assert min(chunks) == 1
    assert max(chunks) > WINDOW
    assert any(not sequence.chunks for sequence in sequences), "a row that joins without a prompt"
    assert all(len(schedule.prefills[-1]) == 2 for schedule in schedules)
    alone = random_schedule(0, pads=False)
    assert all(len(group) == 1 for group in alone.prefills)


def test_the_report_counts_results_and_lists_each() -> None:
    results = [
        Result("b", "passed", "2 KVCache"),
        Result("A", "failed", "1 KVCache", "ValueError: x|y"),
        Result("c", "not applicable", detail="no"),
    ]
    text = report(results, TEXT_PAGE)
    assert "**1 of 2 applicable model files pass (50.0%); 1 fail, 1 are not applicable.**" in text
    assert text.splitlines()[-3:] == [
        "| A | failed | 1 KVCache | ValueError: x\\|y |",
        "| b | passed | 2 KVCache |  |",
        "| c | not applicable |  | no |",
    ]
    assert not passes(results, TEXT_PAGE)
    assert passes([results[0]] * 19 + results, TEXT_PAGE)
