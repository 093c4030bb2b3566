"""A regular expression for the names of properties that a schema does not mention."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# Control characters belong to no name.
_CONTROL = r"\x00-\x1f"
_END = ""


def other_names(names: Iterable[str], most_chars: int) -> str:
    """Matches every text of 1 to ``most_chars`` characters that is none of ``names``.

    Without look-around, which the grammar's regular expressions lack: what is left of a text is
    free from the first character on in which it differs from all names.
    """
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for char in name[: most_chars + 1]:
            node = node.setdefault(char, {})
        node[_END] = True
    return f"^{_others(tree, most_chars, first=True)}$"


def _others(node: dict[str, Any], left: int, first: bool = False) -> str:
    """What may follow a beginning that names have in common."""
    following = sorted(char for char in node if char != _END)
    ways = [] if first or _END in node else [""]
    if left:
        excluded = "".join(re.escape(char) for char in following)
        ways.append(f"[^{_CONTROL}{excluded}][^{_CONTROL}]{{0,{left - 1}}}")
        ways += [f"{re.escape(char)}{_others(node[char], left - 1)}" for char in following]
    return f"(?:{'|'.join(ways)})"
