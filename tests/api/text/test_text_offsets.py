"""A token's text offset is that of the character with its first byte, however bytes are split."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.api.api_server import ids, running
from support.api.fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info

from chairlift.api.text.stops import StopMatcher, Stops
from chairlift.api.text.stream import TextStream
from chairlift.engine.model.text.detokenizer import ByteDetokenizer, ContextDetokenizer

_BYTES = byte_tokenizer()
END = _BYTES.eos_token_id


def stream_of(detokenizer: ByteDetokenizer | ContextDetokenizer) -> TextStream:
    return TextStream(detokenizer, frozenset(), StopMatcher(Stops([])))


def char_starts(data: bytes) -> list[int]:
    """The offset of the first byte of every character of ``data.decode(errors="replace")``."""
    starts: list[int] = []
    position = 0
    while position < len(data):
        try:
            good, bad = data[position:].decode(), 0
        except UnicodeDecodeError as error:
            good, bad = data[position : position + error.start].decode(), error.end - error.start
        for char in good:
            starts.append(position)
            position += len(char.encode())
        if bad:
            starts.append(position)
            position += bad
    return starts


_PIECES = st.lists(
    st.one_of(
        st.text(max_size=3).map(str.encode),
        st.binary(min_size=1, max_size=3),
        st.sampled_from(
            [b"\xf0", b"\x9f", b"\xf0\x9f", b"\x98\x80", b"\xef\xbf", b"\xbd", b"\xe0"]
        ),
    ),
    max_size=12,
)


@given(_PIECES)
@example([b"\xf0\x9f", b"x"])
@example([b"\xf0\x9f", b"\xf0\x9f", b"\x98\x80", b"y"])
@example([b"\xef\xbf", b"\xbdz", b"a"])
@example([b"\xe0", b"\x80", b"a"])
def test_offsets_of_bytes(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    starts = char_starts(data)
    assert len(starts) == len(data.decode(errors="replace"))
    stream = stream_of(ByteDetokenizer(pieces, strip=False))
    first = 0
    for token, piece in enumerate(pieces):
        stream.add(token)
        if piece:
            assert stream.start == sum(start <= first for start in starts) - 1
        first += len(piece)
        assert stream.end == len(data[:first].decode(errors="replace"))
    stream.finish()
    assert stream.read == stream.end == len(starts)


def test_offsets_with_any_other_tokenizer() -> None:
    stream = stream_of(ContextDetokenizer(_BYTES))
    tokens = [*ids("a😀b"), *ids("😀")[:2], *ids("cd"), *ids("😀")[:1]]
    starts = []
    for token in tokens:
        stream.add(token)
        starts.append(stream.start)
    assert starts[:6] == [0, 1, 1, 1, 1, 2]
    *_, c, d, _ = starts
    stream.finish()
    text = _BYTES.decode(tokens)
    assert (text[c], text[d], stream.read) == ("c", "d", len(text))


@pytest.mark.parametrize("echo", [False, True])
async def test_completions_show_where_tokens_are_after_broken_characters(echo: bool) -> None:
    output = [*ids("😀")[:2], *ids("b"), *ids("😀"), *ids("c"), *ids("😀")[:3], END]
    engine = FakeEngine(model_info(), lambda *_: Scripted(output, ended_by_token=True))
    async with running(engine) as server:
        _, reply = await server.post(
            "/v1/completions", {"prompt": "a", "logprobs": 1, "echo": echo, "max_tokens": 20}
        )
    [choice] = reply["choices"]
    assert choice["text"] == "a" * echo + "\ufffdb😀c\ufffd"
    offsets = [0, 0, 1, 2, 2, 2, 2, 3, 4, 4, 4]
    if echo:  # also the prompt's and the end's
        offsets = [0, *(1 + offset for offset in [*offsets, 5])]
    assert choice["logprobs"]["text_offset"] == offsets
