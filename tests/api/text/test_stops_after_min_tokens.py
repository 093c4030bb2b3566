"""Stop strings that end within the first min_tokens tokens are ignored, as in vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.api_server import CHAT, END, MESSAGES, ids, running
from support.api.fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info
from support.api.tool_calls import PATH, engine_writing, reply_both_ways

from chairlift.api.text.stops import StopMatcher, Stops
from chairlift.api.text.stream import TextStream

TOKENIZER = byte_tokenizer()
TEXT = "abcabcabc"
# Two letters, so that stop strings are frequent.
tokens = st.lists(st.text("ab", max_size=4), max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def truncated(
    tokens: list[str], stops: list[str], min_tokens: int, include: bool
) -> tuple[str, bool]:
    """The text up to the first stop string that counts, and whether there is one."""
    text, early = "".join(tokens), len("".join(tokens[:min_tokens]))
    found = [
        (start, len(stop))
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > early
    ]
    if not found:
        return text, False
    start, length = min(found)
    return text[: start + length if include else start], True


@given(tokens, stops, st.integers(0, 14), st.booleans(), st.booleans())
def test_a_text_ends_at_the_first_stop_string_after_min_tokens(
    tokens: list[str], stops: list[str], min_tokens: int, include: bool, late: bool
) -> None:
    """With ``late``, the last character of each token arrives after the next token has begun."""
    matcher = StopMatcher(Stops(stops), include, min_tokens)
    expected_text, found = truncated(tokens, stops, min_tokens, include)
    sent = waiting = ""
    for token in tokens:
        matcher.begin_token(len(waiting))
        text = waiting + token
        waiting = text[-1:] if late else ""
        sent += matcher.feed(text[: len(text) - len(waiting)])
        assert expected_text.startswith(sent)
        if matcher.stopped:
            break
    if not matcher.stopped and waiting:
        sent += matcher.feed(waiting)
    if not matcher.stopped:
        sent += matcher.finish()
    assert sent == expected_text
    assert matcher.stopped == found


@given(st.text("aé🙂", max_size=8), st.sampled_from(["🙂", "é", "aa"]), st.integers(0, 30))
def test_a_character_counts_for_the_token_that_completes_it(
    text: str, stop: str, min_tokens: int
) -> None:
    detokenizer = TOKENIZER.detokenizer
    detokenizer.reset()
    choice = TextStream(detokenizer, frozenset(), StopMatcher(Stops([stop]), False, min_tokens))
    sent = ""
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        sent += choice.add(token)
        if choice.stopped:
            break
    sent += choice.finish()
    # One token for each byte; the last completes its character.
    characters = [part for letter in text for part in [""] * (len(letter.encode()) - 1) + [letter]]
    assert (sent, choice.stopped) == truncated(characters, [stop], min_tokens, False)


def engine_drafting(chunk: int) -> FakeEngine:
    """An engine that writes TEXT, ``chunk`` tokens a step; all but one of them were proposed."""
    script = Scripted([*ids(TEXT), END], ended_by_token=True, chunk=chunk, accepted=chunk - 1)
    return FakeEngine(model_info(), lambda *_: script)


@pytest.mark.parametrize("chunk", [1, 2, 4, 20])
@pytest.mark.parametrize(
    ("min_tokens", "stop", "text", "used"),
    [
        (0, ["bc"], "a", 3),
        (2, ["bc"], "a", 3),
        (3, ["bc"], "abca", 6),
        (5, ["bc"], "abca", 6),
        (6, ["bc"], "abcabca", 9),
        (9, ["bc"], TEXT, 10),
        (3, ["c", "bca"], "a", 4),
        (4, ["a", "cab"], "ab", 5),
        (9, ["c", "abcabcabc"], TEXT, 10),
    ],
)
async def test_replies_of_every_step_size(
    chunk: int, min_tokens: int, stop: list[str], text: str, used: int
) -> None:
    fields: dict[str, Any] = {"min_tokens": min_tokens, "stop": stop, "max_tokens": 50, "n": 2}
    async with running(engine_drafting(chunk)) as server:
        for path, body in ((PATH, CHAT), ("/v1/completions", {"prompt": "Hi"})):
            body = {**body, **fields, "logprobs": path == PATH or 1}
            _, reply = await server.post(path, body)
            assert reply["usage"]["completion_tokens"] == 2 * used
            streamed = ["", ""]
            for chunk_ in await server.chunks(path, body):
                for choice in chunk_["choices"]:
                    part = choice["delta"].get("content") if path == PATH else choice["text"]
                    streamed[choice["index"]] += part or ""
            texts = [
                choice["message"]["content"] if path == PATH else choice["text"]
                for choice in reply["choices"]
            ]
            assert texts == streamed == [text, text]
            assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop"}


@pytest.mark.parametrize("chunk", [1, 3, 50])
async def test_tokens_of_thoughts_and_text_that_may_begin_a_tag_count(chunk: int) -> None:
    """The token ``<|channel>`` is text, but is kept back, because ``thought`` may follow it."""
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    tokenizer = byte_tokenizer(template, special=["<|channel>", "<channel|>"])
    thought, text = "<|channel>thought\nHm<channel|>", "a<|channel>b<|channel>c"
    used = len(tokenizer.encode(thought, add_special_tokens=False))
    cut, uncut = "a<|channel>b", text
    async with running(engine_writing(tokenizer, thought + text, chunk), tokenizer) as server:
        for min_tokens, content in (
            *((0, "a"), (used + 1, "a"), (used + 2, cut), (used + 3, cut)),
            *((used + 4, uncut), (used + 5, uncut), (used + 6, uncut)),
        ):
            body = {"messages": MESSAGES, "stop": ["<|"], "min_tokens": min_tokens}
            reply = await reply_both_ways(server, body)
            assert (reply.reasoning, reply.content) == ("Hm", content), min_tokens
