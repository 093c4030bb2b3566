"""--speculative-config, from its JSON to the limits and proposers of the engine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.api.cli.arguments import config_sources
from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.api.cli.flags import speculative_config
from chairlift.api.cli.main import main
from chairlift.api.cli.model_specs import model_specs
from chairlift.api.cli.serve import add_arguments, server_settings
from chairlift.cache.capacity import KVGeometry
from chairlift.engine.config import EngineConfig, decode_path, encode_path
from chairlift.engine.device.limits import build_limits
from chairlift.engine.device.profile import CPU
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import SamplingParams, Submit
from chairlift.engine.messages.speculative_config import (
    DEFAULT_TOKENS,
    MAX_LOOKUP,
    MAX_TOKENS,
    SpeculativeConfig,
    parse_config,
)
from chairlift.engine.parallel.followers import StartRank
from chairlift.engine.parallel.place import local_places
from chairlift.engine.process.engine_process import Start
from chairlift.engine.speculation.proposal import NgramProposer, PredictionProposer, proposers

FLAG = "--speculative-config"


def configs(folder: Path, *arguments: str, toml: str = "", **variables: str) -> list[EngineConfig]:
    parser = CommandParser(prog="chairlift serve")
    add_arguments(parser)
    if toml:
        file = folder / "serve.toml"
        file.write_text(toml)
        arguments = (*arguments, "--config", str(file))
    options, sourced = config_sources.resolve(parser, arguments, variables)
    specs = model_specs(parser, options, server_settings(options), sourced)
    return [spec.config for spec in specs]


def test_flag_variable_and_file_set_it(tmp_path: Path) -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    wanted = SpeculativeConfig("ngram", num_speculative_tokens=5, prompt_lookup_max=4)
    for [config] in (
        configs(tmp_path, FLAG, text),
        configs(tmp_path, CHAIRLIFT_SPECULATIVE_CONFIG=text),
        configs(tmp_path, toml=f"speculative-config = '{text}'"),
    ):
        assert config.speculative == wanted
    assert configs(tmp_path) == [EngineConfig()]
    assert configs(tmp_path, FLAG, "{}")[0].speculative == SpeculativeConfig()


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("{}", (2, 5)),
        ('{"prompt_lookup_max": 1}', (1, 1)),
        ('{"prompt_lookup_max": 4, "prompt_lookup_min": null}', (2, 4)),
        ('{"prompt_lookup_min": 7}', (7, 7)),
        ('{"prompt_lookup_min": 1}', (1, 5)),
    ],
)
def test_a_length_of_matches_that_is_not_given_fits_the_other(
    text: str, lengths: tuple[int, int]
) -> None:
    assert parse_config(text).match_lengths == lengths


def test_a_model_alone_is_a_draft_model() -> None:
    """vLLM's form."""
    text = '{"model": "small", "num_speculative_tokens": 5}'
    config = parse_config(text)
    assert (config.model, config.looks_up) == ("small", False)
    assert proposers(Submit("r", [1], SamplingParams(1, 1)), config) == []


def test_each_model_has_its_own(tmp_path: Path) -> None:
    toml = """
        [[models]]
        model = "a"
        speculative-config = '{"num_speculative_tokens": 3}'
        [[models]]
        model = "b"
    """
    first, second = configs(tmp_path, toml=toml)
    assert first.speculative == SpeculativeConfig(num_speculative_tokens=3)
    assert second.speculative is None


def test_it_reaches_the_engines_process_and_every_rank(tmp_path: Path) -> None:
    drafts = EngineConfig(speculative=SpeculativeConfig("draft_model", "small", 5, 3, 4))
    # A draft model does not work with several ranks.
    ranks = EngineConfig(
        speculative=SpeculativeConfig("ngram", None, 5, 3, 4), tensor_parallel_size=2
    )
    source = ModelSource("m", "directory", tmp_path)
    starts = [
        *(Start(config, source) for config in (drafts, ranks)),
        StartRank(local_places(2, range(3))[1], ranks, source, "info", "text"),
    ]
    for start in starts:
        sent = msgspec.msgpack.encode(start, enc_hook=encode_path)
        assert msgspec.msgpack.decode(sent, type=type(start), dec_hook=decode_path) == start


def test_it_sets_the_engines_limit_and_proposers() -> None:
    def tokens(config: SpeculativeConfig | None) -> int:
        settings = EngineConfig(speculative=config)
        return build_limits(settings, CPU, KVGeometry(100), 1000, 1 << 30, 0).draft_tokens

    assert tokens(None) == DEFAULT_TOKENS
    assert tokens(SpeculativeConfig(num_speculative_tokens=3)) == 3
    plain = Submit("r", [1], SamplingParams(1, 1))
    predicted = msgspec.structs.replace(plain, prediction=[1, 2])
    assert proposers(plain) == []
    assert list(map(type, proposers(predicted, SpeculativeConfig()))) == [
        *(PredictionProposer, NgramProposer),
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "'{': Input data was truncated"),
        ("[1]", "Expected `object`, got `array`"),
        ('{"a":' * 100_000, "unknown field `a`"),
        ('{"tokens": 3}', "unknown field `tokens`"),
        ('{"method": "draft_model"}', "method draft_model needs a model"),
        ('{"method": "ngram", "model": "small"}', "method ngram needs no model"),
        ('{"method": "psychic"}', "Invalid enum value 'psychic' - at `$.method`"),
        ('{"num_speculative_tokens": 0}', f"num_speculative_tokens must be 1 to {MAX_TOKENS}"),
        ('{"num_speculative_tokens": 2.5}', "Expected `int`, got `float`"),
        ('{"num_speculative_tokens": 1e999}', "num_speculative_tokens"),
        (
            '{"prompt_lookup_min": 6, "prompt_lookup_max": 5}',
            "the first not above the second, not 6 and 5",
        ),
        ('{"prompt_lookup_max": 65}', f"must be 1 to {MAX_LOOKUP}"),
        ("\udcff", "surrogates not allowed"),
    ],
)
def test_wrong_values_are_one_line(
    value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["serve", FLAG, value])
    assert exit_.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert FLAG in error
    assert message in error


def test_a_draft_model_has_short_flags(tmp_path: Path) -> None:
    """mlx-lm's names."""
    [config] = configs(tmp_path, "--draft-model", "small", "--num-draft-tokens", "3")
    assert config.speculative == SpeculativeConfig("draft_model", "small", 3)
    [config] = configs(tmp_path, CHAIRLIFT_DRAFT_MODEL="small")
    assert config.speculative == SpeculativeConfig("draft_model", "small")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-draft-tokens", "3"), "--num-draft-tokens needs --draft-model"),
        (("--draft-model", "small", FLAG, "{}"), f"--draft-model and {FLAG} exclude each other"),
        (("--draft-model", "small", "--num-draft-tokens", "65"), "--num-draft-tokens must be 1"),
    ],
)
def test_flags_of_a_draft_model_that_do_not_fit(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["serve", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_it_is_in_the_printed_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--print-config", FLAG, '{"prompt_lookup_max": 7}']) == 0
    printed = capsys.readouterr().out
    assert 'speculative-config = "{\\"prompt_lookup_max\\": 7}"  # flag\n' in printed
    assert configs(tmp_path, toml=printed)[0].speculative == SpeculativeConfig(prompt_lookup_max=7)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "x")
LIKELY = st.sampled_from(["ngram", "draft_model", 0, 1, 5, MAX_TOKENS, MAX_TOKENS + 1, 2.0])


def complaint(text: str) -> str | None:
    """The error for a value of the flag; None accepts it."""
    try:
        speculative_config(text)
    except argparse.ArgumentTypeError as error:
        return str(error)
    return None


@given(st.dictionaries(st.sampled_from(KEYS), LIKELY | JSON) | JSON)
def test_any_json_is_a_valid_setting_or_one_line(value: Any) -> None:
    text = json.dumps(value)
    wrong = complaint(text)
    if wrong is not None:
        assert len(wrong.splitlines()) == 1
        return
    config = parse_config(text)
    assert set(value) <= set(KEYS[:-1])
    assert 1 <= config.num_speculative_tokens <= MAX_TOKENS
    shortest, longest = config.match_lengths
    assert 1 <= shortest <= longest <= MAX_LOOKUP
    assert all(getattr(config, key) == given for key, given in value.items())


@given(st.text(max_size=30))
def test_any_text_is_a_valid_setting_or_refused(text: str) -> None:
    if complaint(text) is None:
        assert isinstance(json.loads(text), dict)
