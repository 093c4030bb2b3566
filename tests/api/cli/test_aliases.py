"""The names of other servers mean the same as ours, in every source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.api.cli.arguments.aliases import AliasAction
from chairlift.api.cli.arguments.config_sources import ConfigError, Resolved, resolve
from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.api.cli.arguments.parser_names import REASONING_PARSERS, TOOL_PARSERS
from chairlift.api.cli.serve import add_arguments
from chairlift.api.text.chat_format import ThinkTags, parser_names
from chairlift.api.text.harmony import HARMONY

ROWS = ("max-rows", "max-num-seqs", "decode-concurrency")
# Flag, its value, the setting that it stands for and that one's value.
SAME: list[tuple[str, str, str, Any]] = [
    ("max-model-len", "4096", "max-context", 4096),
    ("max-model-len", "32k", "max-context", 32_000),
    ("max-model-len", "1.5K", "max-context", 1536),
    ("max-num-seqs", "7", "max-rows", 7),
    ("decode-concurrency", "7", "max-rows", 7),
    ("max-num-batched-tokens", "100", "max-step-tokens", 100),
    ("data-parallel-size", "2", "replicas", 2),
    ("prompt-cache-bytes", "1G", "prefix-cache-bytes", 1 << 30),
    ("kv-cache-dtype", "int8", "kv-bits", 8),
    ("kv-cache-dtype", "q4_0", "kv-bits", 4),
    ("kv-cache-dtype", "auto", "kv-bits", None),
    ("tool-call-parser", "hermes", "tool-parser", "json_tools"),
    ("tool-call-parser", "mistral", "tool-parser", "mistral"),
    ("reasoning-parser", "deepseek_r1", "think-tags", ThinkTags("<think>", "</think>")),
    ("allowed-origins", '["https://a.org", "*"]', "cors-origin", ["https://a.org", "*"]),
    ("allowed-origins", "https://a.org,*", "cors-origin", ["https://a.org", "*"]),
]


def parser() -> CommandParser:
    parser = CommandParser(prog="chairlift serve")
    add_arguments(parser)
    return parser


def resolved(*arguments: str, **environment: str) -> Resolved:
    return resolve(parser(), arguments, {f"CHAIRLIFT_{k}": v for k, v in environment.items()})


def value_of(result: Resolved, key: str) -> tuple[Any, str]:
    (found,) = (setting for setting in result.settings if setting.key == key)
    assert getattr(result.options, key.replace("-", "_")) == found.value
    return found.value, found.source


@pytest.mark.parametrize(("name", "text", "of", "value"), SAME)
def test_a_name_of_another_server_is_a_flag_a_variable_and_a_key(
    tmp_path: Path, name: str, text: str, of: str, value: Any
) -> None:
    assert value_of(resolved(f"--{name}", text), of) == (value, "flag")
    variable = name.upper().replace("-", "_")
    by_variable = resolved(**{variable: text})
    assert value_of(by_variable, of) == (value, f"CHAIRLIFT_{variable}")
    file = tmp_path / "c.toml"
    file.write_text(f"{name} = '{text}'")
    assert value_of(resolved("--config", str(file)), of) == (value, str(file))


def test_the_switches(tmp_path: Path) -> None:
    for arguments, environment, value in (
        (["--no-enable-prefix-caching"], {}, 0),
        ([], {"ENABLE_PREFIX_CACHING": "false"}, 0),
        (["--enable-prefix-caching"], {"PREFIX_CACHE_BYTES": "0"}, None),
        (["--enable-prefix-caching", "--prefix-cache-bytes", "1G"], {}, 1 << 30),
        (["--no-enable-prefix-caching", "--prefix-cache-bytes", "0"], {}, 0),
        (["--enable-auto-tool-choice"], {}, None),
    ):
        result = resolved(*arguments, **environment)
        assert result.options.prefix_cache_bytes == value
    file = tmp_path / "c.toml"
    file.write_text("enable-prefix-caching = false\nenable-auto-tool-choice = true")
    assert resolved("--config", str(file)).options.prefix_cache_bytes == 0


def test_the_model_may_be_a_flag() -> None:
    assert value_of(resolved("--model", "a/b"), "model") == ("a/b", "flag")
    assert resolved("a/b", "--model", "a/b").options.model == "a/b"
    assert resolved("--model", "a/b", MODEL="c/d").options.model == "a/b"
    with pytest.raises(ConfigError, match="unknown variable CHAIRLIFT_MODEL_FLAG"):
        resolved(MODEL_FLAG="x")


def test_origins_may_be_repeated() -> None:
    result = resolved(
        "--allowed-origins", '["https://a.org"]', "--allowed-origins", "https://b.org"
    )
    assert result.options.cors_origin == ["https://a.org", "https://b.org"]


def test_an_earlier_source_wins_by_whichever_name(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("max-num-seqs = 1")
    assert resolved("--config", str(file), MAX_ROWS="2").options.max_rows == 2
    assert resolved("--max-num-seqs", "3", MAX_ROWS="2").options.max_rows == 3
    assert resolved("--max-rows", "4", MAX_NUM_SEQS="2").options.max_rows == 4


@settings(deadline=None, max_examples=60)
@given(
    flags=st.dictionaries(st.sampled_from(ROWS), st.integers(1, 3)),
    variables=st.dictionaries(st.sampled_from(ROWS), st.integers(1, 3)),
)
def test_any_mix_of_names_and_sources(flags: dict[str, int], variables: dict[str, int]) -> None:
    arguments = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    environment = {name.upper().replace("-", "_"): str(v) for name, v in variables.items()}
    if max(len(set(values.values())) for values in (flags, variables)) > 1:
        with pytest.raises(ConfigError, match="say different things"):
            resolved(*arguments, **environment)
    else:
        expected = [*flags.values(), *variables.values(), None][0]
        assert resolved(*arguments, **environment).options.max_rows == expected


@pytest.mark.parametrize(
    ("arguments", "environment", "names"),
    [
        (["--max-rows", "8", "--max-num-seqs", "9"], {}, "--max-num-seqs and --max-rows"),
        (
            ["--max-num-seqs", "8", "--decode-concurrency", "9"],
            {},
            "--decode-concurrency and --max-num-seqs",
        ),
        (["a/b", "--model", "c/d"], {}, "--model and MODEL"),
        (
            ["--enable-prefix-caching", "--prefix-cache-bytes", "0"],
            {},
            "--enable-prefix-caching and --prefix-cache-bytes",
        ),
        (["--kv-cache-dtype", "auto", "--kv-bits", "8"], {}, "--kv-cache-dtype and --kv-bits"),
        (
            [],
            {"MAX_ROWS": "8", "MAX_NUM_SEQS": "9"},
            "CHAIRLIFT_MAX_NUM_SEQS and CHAIRLIFT_MAX_ROWS",
        ),
    ],
)
def test_two_names_with_different_values_are_an_error(
    arguments: list[str], environment: dict[str, str], names: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(*arguments, **environment)
    assert str(caught.value) == f"{names} say different things; give one"


def test_two_names_with_the_same_value_agree() -> None:
    result = resolved("--max-rows", "8", "--max-num-seqs", "8", "--decode-concurrency", "8")
    assert result.options.max_rows == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-dtype", "fp8"], "cannot have the type 'fp8'; it takes auto, int8"),
        (["--tool-call-parser", "llama3_json"], "'llama3_json'; there are function_gemma"),
        (["--tool-call-parser", "pythonic"], "'pythonic'; there are function_gemma"),
        (["--reasoning-parser", "granite"], "'granite'; there are deepseek_r1"),
        (["--max-model-len", "0"], "'0' is not a whole number above 0"),
        (["--max-model-len", "1.0001k"], "is not a whole number above 0"),
        (["--max-model-len", "-1"], "'-1' is not a whole number above 0"),
        (["--allowed-origins", "[1]"], "is not a JSON list of strings"),
        (["--allowed-origins", "["], "is not a JSON list of strings"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(arguments)
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_every_alias_stands_for_a_flag_that_exists() -> None:
    ours = {setting.key for setting in resolved().settings}
    aliases = [action for action in parser()._actions if isinstance(action, AliasAction)]
    assert {alias.of for alias in aliases} - {None} <= ours
    assert {alias.option_strings[0][2:] for alias in aliases} >= {name for name, *_ in SAME}


def test_every_parsers_name_stands_for_one_that_mlx_lm_has() -> None:
    assert set(TOOL_PARSERS.values()) <= {*parser_names(), HARMONY}
    # Where mlx-lm has a parser of vLLM's name, that name needs no entry.
    assert not set(TOOL_PARSERS) & set(parser_names())
    for tags in REASONING_PARSERS.values():
        # They can be written to and read from a file, as --think-tags takes them.
        assert ThinkTags(*str(tags).split()) == tags
