"""Log-probabilities in the format of /v1/completions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chairlift.api.text.logprobs import Scored, completion_logprobs
from chairlift.engine.messages import TokenLogprobs


@given(st.dictionaries(st.integers(0, 30), st.floats(-20, 0), min_size=1), st.data())
def test_the_most_likely_tokens_include_the_chosen_one(
    scores: dict[int, float], data: st.DataObject
) -> None:
    """Clients look the token up in them. Two tokens in a row have the same text here."""
    vocabulary: Any = SimpleNamespace(
        token_text=lambda token: SimpleNamespace(text=f"t{token // 2}", bytes=[])
    )
    best = sorted(scores.items(), key=lambda item: -item[1])
    count = data.draw(st.integers(1, len(best)))
    chosen, logprob = data.draw(st.sampled_from(best))
    scored = Scored(chosen, TokenLogprobs(logprob, best[:count]), 0)
    shown = completion_logprobs([scored], vocabulary, count)
    assert shown.top_logprobs is not None
    [top] = shown.top_logprobs
    assert top is not None
    assert top[shown.tokens[0]] >= logprob
    assert len(top) <= count + 1
    assert max(top.values()) == best[0][1]
