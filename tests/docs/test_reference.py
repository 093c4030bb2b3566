"""The generated reference pages are up to date; ``make reference`` writes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.paths import ROOT

from chairlift.api.cli import reference as flags
from chairlift.api.server import reference as api
from chairlift.engine.device import reference as defaults
from chairlift.metrics import reference as metrics

PAGES: dict[str, Callable[[], str]] = {
    "api.md": api.page,
    "defaults.md": defaults.page,
    "flags.md": flags.page,
    "metrics.md": metrics.page,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_up_to_date(name: str) -> None:
    page = (ROOT / "docs" / "reference" / name).read_text()
    assert page == PAGES[name](), "run `make reference`"
