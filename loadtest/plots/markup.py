"""Builds HTML and SVG as a tree of elements, so that all text is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

Element = ElementTree.Element


def element(tag: str, *children: Element | str, **attributes: str | float) -> Element:
    """``<tag attribute="…">children</tag>``.

    In an attribute's name, a trailing underscore is dropped (``class_``) and others become hyphens.
    Numbers get at most two decimals.
    """
    made = Element(tag, {_name(key): _value(value) for key, value in attributes.items()})
    for child in children:
        if isinstance(child, str):
            _append_text(made, child)
        else:
            made.append(child)
    return made


def path(points: Iterable[tuple[float, float]]) -> str:
    """The ``d`` attribute of a line through the points."""
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def html(root: Element) -> str:
    """The text of a complete HTML document."""
    return f"<!DOCTYPE html>\n{ElementTree.tostring(root, encoding='unicode', method='html')}\n"


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def _append_text(parent: Element, text: str) -> None:
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text
