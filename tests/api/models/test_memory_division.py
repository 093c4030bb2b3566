"""The rule by which models share a device's memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.api.models.budget import KV_SHARE, Need, divide
from chairlift.engine.errors import ModelError

_SIZES = st.integers(0, 1 << 40)
_NEEDS = st.lists(
    st.tuples(_SIZES, _SIZES, st.none() | _SIZES, st.booleans()), min_size=1, max_size=6
)


@given(budget=st.integers(1, 1 << 42), sizes=_NEEDS)
def test_every_model_fits_alone_and_eager_ones_together(
    budget: int, sizes: list[tuple[int, int, int | None, bool]]
) -> None:
    needs = [Need(f"m{number}", *size) for number, size in enumerate(sizes)]
    try:
        parts = divide(budget, needs)
    except ModelError:
        largest = max(need.fixed for need in needs)
        eager = sum(need.fixed for need in needs if need.is_eager)
        # It is refused only where the weights are too large, or nearly.
        assert largest > budget * (1 - KV_SHARE) - 1 or eager > budget * (1 - KV_SHARE) - len(needs)
        return
    for need in needs:
        part = parts[need.name]
        assert need.fixed <= part <= budget
        assert need.caches is None or part == need.fixed
    assert sum(parts[need.name] for need in needs if need.is_eager) <= budget


def test_the_caches_share_what_the_weights_leave() -> None:
    needs = [Need(name, 10, 5, None, False) for name in "abc"]
    assert divide(100, needs) == dict.fromkeys("abc", 15 + 55 // 3)
    # Memory for two: each gets half of what two leave.
    assert divide(40, needs) == dict.fromkeys("abc", 15 + 10 // 2)
    flagged = [Need("a", 10, 5, 25, False), Need("b", 10, 5, None, False)]
    assert divide(100, flagged) == {"a": 40, "b": 15 + 45 // 2}


@pytest.mark.parametrize("eager", [True, False])
def test_models_that_do_not_fit_are_refused_by_name(eager: bool) -> None:
    with pytest.raises(ModelError, match="the model big needs"):
        divide(100, [Need("small", 1, 1, None, eager), Need("big", 90, 5, None, eager)])
    many = [Need(name, 40, 0, None, eager) for name in "abc"]
    if eager:
        with pytest.raises(ModelError, match="the models a, b, c are to be loaded at the start"):
            divide(100, many)
    else:
        assert divide(100, many) == dict.fromkeys("abc", 50)
