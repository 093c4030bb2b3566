"""A part of the scenario of extreme numbers, on a tiny model, and its checks of replies."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from support.tiny import tiny_model_dir

from chairlift.loadtest.faults.__main__ import main
from chairlift.loadtest.faults.odd import fault
from chairlift.loadtest.faults.odd_requests import OddRequest, odd_requests

REQUESTS = 60


async def test_odd(tmp_path: Path) -> None:
    """So many token ids that one behind the last is outside of the embedding's memory: with this
    seed an engine without checks ends by signal 11, twice.
    """
    model = tiny_model_dir(tmp_path, "llama", vocab_size=20_000)
    out = tmp_path / "figures.json"
    arguments = (
        *("odd", "--model", str(model), "--out", str(out), "--requests", str(REQUESTS)),
        *("--output-tokens", "24", "--seed", "1"),
    )
    assert await asyncio.to_thread(main, arguments) == 0
    figures = json.loads(out.read_text())
    assert figures["requests"] == REQUESTS
    assert set(figures["statuses"]) == {"200", "400"}
    assert figures["statuses"]["200"] > REQUESTS / 2
    assert figures["repeats"] >= 8


def test_every_value_of_every_field_comes_alone_before_one_comes_again() -> None:
    requests = list(islice(odd_requests(100, 8, seed=3), 1200))
    singles = Counter(json.dumps([r.path, r.body]) for r in requests[::2])
    assert max(singles.values()) <= 3  # 0 and 0.0 are two values, and the same on the way
    fields = {(r.path, name) for r in requests[::2] for name in r.body}
    assert {("/v1/completions", name) for name in ("seed", "n", "echo", "min_p")} <= fields
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages"} <= {p for p, _ in fields}
    combined = requests[1::2]
    assert any("structured_outputs" in r.body and "temperature" in r.body for r in combined)
    assert 0.05 < sum(r.wrong is not None for r in combined) / len(combined) < 0.3
    assert requests == list(islice(odd_requests(100, 8, seed=3), 1200))


ASKED = OddRequest("/v1/completions", {"prompt": "hi", "top_p": 0.5})
STREAMED = OddRequest("/v1/completions", {"prompt": "hi", "stream": True})


@pytest.mark.parametrize(
    ("request_", "status", "text", "why"),
    [
        (ASKED, 200, '{"choices": [{"finish_reason": "length"}]}', None),
        (ASKED, 200, '{"choices": [{"finish_reason": "error"}]}', "ended as error"),
        (ASKED, 200, '{"choices": [{"logprobs": NaN}]}', "NaN in the reply"),
        (ASKED, 200, "", "no JSON"),
        (ASKED, 400, '{"error": {"param": "top_p", "message": "too much"}}', None),
        (ASKED, 400, '{"error": {"message": "prompt: too much"}}', None),
        (ASKED, 400, '{"error": {"message": "too much", "param": null}}', "names no field"),
        (ASKED, 500, "{}", "neither 200 nor 400"),
        (ASKED, 0, "gone", "neither 200 nor 400"),
        (OddRequest("/v1/completions", {"n": 0}, "n"), 200, "{}", "n was taken"),
        (STREAMED, 200, 'data: {"choices": []}\n\ndata: [DONE]\n', None),
        (STREAMED, 200, 'data: {"error": {"message": "x"}}\n', "an error inside"),
        (STREAMED, 200, "", "a stream without events"),
    ],
)
def test_what_is_a_fault(request_: OddRequest, status: int, text: str, why: str | None) -> None:
    found = fault(request_, status, text)
    assert (found is None) == (why is None), found
    assert why is None or why in str(found)
