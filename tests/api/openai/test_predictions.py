"""OpenAI's predicted outputs: what the engine is given, and the counts in usage."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.api.api_server import CHAT, END, MESSAGES, Running, ids, running
from support.api.fake_engine import FakeEngine, Script, Scripted, model_info

from chairlift.api.schemas.schemas import ChatRequest
from chairlift.engine.client.stream import Stream
from chairlift.engine.messages import Submit, TokenOutput
from chairlift.scheduler.forecast import Forecast

PATH = "/v1/chat/completions"
REPLY = "the same text"


def drafting(chunk: int = 4, accepted: int = 3, rejected: int = 2) -> Script:
    """Each step of a reply has ``chunk`` tokens and these counts."""
    tokens = [*ids(REPLY), END]
    return lambda request, index: Scripted(
        tokens, ended_by_token=True, chunk=chunk, accepted=accepted, rejected=rejected
    )


def predicting(content: Any, **fields: Any) -> dict[str, Any]:
    return {**CHAT, **fields, "prediction": {"type": "content", "content": content}}


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(FakeEngine(model_info(), drafting())) as server:
        yield server


@pytest.mark.parametrize(
    "content",
    ["some text", [{"type": "text", "text": "some "}, {"type": "text", "text": "text"}]],
)
async def test_the_engine_gets_the_tokens_of_the_text(server: Running, content: Any) -> None:
    status, _ = await server.post(PATH, predicting(content, n=2))
    assert status == 200
    [submit] = server.engine.submitted
    assert (submit.prediction, submit.n) == (ids("some text"), 2)
    await server.post(PATH, CHAT)
    assert server.engine.submitted[-1].prediction == []


async def test_the_official_client_can_send_a_prediction(server: Running) -> None:
    reply = await server.openai.chat.completions.create(
        model="org/tiny", messages=MESSAGES, prediction={"type": "content", "content": REPLY}
    )
    assert server.engine.submitted[-1].prediction == ids(REPLY)
    assert reply.usage is not None
    details = reply.usage.completion_tokens_details
    assert details is not None
    # 14 tokens in steps of 4, of which the last has but 2.
    assert details.accepted_prediction_tokens == 3 + 3 + 3 + 2
    assert details.rejected_prediction_tokens == 2 + 2 + 2 + 2 + 1


@pytest.mark.parametrize("n", [1, 3])
async def test_usage_sums_the_counts_of_all_choices(server: Running, n: int) -> None:
    _, reply = await server.post(PATH, predicting("a", n=n))
    details = {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 11 * n,
        "rejected_prediction_tokens": 9 * n,
    }
    assert reply["usage"]["completion_tokens_details"] == details
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await server.chunks(PATH, predicting("a", n=n, stream_options=options))
    assert chunks[-1]["usage"]["completion_tokens_details"] == details
    so_far = [
        chunk["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
        for chunk in chunks
    ]
    assert so_far == sorted(so_far)


async def test_tokens_after_a_stop_string_are_not_accepted(server: Running) -> None:
    _, reply = await server.post(PATH, predicting("a", stop=["e same"]))
    usage = reply["usage"]
    assert usage["completion_tokens"] == len("the same")
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 6
    _, cut = await server.post(PATH, predicting("a", stop=["th"]))
    assert cut["usage"]["completion_tokens"] == 2
    assert cut["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 2
    assert cut["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == 3


@pytest.mark.parametrize("speculates", [False, True])
async def test_other_requests_have_the_counts_if_the_server_speculates(speculates: bool) -> None:
    async with running(FakeEngine(model_info(speculates=speculates), drafting())) as server:
        for path, body in ((PATH, CHAT), ("/v1/completions", {"prompt": "Hi"})):
            _, reply = await server.post(path, body)
            assert ("completion_tokens_details" in reply["usage"]) == speculates


async def test_a_prediction_may_be_as_long_as_the_context() -> None:
    async with running(FakeEngine(model_info(max_context=300), drafting())) as server:
        status, _ = await server.post(PATH, predicting("a" * 300))
        assert status == 200
        assert len(server.engine.submitted[-1].prediction) == 300
        for length in (301, 100_000):
            status, reply = await server.post(PATH, predicting("a" * length))
            assert status == 400
            assert reply["error"]["param"] == "prediction"
            # A client that shortens its conversation would not help itself.
            assert reply["error"]["code"] != "context_length_exceeded"
            assert str(length) in reply["error"]["message"]


async def test_an_empty_prediction_predicts_nothing(server: Running) -> None:
    for content in ("", []):
        status, _ = await server.post(PATH, predicting(content))
        assert status == 200
        assert server.engine.submitted[-1].prediction == []


class Client:
    """The owner of a stream, which keeps no messages."""

    forecast = Forecast()
    last_step = 0.0

    def send(self, message: object) -> None: ...
    def report(self, choices: object) -> None: ...
    def forget(self, request_id: str) -> None: ...


async def test_a_resumed_request_keeps_its_prediction(server: Running) -> None:
    await server.post(PATH, predicting("some text"))
    request: Submit = server.engine.submitted[-1]
    client = Client()
    stream = Stream(request, client, client.forecast.add(0, 0.0, 1, 100))
    stream.put(TokenOutput(request.request_id, 0, [1, 2, 3], accepted=2))
    again = stream.submission()
    assert again.resumed[0].output == [1, 2, 3]
    assert again.prediction == ids("some text")


PARTS = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=8)}), max_size=4
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "x"]), inner)
    ),
    max_leaves=6,
)


@given(st.text(max_size=20) | PARTS)
def test_texts_and_text_parts_are_one_text(content: Any) -> None:
    request = ChatRequest.model_validate(predicting(content))
    assert request.prediction is not None
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    assert request.prediction.content == text


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(ANY)
def test_any_other_shape_is_refused(value: Any) -> None:
    def is_prediction(value: Any) -> bool:
        if not (isinstance(value, dict) and value.get("type") == "content"):
            return False
        content = value.get("content")
        parts = content if isinstance(content, list) else []
        return isinstance(content, str) or (
            isinstance(content, list)
            and all(
                isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str)
                for p in parts
            )
        )

    body = {**CHAT, "prediction": value}
    if value is None or is_prediction(value):
        ChatRequest.model_validate(body)
    else:
        with pytest.raises(ValueError, match="prediction"):
            ChatRequest.model_validate(body)
