"""A regular expression for the property names that a schema does not mention."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# No name contains control characters.
_CONTROL = r"\x00-\x1f"
_LAST_CONTROL = "\x1f"
# The key that marks the end of a name in the tree.
_END = ""


def other_names(names: Iterable[str], max_chars: int) -> str:
    """A regular expression for the texts of 1 to ``max_chars`` characters except ``names``.

    The grammar's regular expressions have no look-around. So the expression follows the tree of
    names, and allows anything after the first character that differs from all names. It matches no
    control character, so names that contain one are left out.
    """
    tree: dict[str, Any] = {}
    for name in names:
        if any(char <= _LAST_CONTROL for char in name):
            continue
        node = tree
        for char in name[: max_chars + 1]:
            node = node.setdefault(char, {})
        node[_END] = True
    return f"^{_others(tree, max_chars, first=True)}$"


def _others(node: dict[str, Any], left: int, first: bool = False) -> str:
    """The expression for the rest of a text, whose beginning is that of the names in ``node``.

    Args:
        left: the maximum number of further characters.
        first: the text has no character yet, so it may not end.
    """
    following = sorted(char for char in node if char != _END)
    ways = [] if first or _END in node else [""]
    if left:
        excluded = "".join(re.escape(char) for char in following)
        ways.append(f"[^{_CONTROL}{excluded}][^{_CONTROL}]{{0,{left - 1}}}")
        ways += [f"{re.escape(char)}{_others(node[char], left - 1)}" for char in following]
    return f"(?:{'|'.join(ways)})"
