"""What clients ask of a prompt itself: the official client, and lm-eval-harness by its requests."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import openai
import pytest
from openai import OpenAI
from support.api.server import Server, serving
from support.engine.reference import solo_hidden, solo_logprobs
from support.models import default_model_path

from chairlift.engine.config import DEFAULT_MODEL
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model.loader import load_model
from chairlift.engine.model.tokenizer import load_tokenizer

SOURCE = ModelSource(DEFAULT_MODEL, "gguf", default_model_path())
TEXT = (
    "A chairlift never stops: riders board and leave a moving line. Every step runs one batch; "
    "sequences join it and leave it between two steps.\nWas kostet 1 Fahrt? 12,50 €."
)
# How far lm-eval's numbers may be from mlx-lm's own.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Not rounded to bfloat16, where that would be done."""
    folder = tmp_path_factory.mktemp("clients")
    with serving(folder, "--dtype", "float32", "--max-step-tokens", "48") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    """Not strict: then it would refuse OpenAI's own base64, and the null of a first token."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=120) as official:
        yield official


@pytest.fixture(scope="module")
def strict(server: Server) -> Iterator[OpenAI]:
    url = f"{server.url}/v1"
    with OpenAI(base_url=url, api_key="-", _strict_response_validation=True) as official:
        yield official


@pytest.fixture(scope="module")
def model() -> Any:
    """As mlx-lm computes it."""
    return load_model(SOURCE, "float32").model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(SOURCE)


def _continuations(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Contexts and what they may go on with, as a task with several choices has them."""
    context, rest = tokenizer.encode(TEXT[:80]), tokenizer.encode(TEXT[80:])
    return [
        (context, rest),
        (context, tokenizer.encode(" moving")),
        ([tokenizer.eos_token_id], context),
    ]


def test_lm_eval_gets_the_logprobs_of_mlx_lms_own_forward(
    server: Server, model: Any, tokenizer: Any
) -> None:
    """Its "local-completions" sends the tokens, asks for one more, and leaves that out."""
    pairs = _continuations(tokenizer)
    body = {
        "model": DEFAULT_MODEL,
        "prompt": [context + continuation for context, continuation in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
    for (context, continuation), choice in zip(pairs, choices, strict=True):
        tokens = context + continuation
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(tokens) + 1
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        scores = told["token_logprobs"][len(context) : -1]
        expected = np.array(solo_logprobs(model, tokens))[len(context) - 1 :]
        chosen = expected[np.arange(len(continuation)), continuation]
        assert np.abs(np.array(scores) - chosen).max() < TOLERANCE
        best = [max(top.values()) for top in told["top_logprobs"][len(context) : -1]]
        assert np.abs(np.array(best) - expected.max(axis=-1)).max() < TOLERANCE
        greedy = [score == top for score, top in zip(scores, best, strict=True)]
        assert greedy == (expected.argmax(axis=-1) == continuation).tolist()


def test_lm_eval_itself(server: Server, model: Any, tokenizer: Any) -> None:
    """Where it is installed; it takes half a gigabyte."""
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    harness = completions.LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model=DEFAULT_MODEL,
        tokenizer_backend="remote",
    )
    pairs = _continuations(tokenizer)
    requests = [((str(i), ""), *pair) for i, pair in enumerate(pairs)]
    for (context, continuation), (total, _) in zip(
        pairs, harness._loglikelihood_tokens(requests), strict=True
    ):
        expected = np.array(solo_logprobs(model, context + continuation))[len(context) - 1 :]
        chosen = expected[np.arange(len(continuation)), continuation]
        assert total == pytest.approx(chosen.sum(), abs=TOLERANCE * len(continuation))


def test_echo_with_the_official_client(client: OpenAI, tokenizer: Any) -> None:
    prompts: list[Any] = [TEXT, tokenizer.encode("One, two")]
    for prompt in prompts:
        asked: dict[str, Any] = {"model": DEFAULT_MODEL, "prompt": prompt, "echo": True}
        alone = client.completions.create(max_tokens=0, logprobs=2, **asked)
        assert alone.choices[0].finish_reason == "length"
        text = alone.choices[0].text
        assert text == (TEXT if prompt is TEXT else "One, two")
        assert alone.usage is not None
        assert alone.usage.completion_tokens == 0
        told: Any = alone.choices[0].logprobs
        lengths = {len(own) for own in dict(told).values()}
        assert lengths == {alone.usage.prompt_tokens}
        assert {len(top) for top in told.top_logprobs[1:]} == {2}
        starts = [*told.text_offset, len(text)]
        whole = [token for token in told.tokens if not token.startswith("bytes:")]
        shown = [text[a:b] for a, b in pairwise(starts)]
        assert set(whole) <= set(shown)
        assert "".join(shown) == text
        more = {"max_tokens": 6, "temperature": 0, "logprobs": 2, **asked}
        [choice] = client.completions.create(**more).choices
        followed: Any = choice.logprobs
        assert followed.tokens[: len(told.tokens)] == told.tokens
        assert len(followed.tokens) == len(told.tokens) + 6
        assert followed.text_offset[len(told.tokens)] == len(text)
        streamed = [chunk.choices[0] for chunk in client.completions.create(stream=True, **more)]
        assert "".join(chunk.text for chunk in streamed) == choice.text
        parts: list[Any] = [chunk.logprobs for chunk in streamed if chunk.logprobs is not None]
        assert [token for part in parts for token in part.tokens] == followed.tokens
        assert [start for part in parts for start in part.text_offset] == followed.text_offset


def test_a_completion_of_no_token_needs_an_echo(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=DEFAULT_MODEL, prompt="x", max_tokens=0)


def test_embeddings_with_the_official_client(
    client: OpenAI, strict: OpenAI, model: Any, tokenizer: Any
) -> None:
    """Thirty-two at once, in several steps; each is what mlx-lm makes of it alone."""
    texts = [TEXT[start : start + 7 + 2 * start] for start in range(32)]
    reply = client.embeddings.create(model=DEFAULT_MODEL, input=texts)
    assert [entry.index for entry in reply.data] == list(range(32))
    assert reply.usage.total_tokens == sum(len(tokenizer.encode(text)) for text in texts)
    for text, entry in list(zip(texts, reply.data, strict=True))[::9]:
        mean = np.array(solo_hidden(model, tokenizer.encode(text)).mean(axis=0))
        assert np.allclose(entry.embedding, mean / np.linalg.norm(mean), atol=1e-4)
    asked: dict[str, Any] = {"model": DEFAULT_MODEL, "input": tokenizer.encode(texts[9])}
    plain = strict.embeddings.create(encoding_format="float", **asked)
    assert plain.data[0].embedding == pytest.approx(reply.data[9].embedding, abs=1e-5)
    last: Any = client.embeddings.create(
        dimensions=64, extra_body={"pooling": "last", "normalize": False}, **asked
    )
    expected = solo_hidden(model, asked["input"])[-1, :64]
    assert mx.allclose(mx.array(last.data[0].embedding), expected, rtol=1e-3, atol=1e-3)


def test_embeddings_as_they_are_on_the_wire(server: Server) -> None:
    body = {"input": "x", "dimensions": 3, "encoding_format": "base64"}
    reply = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=120).json()
    assert reply["object"] == "list"
    raw = base64.b64decode(reply["data"][0]["embedding"])
    assert np.linalg.norm(np.frombuffer(raw, "<f4")) == pytest.approx(1)
    for wrong, param in (
        ({"dimensions": 577}, "dimensions"),
        ({"pooling": "max"}, "pooling"),
        ({"input": ["x", ""]}, "input"),
        ({"input": [[49152]]}, "input"),
        ({"input": "word " * 10_000}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
    ):
        refused = httpx.post(f"{server.url}/v1/embeddings", json={**body, **wrong}, timeout=120)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    cut = {"input": "word " * 10_000, "truncate_prompt_tokens": 5}
    reply = httpx.post(f"{server.url}/v1/embeddings", json=cut, timeout=120).json()
    assert reply["usage"]["prompt_tokens"] == 5


def test_operators_see_embeddings_as_they_see_the_rest(server: Server, client: OpenAI) -> None:
    before = server.metrics()
    client.embeddings.create(model=DEFAULT_MODEL, input=["one two", "three"])
    after = server.metrics()
    grown = {
        "vllm:request_success_total": {"finished_reason": "length"},
        "vllm:prompt_tokens_total": {},
        "chairlift_http_requests_total": {"route": "/v1/embeddings", "status": "200"},
    }
    by = [after.total(name, **own) - before.total(name, **own) for name, own in grown.items()]
    assert by == [2, 3, 1]
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert "requestBody" in paths["/v1/embeddings"]["post"]


def test_the_tokenizer_can_be_the_servers(server: Server, tokenizer: Any, tmp_path: Path) -> None:
    told = httpx.get(f"{server.url}/tokenizer_info").json()
    assert told["eos_token"] == tokenizer.eos_token
