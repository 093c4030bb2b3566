"""Which outcomes of a step with drafts its rows keep."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chairlift.engine.core.step import accepted

TOKENS = st.integers(0, 2)


@given(st.lists(st.lists(TOKENS, max_size=4), min_size=1, max_size=9), st.data())
def test_each_row_keeps_its_right_tokens_and_the_next(
    drafts: list[list[int]], data: st.DataObject
) -> None:
    """Failure codes, which are negative, are never those of a draft."""
    sampled = [
        data.draw(st.lists(st.integers(-1, 2), min_size=len(draft) + 1, max_size=len(draft) + 1))
        for draft in drafts
    ]
    expected = []
    for draft, outcomes in zip(drafts, sampled, strict=True):
        right = 0
        while right < len(draft) and outcomes[right] == draft[right]:
            right += 1
        expected.append(outcomes[: right + 1])

    flat = [outcome for outcomes in sampled for outcome in outcomes]
    assert accepted(drafts, np.array(flat, np.int32)) == expected
