"""Scores and embeddings of prompts: the official client, and the requests of lm-eval-harness."""

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
from support.engine.reference import solo_hidden, solo_logprobs, solo_tokens
from support.models import write_tiny_default_gguf

from chairlift.engine.config import DEFAULT_MODEL
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model.loader import load_model
from chairlift.engine.model.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.system

TEXT = (
    "A chairlift never stops: riders board and leave a moving line. Every step runs one batch; "
    "sequences join it and leave it between two steps.\nWas kostet 1 Fahrt? 12,50 €."
)
# Bound on the difference between lm-eval's scores and mlx-lm's.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_default_gguf(path)
    return path


@pytest.fixture(scope="module")
def server(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in float32 on every device, so that its results can be compared with mlx-lm's."""
    folder = tmp_path_factory.mktemp("clients")
    flags = ("--served-model-name", DEFAULT_MODEL, "--dtype", "float32", "--max-step-tokens", "48")
    with serving(folder, str(path), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    """Not strict: a strict client refuses base64 embeddings and the null score of a first token."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=120) as official:
        yield official


@pytest.fixture(scope="module")
def strict(server: Server) -> Iterator[OpenAI]:
    url = f"{server.url}/v1"
    with OpenAI(base_url=url, api_key="-", _strict_response_validation=True) as official:
        yield official


@pytest.fixture(scope="module")
def source(path: Path) -> ModelSource:
    return ModelSource(DEFAULT_MODEL, "gguf", path)


@pytest.fixture(scope="module")
def model(source: ModelSource) -> Any:
    """The same model for mlx-lm's own forward pass."""
    return load_model(source, "float32").model


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Any:
    return load_tokenizer(source)


def _continuations(model: Any, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Contexts and continuations, as in a task with several choices; the last one is greedy."""
    context, rest = tokenizer.encode(TEXT[:80]), tokenizer.encode(TEXT[80:])
    return [
        (context, rest),
        (context, tokenizer.encode(" moving")),
        ([tokenizer.eos_token_id], context),
        (context, solo_tokens(model, context, 5)),
    ]


def test_lm_evals_requests_get_the_logprobs_of_mlx_lm(
    server: Server, model: Any, tokenizer: Any
) -> None:
    """lm-eval's "local-completions" sends token ids, requests one more token, and ignores it."""
    pairs = _continuations(model, tokenizer)
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
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(tokens) + 1
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        scores = logprobs["token_logprobs"][len(context) : -1]
        expected = np.array(solo_logprobs(model, tokens))[len(context) - 1 :]
        chosen = expected[np.arange(len(continuation)), continuation]
        assert np.abs(np.array(scores) - chosen).max() < TOLERANCE
        best = [max(top.values()) for top in logprobs["top_logprobs"][len(context) : -1]]
        assert np.abs(np.array(best) - expected.max(axis=-1)).max() < TOLERANCE
        greedy = [score == top for score, top in zip(scores, best, strict=True)]
        assert greedy == (expected.argmax(axis=-1) == continuation).tolist()


def test_lm_eval_itself(server: Server, model: Any, tokenizer: Any) -> None:
    """Runs only if lm-eval is installed, which takes half a gigabyte."""
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    harness = completions.LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model=DEFAULT_MODEL,
        tokenizer_backend="remote",
    )
    pairs = _continuations(model, tokenizer)
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
        body: dict[str, Any] = {"model": DEFAULT_MODEL, "prompt": prompt, "echo": True}
        alone = client.completions.create(max_tokens=0, logprobs=2, **body)
        assert alone.choices[0].finish_reason == "length"
        text = alone.choices[0].text
        assert text == (TEXT if prompt is TEXT else "One, two")
        assert alone.usage is not None
        assert alone.usage.completion_tokens == 0
        echoed: Any = alone.choices[0].logprobs
        lengths = {len(values) for values in dict(echoed).values()}
        assert lengths == {alone.usage.prompt_tokens}
        for token, top in zip(echoed.tokens[1:], echoed.top_logprobs[1:], strict=True):
            assert len(top) == (2 if token in sorted(top, key=top.get)[-2:] else 3)
            assert token in top
        starts = [*echoed.text_offset, len(text)]
        complete = [token for token in echoed.tokens if not token.startswith("bytes:")]
        shown = [text[a:b] for a, b in pairwise(starts)]
        assert set(complete) <= set(shown)
        assert "".join(shown) == text
        more = {"max_tokens": 6, "temperature": 0, "logprobs": 2, **body}
        [choice] = client.completions.create(**more).choices
        followed: Any = choice.logprobs
        assert followed.tokens[: len(echoed.tokens)] == echoed.tokens
        assert len(followed.tokens) == len(echoed.tokens) + 6
        assert followed.text_offset[len(echoed.tokens)] == len(text)
        streamed = [chunk.choices[0] for chunk in client.completions.create(stream=True, **more)]
        assert "".join(chunk.text for chunk in streamed) == choice.text
        parts: list[Any] = [chunk.logprobs for chunk in streamed if chunk.logprobs is not None]
        assert [token for part in parts for token in part.tokens] == followed.tokens
        assert [start for part in parts for start in part.text_offset] == followed.text_offset


def test_max_tokens_0_needs_an_echo(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=DEFAULT_MODEL, prompt="x", max_tokens=0)


def test_embeddings_with_the_official_client(
    client: OpenAI, strict: OpenAI, model: Any, tokenizer: Any
) -> None:
    """Thirty-two texts at once, in several steps; each embedding equals mlx-lm's."""
    texts = [TEXT[start : start + 7 + 2 * start] for start in range(32)]
    reply = client.embeddings.create(model=DEFAULT_MODEL, input=texts)
    assert [entry.index for entry in reply.data] == list(range(32))
    assert reply.usage.total_tokens == sum(len(tokenizer.encode(text)) for text in texts)
    for text, entry in list(zip(texts, reply.data, strict=True))[::9]:
        mean = np.array(solo_hidden(model, tokenizer.encode(text)).mean(axis=0))
        assert np.allclose(entry.embedding, mean / np.linalg.norm(mean), atol=1e-4)
    body: dict[str, Any] = {"model": DEFAULT_MODEL, "input": tokenizer.encode(texts[9])}
    plain = strict.embeddings.create(encoding_format="float", **body)
    assert plain.data[0].embedding == pytest.approx(reply.data[9].embedding, abs=1e-5)
    last: Any = client.embeddings.create(
        dimensions=48, extra_body={"pooling": "last", "normalize": False}, **body
    )
    expected = solo_hidden(model, body["input"])[-1, :48]
    assert mx.allclose(mx.array(last.data[0].embedding), expected, rtol=1e-3, atol=1e-3)


def test_embeddings_over_plain_http(server: Server) -> None:
    body = {"input": "x", "dimensions": 3, "encoding_format": "base64"}
    reply = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=120).json()
    assert reply["object"] == "list"
    raw = base64.b64decode(reply["data"][0]["embedding"])
    assert np.linalg.norm(np.frombuffer(raw, "<f4")) == pytest.approx(1)
    for wrong, param in (
        ({"dimensions": 65}, "dimensions"),
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


def test_embeddings_are_in_the_metrics_and_in_openapi(server: Server, client: OpenAI) -> None:
    before = server.metrics()
    client.embeddings.create(model=DEFAULT_MODEL, input=["one two", "three"])
    after = server.metrics()
    counters = {
        "vllm:request_success_total": {"finished_reason": "length"},
        "vllm:prompt_tokens_total": {},
        "chairlift_http_requests_total": {"route": "/v1/embeddings", "status": "200"},
    }
    increments = [
        after.total(name, **labels) - before.total(name, **labels)
        for name, labels in counters.items()
    ]
    assert increments == [2, 3, 1]
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert "requestBody" in paths["/v1/embeddings"]["post"]


def test_clients_can_read_the_servers_tokenizer(
    server: Server, tokenizer: Any, tmp_path: Path
) -> None:
    info = httpx.get(f"{server.url}/tokenizer_info").json()
    assert info["eos_token"] == tokenizer.eos_token
