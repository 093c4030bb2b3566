"""Numbers with which a measurement has nothing to measure: each is refused in one line."""

from __future__ import annotations

import pytest

from chairlift.loadtest import prefix, structured


@pytest.mark.parametrize(
    "given", [("--rows", "1"), ("--tokens", "0"), ("--rounds", "0"), ("--rounds", "-1")]
)
def test_structured(given: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        structured.main(given)
    assert "--rows must be at least 2, and --tokens and --rounds 1" in capsys.readouterr().err


@pytest.mark.parametrize("given", [("--requests", "1"), ("--prefix-tokens", "0")])
def test_prefix(given: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prefix.main(["none", *given])
    assert "--prefix-tokens must be at least 1, and --requests 2" in capsys.readouterr().err
