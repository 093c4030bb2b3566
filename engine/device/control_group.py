"""The control groups (cgroups) of this process, and the memory that they leave to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


class GroupMemory(NamedTuple):
    """Bytes that the process's groups may use, and those of them that can still be allocated."""

    limit: int
    free: int


class GroupFolder(NamedTuple):
    """A folder of a control group, and the version of its files, 1 or 2."""

    path: Path
    version: int


class _Names(NamedTuple):
    """The files of one version of control groups, and the prefix of its statistics."""

    limit: str
    usage: str
    prefix: str


_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_VERSION_2 = _Names("memory.max", "memory.current", "")


def group_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> GroupMemory | None:
    """The least limit, and the least free memory, of this process's group and its ancestors.

    None without a limit.
    """
    found = list(_limits(proc, cgroups))
    if not found:
        return None
    return GroupMemory(min(each.limit for each in found), min(each.free for each in found))


def group_folders(
    controller: str, proc: Path = _PROC, cgroups: Path = _CGROUPS
) -> Iterator[GroupFolder]:
    """The folders of this process's group and its ancestors that may limit a resource.

    Args:
        controller: that of the resource, "cpu" or "memory".
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        # In a container the path may be the host's, while the files are those of the container's
        # root. So a folder of the path may be missing.
        root = cgroups / controller if controllers else cgroups
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            yield GroupFolder(folder, 1 if controllers else 2)
            if folder == root:
                break


def _limits(proc: Path, cgroups: Path) -> Iterator[GroupMemory]:
    for folder in group_folders("memory", proc, cgroups):
        # Without a limit, the file says "max".
        with suppress(OSError, ValueError):
            yield _read(folder.path, _VERSION_1 if folder.version == 1 else _VERSION_2)


def _read(folder: Path, names: _Names) -> GroupMemory:
    limit = int((folder / names.limit).read_text())
    usage = int((folder / names.usage).read_text())
    pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    statistics = {name: int(value) for name, value in pairs}
    # Pages of files are dropped when memory is needed.
    files = sum(statistics.get(f"{names.prefix}{kind}_file", 0) for kind in ("active", "inactive"))
    return GroupMemory(limit, max(0, limit - max(0, usage - files)))
