"""Sweeps: several runs of a load test with different request rates or concurrency limits."""

from __future__ import annotations

import argparse
import math
import os
from typing import NamedTuple

from chairlift.loadtest.errors import UsageError

FLAGS = ("request-rate", "max-concurrency")


class Sweep(NamedTuple):
    """A run for each of ``values`` of ``flag``."""

    flag: str
    values: tuple[float, ...]

    def arguments(self, args: argparse.Namespace) -> list[argparse.Namespace]:
        """The arguments of each run. Run i has the seed of ``args`` plus i.

        If all runs had the same prompts, a prefix cache would serve all but the first. The value is
        appended to the name of a result file.

        Raises:
            UsageError: ``args`` also sets the flag itself.
        """
        name = self.flag.replace("-", "_")
        if getattr(args, name) not in (None, math.inf):
            raise UsageError(f"--sweep gives each --{self.flag}; leave that flag out")
        points = []
        for i, value in enumerate(self.values):
            given = {**vars(args), name: value, "seed": args.seed + i}
            if args.result_filename:
                root, suffix = os.path.splitext(args.result_filename)
                given["result_filename"] = f"{root}-{value:g}{suffix}"
            points.append(argparse.Namespace(**given))
        return points


def parse_sweep(text: str) -> Sweep:
    """Parses ``FLAG=VALUE,VALUE,...``.

    Raises:
        UsageError: the text does not have that form.
    """
    flag, _, listed = text.partition("=")
    if flag not in FLAGS:
        raise UsageError(f"--sweep {text}: give {' or '.join(f'{f}=A,B,...' for f in FLAGS)}")
    read = int if flag == "max-concurrency" else float
    try:
        values = tuple(map(read, listed.split(",")))
    except ValueError as error:
        raise UsageError(f"--sweep {text}: {error}") from error
    if len(values) < 2 or len(set(values)) < len(values):
        raise UsageError(f"--sweep {text}: give two or more different values")
    return Sweep(flag, values)
