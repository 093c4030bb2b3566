"""Lines of JSON stay lines for readers that split text as Python does."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from chairlift.api.http.json_lines import one_line
from chairlift.api.http.sse import NDJSON, PLAIN, framed
from chairlift.api.openai.batches.lines import LineResponse, result_line

_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_TEXTS = st.text(st.sampled_from(_ENDS + '\\"aü€\U0001f600') | st.characters(codec="utf-8"))


class Chunk(msgspec.Struct):
    text: str


@given(_TEXTS)
def test_a_value_is_the_same_on_one_line(text: str) -> None:
    line = one_line(msgspec.json.encode([text])).decode()
    assert json.loads(line) == [text]
    assert line.splitlines() == [line]


@given(_TEXTS)
def test_streams_and_files_are_read_line_by_line(text: str) -> None:
    [ndjson], [event] = (framed(framing, [Chunk(text)]) for framing in (NDJSON, PLAIN))
    assert [json.loads(line) for line in ndjson.decode().splitlines()] == [{"text": text}]
    data, blank = event.decode().splitlines()
    assert (json.loads(data.removeprefix("data: ")), blank) == ({"text": text}, "")
    body = msgspec.Raw(msgspec.json.encode({"text": text}))
    [line] = result_line("one", LineResponse(200, "id", body)).decode().splitlines()
    assert json.loads(line)["response"]["body"] == {"text": text}
