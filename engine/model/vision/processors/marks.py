"""Placeholders of images in a prompt's text, before the processor replaces them."""

from __future__ import annotations

import re
from typing import NamedTuple


class Mark(NamedTuple):
    """The text that stands for an image.

    Attributes:
        text: what the processor takes for an image, with "{}" for its number; empty: nothing,
            because the processor places the image.
        pattern: a regular expression of all that the processor takes for one.
        written: what a message that is a text has in an image's place, with "{}" for its number.
    """

    text: str
    pattern: str
    written: str

    def numbered(self, number: int) -> str:
        """The mark of an image; ``number`` begins with 1."""
        return self.text.replace("{}", str(number))

    def in_message(self, number: int) -> str:
        """The text in an image's place in a message that is a text; ``number`` begins with 1."""
        return self.written.replace("{}", str(number))

    def count(self, text: str) -> int:
        """How many images the processor would take a text to have."""
        return len(self._found(text))

    def removed(self, text: str) -> str:
        """A text without its marks."""
        return re.sub(self.pattern, "", text) if self.text else text

    def first(self, text: str) -> str:
        """The first part of a text that the processor would take for an image; "" if none."""
        found = re.search(self.pattern, text)
        return found[0] if found else ""

    def are_in_order(self, text: str) -> bool:
        """Whether a text's marks have the numbers 1, 2, 3, ..., if marks have numbers."""
        found = self._found(text)
        numbers = range(1, len(found) + 1)
        return "{}" not in self.text or found == [self.numbered(number) for number in numbers]

    def _found(self, text: str) -> list[str]:
        return re.findall(self.pattern, text) if self.text else []
