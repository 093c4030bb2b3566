"""``make conformance``: checks every model file and writes the tables of the results."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from chairlift.engine.cpu.blas import load_fast_blas

load_fast_blas()  # before MLX is imported
# On CUDA MLX multiplies float32 numbers with 10 bits of their fractions otherwise, which gives some
# random models other tokens.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

from conformance.check import Result, check  # noqa: E402
from conformance.configs import model_names  # noqa: E402
from conformance.paged import check_paged  # noqa: E402
from conformance.report import TEXT_PAGE, VISION_PAGE, passes, report  # noqa: E402

# Kernels that a GPU needs for the first time take seconds to compile.
TIMEOUT_S = 180


def main() -> int:
    """Returns 1 if too few of the applicable model files pass."""
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", help="comma-separated model files; writes no report")
    parser.add_argument("--out", type=Path, help="the Markdown file to write")
    parser.add_argument(
        "--pages", action="store_true", help="serve from pages, on this device; writes no report"
    )
    parser.add_argument(
        "--vision", action="store_true", help="check mlx-vlm's types, with images, instead"
    )
    parser.add_argument("--jobs", type=int, default=1, help="model files at a time")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # used by the subprocesses
    args = parser.parse_args()
    if args.one:
        result = _check(args)
        print(json.dumps(dataclasses.asdict(result)))
        return 0
    page = VISION_PAGE if args.vision else TEXT_PAGE
    names = args.only.split(",") if args.only else _names(args.vision)
    flags = [flag for flag in ("--pages", "--vision") if getattr(args, flag[2:])]
    results: list[Result] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        check_one = partial(_isolated, flags=flags)
        for number, (result, seconds) in enumerate(pool.map(check_one, names), start=1):
            results.append(result)
            detail = f"  {result.detail}" if result.detail else ""
            print(
                f"{number}/{len(names)} {result.name} {result.outcome} {seconds:.1f} s{detail}",
                flush=True,
            )
    if args.out and not args.only and not args.pages:
        args.out.write_text(report(results, page))
    return 0 if passes(results, page) else 1


def _names(vision: bool) -> list[str]:
    if not vision:
        return model_names()
    from conformance.vision.types import type_names

    return type_names()


def _check(args: argparse.Namespace) -> Result:
    if args.vision:
        # It needs the extra "vision".
        from conformance.vision.check import check as check_vision

        return check_vision(args.one)
    return check_paged(args.one) if args.pages else check(args.one)


def _isolated(name: str, flags: list[str]) -> tuple[Result, float]:
    """The result and seconds of a check in a subprocess; a crash or hang is a failed check."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "conformance", "--one", name, *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        result = Result(name, "failed", detail=f"no result within {TIMEOUT_S} s")
    else:
        lines = done.stdout.splitlines()
        if done.returncode == 0 and lines:
            result = Result(**json.loads(lines[-1]))
        else:
            last = (done.stderr.splitlines() or [""])[-1]
            result = Result(name, "failed", detail=f"exit status {done.returncode}: {last}")
    return result, time.monotonic() - begin


if __name__ == "__main__":
    sys.exit(main())
