"""Texts in a chart: their sizes, and places where no two of them overlap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from chairlift.loadtest.plots.markup import Element, element

Anchor = Literal["start", "middle", "end"]

FONT_SIZE = 12.0
# Parts of the font size. Generous, because each reader's system has a font of its own.
_ASCENT, _DESCENT = 0.8, 0.25
_NARROW, _USUAL, _WIDE = 0.4, 0.68, 1.05
_NARROW_LETTERS = frozenset(" .,:;'|!()[]ijlt")
_WIDE_LETTERS = frozenset("mwMWQGO@%—…")


class Box(NamedTuple):
    """A rectangle in SVG units; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        """Whether the two have a common area."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def distance(self, x: float, y: float) -> float:
        """The distance of a point from the rectangle; 0 inside of it."""
        return math.hypot(
            max(self.left - x, 0.0, x - self.right), max(self.top - y, 0.0, y - self.bottom)
        )

    def contains(self, other: Box) -> bool:
        """Whether the other box is inside this one."""
        return (
            self.left <= other.left
            and self.top <= other.top
            and other.right <= self.right
            and other.bottom <= self.bottom
        )


class Label(NamedTuple):
    """A text. ``x`` is the position of its anchor and ``y`` that of its base line."""

    text: str
    x: float
    y: float
    anchor: Anchor = "start"
    class_: str = "label"

    @property
    def box(self) -> Box:
        """The rectangle that the text takes up at most."""
        width = text_width(self.text)
        left = self.x - {"start": 0.0, "middle": width / 2, "end": width}[self.anchor]
        return Box(left, self.y - _ASCENT * FONT_SIZE, left + width, self.y + _DESCENT * FONT_SIZE)

    def element(self) -> Element:
        """The label as an SVG element."""
        return element(
            "text", self.text, x=self.x, y=self.y, class_=self.class_, text_anchor=self.anchor
        )


def text_width(text: str) -> float:
    """The width in SVG units that a text has at most in a usual font without serifs."""
    return FONT_SIZE * sum(
        _NARROW
        if c in _NARROW_LETTERS
        else _WIDE
        if c in _WIDE_LETTERS or ord(c) > 0x2FF
        else _USUAL
        for c in text
    )


def first_free(candidates: Iterable[Label], taken: Sequence[Box], inside: Box) -> Label | None:
    """The first label that is inside the box and overlaps nothing, if there is one."""
    for label in candidates:
        box = label.box
        if inside.contains(box) and not any(box.overlaps(other) for other in taken):
            return label
    return None


def around(text: str, x: float, y: float) -> Iterable[Label]:
    """Places for the label of a point, the best one first: above, beside, below, further away."""
    for distance in (8.0, 22.0):
        yield Label(text, x, y - distance, "middle")
        yield Label(text, x - 4, y - distance, "end")
        yield Label(text, x + 4, y - distance, "start")
        below = y + distance + _ASCENT * FONT_SIZE
        yield Label(text, x, below, "middle")
        yield Label(text, x + 4, below, "start")
        yield Label(text, x - 4, below, "end")
    middle = y + FONT_SIZE / 3
    yield Label(text, x + 9, middle, "start")
    yield Label(text, x - 9, middle, "end")
