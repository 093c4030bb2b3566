"""gpt-oss's Harmony format: replies, whatever the split of their tokens; prompts; grammars."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.harmony import (
    CALL,
    END,
    EXAMPLES,
    RETURN,
    SPECIAL,
    TOKENIZER,
    UNUSUAL,
    Example,
    body,
    token,
)
from support.api.truncated_replies import PROPERTY, ParsedReply, vocabulary

from chairlift.api.chat.choice import DialogueChoice, ReplySyntax
from chairlift.api.chat.prepare import reply_syntax
from chairlift.api.chat.tool_plan import tool_plan
from chairlift.api.schemas.schemas import ChatRequest
from chairlift.api.text.stops import StopMatcher, Stops
from chairlift.engine.messages import TokenLogprobs, TokenOutput

ALL = {**EXAMPLES, **UNUSUAL}


@cache
def syntax() -> ReplySyntax:
    words = vocabulary(TOKENIZER)
    request = ChatRequest.model_validate(body())
    found = reply_syntax(request, words, tool_plan(request, words.format), thinks=False)
    assert found is not None
    return found


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def read(
    tokens: list[int], splits: list[int], finish: str, ended: bool, logprobs: bool = False
) -> ParsedReply:
    """Reads a reply whose steps end before the positions ``splits``."""
    choice = DialogueChoice(
        0, syntax(), vocabulary(TOKENIZER).detokenizer, StopMatcher(Stops([])), logprobs
    )
    reply = ParsedReply()
    ends = [*splits, len(tokens)]
    for start, end in zip([0, *splits], ends, strict=True):
        part = tokens[start:end]
        scores = [TokenLogprobs(-1.0, [])] * len(part) if logprobs else None
        last = end == len(tokens)
        output = TokenOutput("r", 0, part, scores, finish if last else None, last and ended)  # type: ignore[arg-type]
        for delta in choice.take(output):
            reply.finish = delta.finish
            reply.scored += len(delta.scored or ())
            if delta.thought:
                reply.reasoning += delta.text
            else:
                reply.content += delta.text
            if delta.call is not None and delta.call.opening is not None:
                reply.calls.append([delta.call.opening.name, ""])
            if delta.call is not None:
                reply.calls[delta.call.number][1] += delta.call.arguments
    return reply


def check(reply: ParsedReply, example: Example) -> None:
    assert (reply.reasoning, reply.content) == (example.reasoning, example.content)
    assert reply.calls == example.calls
    assert reply.finish == ("tool_calls" if example.calls else "stop")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_an_example_at_every_split_of_its_tokens(name: str) -> None:
    example = ALL[name]
    tokens = [*tokens_of(example.text), token(example.ended_by)]
    check(read(tokens, [], "stop", ended=True), example)
    check(read(tokens, list(range(1, len(tokens))), "stop", ended=True), example)
    for split in range(1, len(tokens)):
        check(read(tokens, [split], "stop", ended=True), example)


# Neither blank lines at the ends nor white space before a call are part of a piece.
contents = st.lists(
    st.sampled_from(["a b", "é🎿", '{"x": 1}', "<think>", "\n-", "to=me"]), max_size=3
)
messages = st.lists(
    st.tuples(
        st.sampled_from(["analysis", "commentary", "final", "call", "call in the role"]),
        contents.map(lambda parts: "t" + "t".join(parts) + "t"),
        st.sampled_from([" <|constrain|>json", " json", "<|constrain|>json", ""]),
    ),
    max_size=5,
)


@PROPERTY
@given(messages, st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_random_messages_in_random_chunks(
    made: list[tuple[str, str, str]], sizes: list[int]
) -> None:
    written, thoughts, texts = [], "", ""
    calls = []
    last = None
    for number, (kind, content, constrain) in enumerate(made):
        header = f"<|channel|>{kind}"
        arguments = f'{{"n": "{number} {len(content)}"}}'
        if kind == "call":
            header = f"<|channel|>commentary to=functions.get_weather{constrain}"
        if kind == "call in the role":
            header = f" to=functions.generate_file<|channel|>commentary{constrain}"
        if kind.startswith("call"):
            content = arguments
            calls.append(["get_weather" if kind == "call" else "generate_file", arguments])
        elif kind == "analysis":
            thoughts += ("\n\n" if last == kind else "") + content
        else:
            texts += ("\n\n" if last == "text" else "") + content
        last = "call" if kind.startswith("call") else kind if kind == "analysis" else "text"
        written.append(f"{header}<|message|>{content}")
    text = "<|end|><|start|>assistant".join(written)
    tokens = [*tokens_of(text), token(RETURN)]
    splits, end = [], 0
    while (end := end + sizes[len(splits) % len(sizes)]) < len(tokens):
        splits.append(end)
    reply = read(tokens, splits, "stop", ended=True)
    assert reply.calls == calls
    assert (reply.reasoning, reply.content) == (thoughts, texts)


@pytest.mark.parametrize("name", ALL)
def test_a_truncated_example_is_a_beginning(name: str) -> None:
    example = ALL[name]
    tokens = tokens_of(example.text)
    for end in range(1, len(tokens)):
        cut = read(tokens[:end], [], "length", ended=False)
        assert example.reasoning.startswith(cut.reasoning)
        assert example.content.startswith(cut.content.rstrip("\ufffd")), (cut, end)
        assert cut.finish == "length"
        for (name_, arguments), (whole_name, whole) in zip(cut.calls, example.calls, strict=False):
            assert name_ == whole_name
            assert arguments
            assert whole.startswith(arguments)


def test_the_stop_tokens_end_a_reply() -> None:
    assert {token(RETURN), token(CALL)} <= set(vocabulary(TOKENIZER).end_ids)
    assert token(END) not in vocabulary(TOKENIZER).end_ids


def test_only_the_text_has_log_probabilities() -> None:
    for example in EXAMPLES.values():
        tokens = [*tokens_of(example.text), token(example.ended_by)]
        for splits in ([], list(range(1, len(tokens)))):
            reply = read(tokens, splits, "stop", ended=True, logprobs=True)
            assert reply.scored == len(tokens_of(example.content))


def test_arguments_arrive_before_the_call_is_complete() -> None:
    example = EXAMPLES["call"]
    tokens = tokens_of(example.text)
    cut = read(tokens[:-10], [], "length", ended=False)
    assert cut.calls == [["get_weather", '{"location":"San Francisco"}'[:-10]]]


@pytest.mark.parametrize("missing", SPECIAL)
def test_the_format_is_recognized_by_its_tokens(missing: str) -> None:
    from support.api.fake_engine import byte_tokenizer

    from chairlift.api.text.harmony import harmony_tokens

    tokenizer = byte_tokenizer(special=[text for text in SPECIAL if text != missing])
    optional = missing in ("<|constrain|>", "<|return|>")
    assert (harmony_tokens(tokenizer) is not None) == optional
