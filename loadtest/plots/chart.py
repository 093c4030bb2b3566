"""A chart as SVG: two axes, a grid and marks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from chairlift.loadtest.plots.axis import Axis, shown
from chairlift.loadtest.plots.markup import Element, element, path

# In SVG units. Small, so that the text stays legible when a phone scales the chart down.
WIDTH, HEIGHT = 420.0, 262.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 404.0, 28.0, 220.0

# The style sheet defines colours and dashes. Kinds differ in both, or in shape.
Ink = Literal["one", "two", "quiet", "bad"]

Shape = Literal["line", "stroke"]


class Key(NamedTuple):
    """An entry of the legend, which is HTML outside of the SVG, so that it can wrap."""

    ink: Ink
    text: str
    shape: Shape


class Stroke(NamedTuple):
    """A horizontal line from ``start`` to ``end`` on the x axis, at height ``y``."""

    start: float
    end: float
    y: float


class Chart:
    """A chart. Marks are added in the units of the axes.

    Screen readers read ``title`` and ``description``.
    """

    def __init__(self, title: str, description: str, x: Axis, y: Axis) -> None:
        self.title = title
        self.description = description
        self.x = x
        self.y = y
        self._marks: list[Element] = []
        self.keys: list[Key] = []

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The SVG coordinates of a point."""
        return (
            LEFT + (RIGHT - LEFT) * self.x.position(x),
            BOTTOM - (BOTTOM - TOP) * self.y.position(y),
        )

    def add_key(self, ink: Ink, text: str, shape: Shape = "line") -> None:
        """Adds an entry to the legend."""
        self.keys.append(Key(ink, text, shape))

    def add_line(self, points: Sequence[tuple[float, float]], ink: Ink) -> None:
        """Adds a line through the points, if there are at least two."""
        if len(points) > 1:
            d = path(self.at(x, y) for x, y in points)
            self._marks.append(element("path", d=d, class_=f"line {ink}"))

    def add_steps(self, points: Sequence[tuple[float, float]], ink: Ink) -> None:
        """Adds a step line, which keeps each value until the next point."""
        corners = [
            *points[:1],
            *(
                corner
                for (_, before), (x, after) in itertools.pairwise(points)
                for corner in ((x, before), (x, after))
            ),
        ]
        self.add_line(corners, ink)

    def add_point(self, x: float, y: float, ink: Ink, tip: str, label: str = "") -> None:
        """Adds a point with a tooltip and, above it, a label."""
        px, py = self.at(x, y)
        tip_element = element("title", tip)
        self._marks.append(element("circle", tip_element, cx=px, cy=py, r=3.5, class_=f"dot {ink}"))
        if label:
            anchor = "end" if px > RIGHT - 30 else "middle"
            self._marks.append(
                element("text", label, x=px, y=py - 8, class_="label", text_anchor=anchor)
            )

    def add_bar(self, start: float, end: float, height: float, ink: Ink, tip: str) -> None:
        """Adds a bar between two values of the x axis."""
        left, top = self.at(start, height)
        right, bottom = self.at(end, self.y.low)
        # Leave a thin gap between two bars.
        box = {"x": left + 0.4, "y": top, "width": max(0.6, right - left - 0.8)}
        tip_element = element("title", tip)
        self._marks.append(
            element("rect", tip_element, height=bottom - top, class_=f"bar {ink}", **box)
        )

    def add_level(self, x: float, ink: Ink, label: str, row: int) -> None:
        """Adds a vertical line at a value of the x axis, with its label in row ``row``."""
        px, bottom = self.at(x, self.y.low)
        far = px > (LEFT + RIGHT) / 2
        y = TOP + 10 + 14 * row
        self._marks += [
            element("path", d=path([(px, TOP), (px, bottom)]), class_=f"line {ink}"),
            element(
                "text",
                label,
                x=px - 5 if far else px + 5,
                y=y,
                class_="label",
                text_anchor="end" if far else "start",
            ),
        ]

    def add_strokes(self, strokes: Sequence[Stroke], ink: Ink, thickness: float) -> None:
        """Adds horizontal lines; ``thickness`` is in SVG units."""
        d = "".join(path([self.at(start, y), self.at(end, y)]) for start, end, y in strokes)
        if d:
            self._marks.append(element("path", d=d, class_=f"stroke {ink}", stroke_width=thickness))

    def svg(self) -> Element:
        """The chart as an SVG element."""
        return element(
            "svg",
            element("title", self.title),
            element("desc", self.description),
            *self._frame(),
            *self._marks,
            viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
            role="img",
            aria_label=f"{self.title}. {self.description}",
        )

    def _frame(self) -> list[Element]:
        made = []
        for tick in self.x.ticks:
            px, _ = self.at(tick, self.y.low)
            made.append(element("path", d=path([(px, BOTTOM), (px, BOTTOM + 4)]), class_="axis"))
            made.append(
                element(
                    "text", shown(tick), x=px, y=BOTTOM + 17, class_="tick", text_anchor="middle"
                )
            )
        for tick in self.y.ticks:
            _, py = self.at(self.x.low, tick)
            made.append(element("path", d=path([(LEFT, py), (RIGHT, py)]), class_="rule"))
            made.append(
                element("text", shown(tick), x=LEFT - 6, y=py + 4, class_="tick", text_anchor="end")
            )
        middle = (LEFT + RIGHT) / 2
        return [
            *made,
            element("path", d=path([(LEFT, BOTTOM), (RIGHT, BOTTOM)]), class_="axis"),
            element(
                "text", self.x.unit, x=middle, y=BOTTOM + 36, class_="unit", text_anchor="middle"
            ),
            element("text", self.y.unit, x=4, y=14, class_="unit"),
        ]
