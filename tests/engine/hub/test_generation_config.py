"""A model's recommended sampling, from directories, GGUF files, paths and the known models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models import default_model_path

from chairlift.engine.errors import ModelError
from chairlift.engine.hub.generation_config import (
    KEYS,
    GenerationConfig,
    end_token_ids,
    read_generation_config,
)
from chairlift.engine.hub.gguf.sampling import sampling_metadata
from chairlift.engine.hub.known_models import KNOWN_MODELS, known_gguf
from chairlift.engine.hub.source import ModelSource

SMOLLM2 = {"temperature": 0.2, "top_p": 0.9}


def values_of(config: GenerationConfig) -> dict[str, object]:
    return {key: found.value for key, found in config.values.items()}


def directory(folder: Path, text: str | None = None, name: str = "tiny") -> ModelSource:
    if text is not None:
        (folder / "generation_config.json").write_text(text)
    return ModelSource(name, "directory", folder)


def gguf_source(path: Path, **metadata: Any) -> ModelSource:
    """A GGUF file without tensors, with the keys general.*; double underscores stand for dots."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in metadata.items():
        key = f"general.{name.replace('__', '.')}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_int32(key, value)
        else:
            writer.add_float32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return ModelSource("tiny", "gguf", path)


def test_a_directory_gives_what_its_file_has(tmp_path: Path) -> None:
    file = {"temperature": 0.6, "top_k": 20, "min_p": None, "do_sample": False, "eos_token_id": [0]}
    source = directory(tmp_path, json.dumps(file))
    config = read_generation_config(source)
    assert values_of(config) == {"temperature": 0.6, "top_k": 20, "eos_token_id": [0]}
    path = tmp_path / "generation_config.json"
    assert config.values["top_k"].place == f"{path}: top_k"
    assert config.origin == str(path)


def test_none_ignores_the_models_own(tmp_path: Path) -> None:
    source = directory(tmp_path, '{"temperature": 0.6}')
    assert values_of(read_generation_config(source, "none")) == {}
    assert values_of(read_generation_config(ModelSource("m", "gguf", tmp_path), "none")) == {}


def test_a_path_is_a_file_or_a_folder(tmp_path: Path) -> None:
    source = directory(tmp_path, '{"temperature": 0.6}')
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.5}')
    (other / "mine.json").write_text('{"top_p": 0.25}')
    assert values_of(read_generation_config(source, str(other))) == {"top_p": 0.5}
    assert values_of(read_generation_config(source, str(other / "mine.json"))) == {"top_p": 0.25}


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_an_override_wins(tmp_path: Path, choice: str) -> None:
    source = directory(tmp_path, '{"temperature": 0.6, "top_p": 0.5}')
    config = read_generation_config(source, choice, {"temperature": 0.1})
    assert values_of(config)["temperature"] == 0.1
    assert ("top_p" in config.values) == (choice == "auto")


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", '"x"', "[" * 100_000, "\udcff"])
def test_a_damaged_file_is_a_one_line_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match="--generation-config none") as caught:
        read_generation_config(directory(tmp_path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "nothing", "nothing/generation_config.json", "\0"])
def test_a_path_without_a_file_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_generation_config(directory(tmp_path), str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_gguf_keys_have_our_names_and_short_numbers(tmp_path: Path) -> None:
    source = gguf_source(
        tmp_path / "m.gguf",
        sampling__temp=0.6,
        sampling__top_p=0.95,
        sampling__top_k=20,
        sampling__min_p=0.05,
        sampling__penalty_repeat=1.1,
        sampling__penalty_last_n=64,
        sampling__mirostat=2,
        sampling__xtc_probability=0.5,
    )
    config = read_generation_config(source)
    assert values_of(config) == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }
    place = config.values["repetition_penalty"].place
    assert place == f"{source.path}: general.sampling.penalty_repeat"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"sampling__temp": -1.0}, {"temperature": 0}),
        ({"sampling__top_k": -1}, {"top_k": 0}),
        ({"sampling__top_p": 1.5}, {"top_p": 1.0}),
        ({"sampling__min_p": -0.5}, {"min_p": 0}),
        (
            {"sampling__penalty_repeat": 1.3, "sampling__penalty_last_n": 0},
            {"repetition_penalty": 1.0},
        ),
        ({"sampling__temp": "hot"}, {"temperature": "hot"}),
        ({}, {}),
    ],
)
def test_llama_cpps_ways_to_turn_a_filter_off(
    tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = read_generation_config(gguf_source(tmp_path / "m.gguf", **metadata))
    assert values_of(config) == expected


@given(value=st.floats(2**-7, 1.0, width=32))
def test_a_shortened_number_is_the_same_32_bit_number(value: float) -> None:
    metadata = {"general.sampling.temp": value}
    short = sampling_metadata(metadata)["temperature"]
    assert math.isclose(short, value, rel_tol=1e-7)
    assert len(repr(short)) <= len(repr(value))


def test_the_default_model_is_known() -> None:
    config = read_generation_config(ModelSource("any", "gguf", default_model_path()))
    assert values_of(config) == SMOLLM2
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in config.origin


def test_a_repository_is_known_by_its_whole_id(tmp_path: Path) -> None:
    for model in KNOWN_MODELS:
        config = read_generation_config(directory(tmp_path, name=model.hub_id))
        assert values_of(config) == model.sampling
        for other in (model.hub_id.split("/")[1], f"{model.hub_id}-2", f"x/{model.hub_id}"):
            assert not read_generation_config(directory(tmp_path, name=other)).values


def test_the_models_own_sampling_wins_over_the_table(tmp_path: Path) -> None:
    name = KNOWN_MODELS[0].hub_id
    own = read_generation_config(directory(tmp_path, '{"top_k": 5}', name))
    assert values_of(own) == {"top_k": 5}
    ends_only = read_generation_config(directory(tmp_path, '{"eos_token_id": 2}', name))
    assert values_of(ends_only) == {**SMOLLM2, "eos_token_id": 2}


def metadata_of(index: int) -> dict[str, Any]:
    model = KNOWN_MODELS[index]
    return {
        "general.architecture": model.architecture,
        "general.name": model.gguf_names[0],
        f"{model.architecture}.block_count": model.layers,
        f"{model.architecture}.embedding_length": model.hidden_size,
    }


@pytest.mark.parametrize("index", range(len(KNOWN_MODELS)))
def test_a_gguf_file_that_differs_in_one_fact_is_not_known(index: int) -> None:
    metadata = metadata_of(index)
    assert known_gguf(metadata) is KNOWN_MODELS[index]
    for key, value in metadata.items():
        changed = value + 1 if isinstance(value, int) else f"{value} v3"
        assert known_gguf({**metadata, key: changed}) is None
        assert known_gguf({k: v for k, v in metadata.items() if k != key}) is None


@given(name=st.text(), other=st.integers(0, len(KNOWN_MODELS) - 1), index=st.integers(0, 2))
def test_no_other_name_is_known(name: str, other: int, index: int) -> None:
    metadata = metadata_of(index)
    named = {**metadata, "general.name": name}
    known = known_gguf(named)
    assert known is None or name.lower() in known.gguf_names
    swapped = {**metadata, "general.name": KNOWN_MODELS[other].gguf_names[0]}
    assert (known_gguf(swapped) is None) == (other != index)


@pytest.mark.parametrize(("value", "ids"), [(7, {7}), ([1, 2], {1, 2}), ([], set()), (None, set())])
def test_end_token_ids(tmp_path: Path, value: object, ids: set[int]) -> None:
    source = directory(tmp_path, json.dumps({"eos_token_id": value}))
    assert end_token_ids(read_generation_config(source)) == ids


@pytest.mark.parametrize("value", ["</s>", -1, 1.5, True, [True], [1, "2"], {"id": 1}, 2**31])
def test_wrong_end_token_ids(tmp_path: Path, value: object) -> None:
    source = directory(tmp_path, json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id is "):
        end_token_ids(read_generation_config(source))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(values=st.dictionaries(st.sampled_from([*KEYS, "do_sample", "x"]), JSON))
def test_any_values_are_read_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    config = read_generation_config(directory(folder, json.dumps(values)))
    expected = {key: values[key] for key in KEYS if values.get(key) is not None}
    assert repr(values_of(config)) == repr(expected)
