"""The parser of server-sent events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.api.http.event_parser import SSEParser


@settings(deadline=None)
@given(
    events=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1), max_size=6
    ),
    newline=st.sampled_from(["\n", "\r\n"]),
    data=st.data(),
)
def test_events_are_the_same_for_any_cuts_of_the_stream(
    events: list[str], newline: str, data: st.DataObject
) -> None:
    stream = "".join(
        f": keep-alive{newline}{newline}event: chunk{newline}data: {event}{newline}{newline}"
        for event in events
    ).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parser = SSEParser()
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    parsed = [event for part in parts for event in parser.feed(part)]
    assert parsed == [event.encode() for event in events]


def test_data_lines_are_joined_and_incomplete_events_kept() -> None:
    parser = SSEParser()
    assert parser.feed(b"data: one\ndata:two\n") == []
    assert parser.feed(b"\ndata: thr") == [b"one\ntwo"]
    assert parser.feed(b"ee\n\n") == [b"three"]
