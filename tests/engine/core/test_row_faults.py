"""A failure in one row's work ends that row; other rows keep their tokens."""

from __future__ import annotations

import itertools
import json
import math
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.api.api_server import Running, ids, running
from support.api.fake_engine import FakeEngine, Scripted, model_info
from support.engine.bench import Bench
from support.engine.client.streams import Scripted as ScriptedClient
from support.engine.client.streams import submitted, tokens
from support.engine.reference import solo_tokens
from support.tiny import VOCAB_SIZE, tiny_model

from chairlift.api.text.stops import StopMatcher
from chairlift.api.text.stream import TextStream
from chairlift.engine.config import EngineConfig
from chairlift.engine.core import loop
from chairlift.engine.core.requests import ActiveRequest
from chairlift.engine.errors import EngineDead, GrammarError
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import SamplingParams, Submit, Thinking, ToEngine, TokenOutput
from chairlift.engine.model.text.detokenizer import ByteDetokenizer
from chairlift.metrics.recorder import Recorder

PROMPT = [7, 8, 9]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "logit_bias": {9: 1.0}}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture
def bench(model: Any) -> Bench:
    return Bench(model)


def sampled_alone(model: Any) -> list[int]:
    bench = Bench(model)
    bench.submit("alone", PROMPT, **SAMPLED)
    bench.drain()
    return bench.tokens("alone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "params", "why"),
    [
        (PROMPT, {"logit_bias": {5: 10**400}}, "logit_bias"),
        (PROMPT, {"logit_bias": {5: "much"}}, "logit_bias"),
        (PROMPT, {"logit_bias": {5: math.nan}}, "logit_bias"),
        (PROMPT, {"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        (PROMPT, {"logit_bias": {-1: 1.0}}, "logit_bias"),
        (PROMPT, {"temperature": "hot"}, "temperature"),
        (PROMPT, {"temperature": -1e-9}, "temperature"),
        (PROMPT, {"temperature": math.inf}, "temperature"),
        (PROMPT, {"temperature": 1.0, "top_k": 10**400}, "top_k"),
        (PROMPT, {"temperature": 1.0, "top_k": -1}, "top_k"),
        (PROMPT, {"temperature": 1.0, "top_p": math.nan}, "top_p"),
        (PROMPT, {"temperature": 1.0, "min_p": 1.5}, "min_p"),
        (PROMPT, {"temperature": 1.0, "seed": None}, "seed"),
        (PROMPT, {"temperature": 1.0, "seed": 2**64}, "seed"),
        (PROMPT, {"repetition_penalty": 0.0}, "repetition_penalty"),
        (PROMPT, {"presence_penalty": math.inf}, "presence_penalty"),
        (PROMPT, {"frequency_penalty": -math.inf}, "frequency_penalty"),
        (PROMPT, {"stop_token_ids": (5, [])}, "stop_token_ids"),
        (PROMPT, {"stop_token_ids": (-5,), "min_tokens": 4}, "stop_token_ids"),
        (PROMPT, {"logprobs": "many"}, "logprobs"),
        (PROMPT, {"logprobs": -1}, "logprobs"),
        (PROMPT, {"min_tokens": -1}, "min_tokens"),
        (PROMPT, {"thinking": Thinking((VOCAB_SIZE,))}, "thinking"),
        (PROMPT, {"thinking": Thinking((5,), start=-1)}, "thinking"),
        ([5, VOCAB_SIZE], {"presence_penalty": 1.0}, "a token outside of 0 to"),
        ([5, -1], {}, "a token outside of 0 to"),
        ([], {}, "the prompt is empty"),
    ],
    ids=itertools.count(),
)
def test_bad_parameters_fail_their_request_alone(
    bench: Bench, model: Any, prompt: list[int], params: dict[str, Any], why: str
) -> None:
    bench.submit("greedy", PROMPT)
    bench.step()
    bench.submit("bad", prompt, n=2, **params)
    bench.submit("sampled", PROMPT, **SAMPLED)
    bench.drain()
    for index in (0, 1):
        (output,) = bench.outputs["bad", index]
        assert (output.token_ids, output.finish) == ([], "error")
        assert why in str(output.error)
    assert bench.tokens("greedy") == solo_tokens(model, PROMPT, 8)
    assert bench.tokens("sampled") == sampled_alone(model)
    assert sorted(choice.reason for choice in bench.finished) == ["error"] * 2 + ["length"] * 2
    assert bench.core.idle


@pytest.mark.parametrize("prediction", [[5, VOCAB_SIZE], [-1], [None]])
def test_a_prediction_of_impossible_tokens_fails_its_request_alone(
    bench: Bench, model: Any, prediction: list[Any]
) -> None:
    bench.submit("bad", PROMPT, reading={"prediction": prediction})
    bench.submit("good", PROMPT, reading={"prediction": [5, VOCAB_SIZE - 1]})
    bench.drain()
    [output] = bench.outputs["bad", 0]
    assert (output.token_ids, output.finish) == ([], "error")
    assert "the prediction has a token outside of 0 to" in str(output.error)
    assert bench.tokens("good") == solo_tokens(model, PROMPT, 8)


def test_more_log_probabilities_than_tokens_give_all_tokens() -> None:
    bench = Bench(tiny_model("llama", vocab_size=12))
    bench.submit("all", [7, 8], logprobs=20)
    bench.submit("one", [7, 8], logprobs=1)
    bench.drain()
    for output in bench.outputs["all", 0]:
        assert output.logprobs is not None
        assert sorted(token for token, _ in output.logprobs[0].top) == list(range(12))
    assert [len(output.logprobs[0].top) for output in bench.outputs["one", 0]] == [1] * 8


@pytest.mark.parametrize(
    ("error", "text", "by_client"),
    [
        (RuntimeError("no reason"), "RuntimeError: no reason", False),
        (GrammarError("too expensive"), "cannot follow this request's grammar: too exp", True),
    ],
)
def test_a_row_whose_token_cannot_be_processed_fails_alone(
    bench: Bench,
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    text: str,
    by_client: bool,
) -> None:
    original = ActiveRequest.cut_at_end

    def failing(request: ActiveRequest, sequence: Any, tokens: list[int]) -> Any:
        if sequence.request_id == "bad" and sequence.index == 1 and sequence.generated > 3:
            raise error
        return original(request, sequence, tokens)

    monkeypatch.setattr(ActiveRequest, "cut_at_end", failing)
    bench.submit("bad", PROMPT, n=2)
    bench.submit("good", PROMPT)
    bench.drain()
    expected = solo_tokens(model, PROMPT, 8)
    assert bench.tokens("good") == bench.tokens("bad", 0) == expected
    last = bench.outputs["bad", 1][-1]
    assert (last.finish, bench.tokens("bad", 1)) == ("error", expected[:2])
    assert text in str(last.error)
    assert last.client_error == by_client


class Inbox:
    """An inbox that contains one message."""

    def __init__(self, message: ToEngine) -> None:
        self._messages = [message]

    def receive(self, block: bool) -> list[ToEngine]:
        messages, self._messages = self._messages, []
        return messages

    def wake(self) -> None:
        pass


def test_a_failing_step_ends_the_engine_and_its_message_is_not_logged(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*arguments: Any) -> Any:
        raise RuntimeError(f"cannot compute {PROMPT}")

    monkeypatch.setattr(bench.core.pipeline, "forward", failing)
    monkeypatch.setattr(loop, "start_core", lambda *arguments: (bench.core, model_info()))
    inbox = Inbox(Submit("bad", PROMPT, SamplingParams(max_tokens=4, seed=1)))
    source = ModelSource("tiny", "directory", Path("nowhere"))
    with pytest.raises(EngineDead, match="a step has failed: RuntimeError") as raised:
        loop.run(EngineConfig(), source, inbox, lambda message: None)
    assert "RuntimeError" in caplog.text
    assert "_build" in caplog.text
    reported = caplog.text + "".join(traceback.format_exception(raised.value))
    assert str(PROMPT) not in reported


# In the API process


async def test_a_stream_that_cannot_process_its_output_fails_alone() -> None:
    client = ScriptedClient()
    recorder = Recorder("1.2")
    recorder.model_loaded("m", model_info())
    client.on_step = recorder.record_step
    bad, good = submitted(client, "bad"), submitted(client, "good")
    broken: Any = None
    client.step(TokenOutput("bad", 0, broken), TokenOutput("good", 0, [5]))
    client.step(TokenOutput("bad", 0, [7]), TokenOutput("good", 0, [6], finish="length"))
    assert await tokens(aiter(good)) == [[5, 6]]
    with pytest.raises(TypeError):
        await tokens(aiter(bad))
    assert client.unfinished == 0
    bad.close()
    assert client.unfinished == 0


async def test_failing_statistics_end_no_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = ScriptedClient()
    client.on_step = Recorder("1.2").record_step  # it fails: no model is loaded
    stream = submitted(client, "good")
    client.step(TokenOutput("good", 0, [5]))
    client.step(TokenOutput("good", 0, [6], finish="length"))
    assert await tokens(aiter(stream)) == [[5, 6]]
    assert "statistics" in caplog.text


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    def script(request: Submit, index: int) -> Scripted:
        text = "abQdefgh" if request.prompt == ids("x") else "abcdefgh"
        return Scripted(ids(text), finish="length")

    async with running(FakeEngine(model_info(), script, step_seconds=0.01)) as server:
        yield server


@pytest.mark.parametrize(
    ("part", "method"), [(StopMatcher, "feed"), (ByteDetokenizer, "add_token"), (TextStream, "add")]
)
@pytest.mark.parametrize("n", [1, 2])
async def test_a_failing_part_of_a_reply_ends_that_reply(
    server: Running, monkeypatch: pytest.MonkeyPatch, part: type, method: str, n: int
) -> None:
    original = getattr(part, method)

    def broken(self: Any, piece: Any) -> Any:
        if piece in ("Q", *ids("Q")):
            raise RuntimeError("it is broken")
        return original(self, piece)

    monkeypatch.setattr(part, method, broken)
    bad = server.http.post(
        f"{server.url}/v1/completions", json={"prompt": "x", "n": n, "stream": True}
    )
    async with bad as response:
        good = await server.post("/v1/completions", {"prompt": "y", "stop": "zz"})
        events = (await response.text()).split("\n\n")
    assert good[0] == 200
    assert good[1]["choices"][0]["text"] == "abcdefgh"
    assert json.loads(events[-3].removeprefix("data: "))["error"]["type"] == "server_error"
    assert events[-2] == "data: [DONE]"
    assert server.engine.closed == [server.engine.submitted[0].request_id]
