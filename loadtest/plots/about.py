"""The report's header: the command, versions, the machine and the lengths of the requests."""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import shlex
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from chairlift.loadtest.bench.metrics import Reply
from chairlift.loadtest.bench.result import BenchRun

MASK = "***"
# Flags whose value is a secret.
_SECRETS = frozenset({"api_key"})
# The user and the password in a URL, and the values of its query.
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_QUERY = re.compile(r"([?&][^=&#\s]*=)[^&#\s]+")
# A shorter key may be part of an ordinary word, such as a "-" that stands for no key.
_MIN_KEY = 4


class About(NamedTuple):
    """How the report was made.

    Attributes:
        command: the command line, without secrets.
        machine: the machine that ran the load test.
    """

    command: str
    machine: str


def about(parser: argparse.ArgumentParser, args: argparse.Namespace, keys: Sequence[str]) -> About:
    """Describes the command of ``args``, parsed by ``parser``, and this machine.

    ``keys`` are API keys that must not be shown, wherever in the command they stand.
    """
    words = ["chairlift", "bench", *_words(parser, args)]
    return About(shlex.join(masked(word, keys) for word in words), machine())


def masked(text: str, keys: Sequence[str] = ()) -> str:
    """The text without the keys, and without passwords and query values in URLs."""
    for key in sorted(keys, key=len, reverse=True):
        if len(key) >= _MIN_KEY:
            text = text.replace(key, MASK)
    text = _USER.sub(MASK, text)
    return _QUERY.sub(rf"\1{MASK}", text) if "://" in text else text


def machine() -> str:
    """The processor, its cores, the memory and the system, as far as they are known."""
    parts = [_processor(), f"{os.cpu_count()} CPUs"]
    if memory := _memory_gb():
        parts.append(f"{memory:.0f} GB of memory")
    return ", ".join([*parts, f"{platform.system()} {platform.release()}"])


def versions(run: BenchRun) -> str:
    """The versions of the load test and of the server."""
    server = run.server_version or "unknown"
    return f"chairlift bench {version('chairlift')}; server {server}"


def lengths(replies: Sequence[Reply]) -> str:
    """The lengths of the prompts and of the complete replies, in tokens."""
    prompts = _range([reply.prompt_tokens for reply in replies])
    outputs = _range([reply.output_tokens for reply in replies if reply.ok])
    return f"prompts of {prompts} tokens, replies of {outputs} tokens"


def _range(values: Sequence[int]) -> str:
    if not values:
        return "no"
    low, high = min(values), max(values)
    if low == high:
        return str(low)
    return f"{low} to {high} (median {np.median(values):.0f})"


def _words(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Iterator[str]:
    """The flags that differ from their defaults, as words of a command line."""
    for action in parser._actions:
        value = getattr(args, action.dest, action.default)
        if not action.option_strings or value == action.default:
            continue
        yield action.option_strings[-1]
        if action.nargs == 0:
            continue
        values = value if isinstance(value, list) else [value]
        yield from (MASK if action.dest in _SECRETS else _shown(one) for one in values)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return "inf" if math.isinf(value) else f"{value:g}"
    return str(value)


def _processor() -> str:
    """The processor's name. On Linux, ``platform`` knows the architecture only."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (ValueError, OSError):
        return None
