"""A chart as SVG: two axes, a grid and marks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from chairlift.loadtest.plots.axis import Axis, shown
from chairlift.loadtest.plots.labels import Box, Label, around, first_free
from chairlift.loadtest.plots.markup import Element, element, path

# In SVG units. Small, so that the text stays legible when a phone scales the chart down.
WIDTH, HEIGHT = 420.0, 262.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 404.0, 28.0, 220.0
_DOT_RADIUS = 3.5
# The area in which labels of marks may stand: not on the axes.
_PLOT = Box(LEFT, 0.0, WIDTH, BOTTOM)

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


class _Pending(NamedTuple):
    """A label's possible places, the best one first, and the point that it belongs to, if any."""

    places: list[Label]
    dot: tuple[float, float] | None = None


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
        self._dots: list[tuple[float, float]] = []
        self._labels: list[_Pending] = []
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
        """Adds a point with a tooltip and, close to it if there is a free place, a label."""
        px, py = self.at(x, y)
        tip_element = element("title", tip)
        self._marks.append(
            element("circle", tip_element, cx=px, cy=py, r=_DOT_RADIUS, class_=f"dot {ink}")
        )
        self._dots.append((px, py))
        if label:
            self._labels.append(_Pending(list(around(label, px, py)), (px, py)))

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

    def add_level(self, x: float, ink: Ink, label: str) -> None:
        """Adds a vertical line at a value of the x axis, with its label at the top."""
        px, bottom = self.at(x, self.y.low)
        self._marks.append(element("path", d=path([(px, TOP), (px, bottom)]), class_=f"line {ink}"))
        rows = [TOP + 10 + 14 * row for row in range(4)]
        right = [Label(label, px + 5, y) for y in rows]
        left = [Label(label, px - 5, y, "end") for y in rows]
        places = [*left, *right] if px > (LEFT + RIGHT) / 2 else [*right, *left]
        self._labels.append(_Pending(places))

    def add_strokes(self, strokes: Sequence[Stroke], ink: Ink, thickness: float) -> None:
        """Adds horizontal lines; ``thickness`` is in SVG units."""
        d = "".join(path([self.at(start, y), self.at(end, y)]) for start, end, y in strokes)
        if d:
            self._marks.append(element("path", d=d, class_=f"stroke {ink}", stroke_width=thickness))

    def svg(self) -> Element:
        """The chart as an SVG element."""
        texts = [*self._axis_labels(), *self._placed(self._titles())]
        return element(
            "svg",
            element("title", self.title),
            element("desc", self.description),
            *self._rules(),
            *self._marks,
            *(label.element() for label in texts),
            viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
            role="img",
            aria_label=f"{self.title}. {self.description}",
        )

    def _titles(self) -> list[Label]:
        middle = (LEFT + RIGHT) / 2
        return [
            Label(self.y.title, 4.0, 14.0, class_="unit"),
            Label(self.x.title, middle, BOTTOM + 36, "middle", "unit"),
        ]

    def _placed(self, titles: list[Label]) -> list[Label]:
        """The titles, and each label of a mark for which there is a free place.

        The first and the last label are placed first, because they name the ends of a line.
        """
        placed = list(titles)
        taken = [label.box for label in titles]
        taken += [
            Box(x - _DOT_RADIUS, y - _DOT_RADIUS, x + _DOT_RADIUS, y + _DOT_RADIUS)
            for x, y in self._dots
        ]
        for pending in [*self._labels[:1], *self._labels[:0:-1]]:
            places = (label for label in pending.places if self._names(label, pending.dot))
            if (label := first_free(places, taken, _PLOT)) is not None:
                placed.append(label)
                taken.append(label.box)
        return placed

    def _names(self, label: Label, dot: tuple[float, float] | None) -> bool:
        """Whether no other point is closer to the label, so that readers take it for this one's."""
        own = 0.0 if dot is None else label.box.distance(*dot)
        return all(label.box.distance(*other) >= own for other in self._dots)

    def _axis_labels(self) -> list[Label]:
        """The labels of the ticks, without those that would overlap another one."""
        labels: list[Label] = []
        whole = Box(0.0, 0.0, WIDTH, HEIGHT)
        for tick in self.x.ticks:
            px, _ = self.at(tick, self.y.low)
            labels.append(Label(shown(tick), px, BOTTOM + 17, "middle", "tick"))
        for tick in self.y.ticks:
            _, py = self.at(self.x.low, tick)
            labels.append(Label(shown(tick), LEFT - 6, py + 4, "end", "tick"))
        free: list[Label] = []
        for label in labels:
            if first_free([label], [other.box for other in free], whole) is not None:
                free.append(label)
        return free

    def _rules(self) -> list[Element]:
        """The axes, their ticks and the grid."""
        x_ticks = [self.at(tick, self.y.low)[0] for tick in self.x.ticks]
        y_ticks = [self.at(self.x.low, tick)[1] for tick in self.y.ticks]
        return [
            *(
                element("path", d=path([(x, BOTTOM), (x, BOTTOM + 4)]), class_="axis")
                for x in x_ticks
            ),
            *(element("path", d=path([(LEFT, y), (RIGHT, y)]), class_="rule") for y in y_ticks),
            element("path", d=path([(LEFT, BOTTOM), (RIGHT, BOTTOM)]), class_="axis"),
        ]
