"""The scenario of extreme numbers, shortened, on a tiny model; and its checks of replies."""

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


@pytest.mark.system
async def test_odd(tmp_path: Path) -> None:
    """An engine without checks would crash twice (signal 11) with this seed.

    The vocabulary is so large that the row of the first invalid token id lies outside of the
    embedding's memory.
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


def test_every_value_of_every_field_is_sent_alone_before_any_repeats() -> None:
    requests = list(islice(odd_requests(100, 8, seed=3), 1200))
    singles = Counter(json.dumps([r.path, r.body]) for r in requests[::2])
    assert max(singles.values()) <= 3  # 0 and 0.0 are two values with the same JSON
    fields = {(r.path, name) for r in requests[::2] for name in r.body}
    assert {("/v1/completions", name) for name in ("seed", "n", "echo", "min_p")} <= fields
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages"} <= {p for p, _ in fields}
    combined = requests[1::2]
    assert any("structured_outputs" in r.body and "temperature" in r.body for r in combined)
    assert 0.05 < sum(r.wrong is not None for r in combined) / len(combined) < 0.3
    assert requests == list(islice(odd_requests(100, 8, seed=3), 1200))


PLAIN = OddRequest("/v1/completions", {"prompt": "hi", "top_p": 0.5})
STREAMED = OddRequest("/v1/completions", {"prompt": "hi", "stream": True})


@pytest.mark.parametrize(
    ("request_", "status", "text", "expected"),
    [
        (PLAIN, 200, '{"choices": [{"finish_reason": "length"}]}', None),
        (PLAIN, 200, '{"choices": [{"finish_reason": "error"}]}', "ended as error"),
        (PLAIN, 200, '{"choices": [{"logprobs": NaN}]}', "NaN in the reply"),
        (PLAIN, 200, "", "no JSON"),
        (PLAIN, 400, '{"error": {"param": "top_p", "message": "too much"}}', None),
        (PLAIN, 400, '{"error": {"message": "prompt: too much"}}', None),
        (PLAIN, 400, '{"error": {"message": "too much", "param": null}}', "names no field"),
        (PLAIN, 500, "{}", "neither 200 nor 400"),
        (PLAIN, 0, "gone", "neither 200 nor 400"),
        (OddRequest("/v1/completions", {"n": 0}, "n"), 200, "{}", "n was taken"),
        (STREAMED, 200, 'data: {"choices": []}\n\ndata: [DONE]\n', None),
        (STREAMED, 200, 'data: {"error": {"message": "x"}}\n', "an error inside"),
        (STREAMED, 200, "", "a stream without events"),
    ],
)
def test_faults_in_replies_are_found(
    request_: OddRequest, status: int, text: str, expected: str | None
) -> None:
    found = fault(request_, status, text)
    assert (found is None) == (expected is None), found
    assert expected is None or expected in str(found)
