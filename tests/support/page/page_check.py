"""Checks of an HTML report of the load test."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

_VOID = {"meta"}
_ADDRESSES = {"src", "href", "srcset", "data", "action", "poster", "xlink:href"}


class PageCheck(HTMLParser):
    """Parses a report, and asserts that it is self-contained and accessible.

    Attributes:
        open: the tags that are open.
        tags: how often each tag occurs.
        charts: the titles of the charts, in order.
        text: the visible text.
        style: the style sheet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.charts: list[str] = []
        self.text = ""
        self.style = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert len(given) == len(attrs), f"<{tag}> has an attribute twice"
        assert not _ADDRESSES & given.keys(), f"<{tag}> refers to something: {attrs}"
        assert not any(name.startswith("on") for name in given), f"<{tag}> runs a script"
        assert "nan" not in " ".join(filter(None, given.values())).lower()
        self.tags[tag] += 1
        if tag == "svg":
            assert given["role"] == "img"
            assert len(str(given["aria-label"])) > 40
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["style"]:
            self.style += data
        else:
            self.text += data
        if self.open[-2:] == ["svg", "title"]:
            self.charts.append(data)


def check_page(html: str) -> PageCheck:
    """Asserts that a report is well formed, accessible and self-contained."""
    page = PageCheck()
    page.feed(html)
    page.close()
    assert not page.open
    assert html.startswith("<!DOCTYPE html>")
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == page.tags["iframe"] == 0
    assert page.tags["svg"] == page.tags["desc"] == page.tags["figure"] == len(page.charts)
    assert not re.search(r"url\(|@import|https?:", page.style)
    assert "prefers-color-scheme: dark" in page.style
    return page
