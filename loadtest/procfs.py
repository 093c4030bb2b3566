"""CPU time of a process and all it started, from /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")


class _Stat(NamedTuple):
    parent: int
    cpu_ticks: int


def available() -> bool:
    """Whether this system has a /proc to read."""
    return (_PROC / "self" / "stat").exists()


def cpu_seconds(pid: int) -> float:
    """User and system time that ``pid`` and its living descendants have used, in seconds."""
    stats = {int(entry.name): stat for entry in _PROC.glob("[0-9]*") if (stat := _read(entry))}
    tree = [pid]
    for member in tree:
        # The list grows while it is gone through: breadth first down the tree.
        tree += [child for child, stat in stats.items() if stat.parent == member]
    ticks = sum(stats[member].cpu_ticks for member in tree if member in stats)
    return ticks / os.sysconf("SC_CLK_TCK")


def _read(entry: Path) -> _Stat | None:
    try:
        text = (entry / "stat").read_text(errors="replace")
    except OSError:
        return None  # it has just ended
    # The command's name, in parentheses, may hold anything; the fields count from behind it.
    fields = text.rpartition(")")[2].split()
    return _Stat(parent=int(fields[1]), cpu_ticks=int(fields[11]) + int(fields[12]))
