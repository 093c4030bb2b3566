"""Reads CPU time and memory of a process and its descendants from /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_WORKER = b"chairlift.engine.workers.child"


class CpuTime(NamedTuple):
    """CPU seconds in user code and in the kernel."""

    user: float = 0.0
    system: float = 0.0

    @property
    def total(self) -> float:
        return self.user + self.system

    def since(self, before: CpuTime) -> CpuTime:
        """The CPU time used since an earlier reading."""
        return CpuTime(self.user - before.user, self.system - before.system)


class _Stat(NamedTuple):
    parent: int
    cpu: CpuTime


def available() -> bool:
    """Whether this system has a /proc to read."""
    return (_PROC / "self" / "stat").exists()


def resident_bytes(pid: int) -> int:
    """The resident memory of a process in bytes."""
    pages = (_PROC / str(pid) / "statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """The CPU seconds, user and system, of ``pid`` and its living descendants."""
    return sum(cpu_time(member).total for member in tree(pid))


def cpu_time(pid: int) -> CpuTime:
    """The CPU time of ``pid`` alone; 0 if it has ended."""
    stat = _read(pid)
    return stat.cpu if stat else CpuTime()


def tree(pid: int) -> list[int]:
    """``pid`` and its living descendants, parents first."""
    children: dict[int, list[int]] = {}
    # Callers look often, and a machine has many processes: a Path for each took most of the time.
    for name in os.listdir(_PROC):
        if name.isdigit() and (stat := _read(int(name))):
            children.setdefault(stat.parent, []).append(int(name))
    members = [pid]
    for member in members:
        # The list grows during the iteration, which makes this a breadth-first search.
        members += children.get(member, [])
    return members


def without_workers(pids: list[int]) -> list[int]:
    """The processes without Chairlift's workers, which parse large bodies and compile grammars."""
    return [pid for pid in pids if _WORKER not in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""  # it has just ended


def _read(pid: int) -> _Stat | None:
    try:
        with open(f"{_PROC}/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None  # it has just ended
    # The command's name, in parentheses, may contain anything: count fields from after it.
    fields = text.rpartition(b")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return _Stat(int(fields[1]), CpuTime(int(fields[11]) / tick, int(fields[12]) / tick))
