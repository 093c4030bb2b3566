"""A model's default sampling has the ranges of the request fields, and a request's values win."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from chairlift.api.schemas.sampling_defaults import (
    SamplingDefaults,
    check_override,
    sampling_defaults,
)
from chairlift.api.schemas.schemas import GenerationRequest
from chairlift.engine.errors import ModelError
from chairlift.engine.hub.generation_config import SAMPLING_KEYS, Found

NEUTRAL = SamplingDefaults()
# Values inside, on and beyond the bounds of all fields, and of other types.
VALUES = st.one_of(
    st.sampled_from([-2, -1, -0.5, 0, 0.005, 0.01, 0.5, 1, 1.0, 2, 2.5, 100, 101, 2**31]),
    st.floats(),
    st.integers(),
    st.booleans(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
)
FIELDS = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.01, 100),
}


def found(values: dict[str, Any]) -> dict[str, Found]:
    return {name: Found(value, f"c.json: {name}") for name, value in values.items()}


def test_the_fields_are_the_keys() -> None:
    assert set(SamplingDefaults.__struct_fields__) == set(SAMPLING_KEYS) == FIELDS.keys()


@given(name=st.sampled_from(SAMPLING_KEYS), value=VALUES)
def test_a_default_is_accepted_exactly_if_a_request_could_have_it(name: str, value: Any) -> None:
    # A file may write a whole number as 5.0, which a request may not.
    asked = int(value) if name == "top_k" and type(value) is float and value % 1 == 0 else value
    try:
        expected = getattr(GenerationRequest(**{name: asked}), name)
    except ValidationError:
        with pytest.raises(ModelError, match=f"c.json: {name} is ") as caught:
            sampling_defaults(found({name: value}))
        assert "\n" not in str(caught.value)
    else:
        assert getattr(sampling_defaults(found({name: value})), name) == expected


@given(
    defaults=st.fixed_dictionaries({}, optional=FIELDS),
    request=st.fixed_dictionaries({}, optional={k: v | st.none() for k, v in FIELDS.items()}),
)
def test_a_requests_value_wins_and_an_absent_or_null_one_takes_the_default(
    defaults: dict[str, Any], request: dict[str, Any]
) -> None:
    chosen = sampling_defaults(found(defaults)).overridden_by(
        GenerationRequest.model_validate(request)
    )
    given = {name: value for name, value in request.items() if value is not None}
    assert msgspec.structs.asdict(chosen) == {
        **msgspec.structs.asdict(NEUTRAL),
        **defaults,
        **given,
    }


def test_the_log_shows_what_is_not_neutral() -> None:
    assert str(NEUTRAL) == "neutral"
    assert str(SamplingDefaults(temperature=0.2, top_k=20)) == "temperature 0.2, top_k 20"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"max_new_tokens": 5}, "unknown key 'max_new_tokens', not one of temperature, top_p"),
        ({"temperature": 2.5}, "temperature is 2.5, but should be less than or equal to 2"),
        ({"temperature": "hot"}, "temperature is 'hot', but should be a valid number"),
        ({"top_p": -1}, "top_p is -1, but should be greater than or equal to 0"),
        ({"top_k": 1.5}, "top_k is 1.5, but should be a valid integer"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x', but should be a token id"),
    ],
)
def test_wrong_overrides(override: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_override(override)
    assert str(caught.value).startswith("--override-generation-config: ")
    assert "\n" not in str(caught.value)


def test_an_override_may_be_null() -> None:
    check_override({"temperature": None, "top_k": 5, "eos_token_id": [1, 2]})
