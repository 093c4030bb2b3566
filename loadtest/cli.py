"""``chairlift bench``: a load test with the flags of ``vllm bench serve`` and some additions."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvloop

from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.loadtest.bench.config import BenchConfig
from chairlift.loadtest.bench.files import check_writable
from chairlift.loadtest.bench.flags import KEY_VARIABLES, add_arguments
from chairlift.loadtest.bench.report import sweep_table
from chairlift.loadtest.bench.result import BenchRun
from chairlift.loadtest.bench.result_file import check_result_file, result_json, save_result
from chairlift.loadtest.bench.run import perform
from chairlift.loadtest.bench.sweep import parse_sweep
from chairlift.loadtest.bench.target import find_target
from chairlift.loadtest.errors import LoadTestError, UsageError
from chairlift.loadtest.plots.about import About, about
from chairlift.loadtest.plots.page import save_page

__all__ = ["add_arguments", "main", "run"]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# The open files that a load test asks the system for, and fewer if it refuses.
_FILE_LIMITS = (65_536, 10_240)


def run(args: argparse.Namespace) -> int:
    """Runs the load test that the flags describe.

    Returns the exit code: 0; 1 if a request failed, replies differ, checked metrics disagree, the
    server is unusable or results could not be saved; 2 for wrong flags; 130 after Ctrl-C or a
    SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.signal(signal.SIGTERM, _end_as_ctrl_c)
    _raise_file_limit()
    try:
        points = parse_sweep(args.sweep).arguments(args) if args.sweep else [args]
        configs = [config_from_args(point) for point in points]
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_bench(configs, _about(args)))
    except LoadTestError as error:
        print(f"chairlift bench: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
    except KeyboardInterrupt:
        return _interrupted()
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_as_ctrl_c(number: int, frame: FrameType | None) -> None:
    """Handles SIGTERM, as from ``timeout``: the results so far are printed and saved."""
    signal.raise_signal(signal.SIGINT)


def _raise_file_limit() -> None:
    """Lets this process open more connections. By default a process on macOS has 256 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _FILE_LIMITS:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or limit <= soft:
            return
        # macOS refuses more than its kernel allows, although the limit of the process is higher.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return


def config_from_args(args: argparse.Namespace) -> BenchConfig:
    """Builds the configuration from the flags and validates it.

    Raises:
        UsageError: the value of a flag is invalid.
    """
    values: dict[str, Any] = {
        name: getattr(args, name) for name in BenchConfig.__slots__ if hasattr(args, name)
    }
    target = find_target(args.backend, args.base_url, args.host, args.port, args.endpoint)
    values |= target._asdict()
    values["api_key"] = args.api_key or _key_from_environment()
    values["percentile_metrics"] = tuple(map(str.strip, args.percentile_metrics.split(",")))
    try:
        values["metric_percentiles"] = tuple(map(float, args.metric_percentiles.split(",")))
    except ValueError as error:
        raise UsageError(f"--metric-percentiles {args.metric_percentiles}: {error}") from error
    goodput = {}
    # Also accept several pairs in one argument, as from a quoted string.
    for pair in " ".join(args.goodput).split():
        name, _, limit = pair.partition(":")
        try:
            goodput[name] = float(limit)
        except ValueError as error:
            raise UsageError(f"--goodput {pair}: give NAME:MILLISECONDS") from error
    values["goodput"] = goodput
    return BenchConfig(**values)


def _key_from_environment() -> str | None:
    for variable in KEY_VARIABLES:
        if key := os.environ.get(variable, "").partition(",")[0].strip():
            return key
    return None


def _about(args: argparse.Namespace) -> About:
    """The header of the report; no key of the flags or the environment is in it."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = (args.api_key, *(os.environ.get(variable) for variable in KEY_VARIABLES))
    keys = [key.strip() for keys in given if keys for key in keys.split(",")]
    return about(parser, args, keys)


async def _bench(configs: Sequence[BenchConfig], header: About) -> int:
    html = configs[0].html
    if html:
        check_writable(Path(html), "--html")
    for config in configs:
        if config.save_result:
            check_result_file(config)
    runs: list[BenchRun] = []
    saved = True
    # A sweep that fails or is interrupted leaves a report and the table of the runs so far.
    try:
        for number, config in enumerate(configs, 1):
            if len(configs) > 1:
                print(f"bench: run {number} of {len(configs)}: {config.load}", file=sys.stderr)
            run = await perform(config)
            if run.replies or not run.interrupted:
                runs.append(run)
                saved &= _save(runs, header)
            if run.interrupted:
                return _interrupted()
    finally:
        if len(runs) > 1:
            print(sweep_table(runs))
    return EXIT_OK if saved and all(run.passed for run in runs) else EXIT_FAILED


def _save(runs: Sequence[BenchRun], header: About) -> bool:
    """Saves the last run and the report of all runs; returns whether both could be written.

    A file that cannot be written, as on a full disk, does not end a sweep.
    """
    run, saved = runs[-1], True
    if run.config.save_result:
        try:
            print(f"Result saved to {save_result(run.config, result_json(run))}")
        except UsageError as error:
            print(f"chairlift bench: {error}", file=sys.stderr)
            saved = False
    if html := run.config.html:
        try:
            save_page(html, runs, header)
            print(f"Report saved to {html}")
        except UsageError as error:
            print(f"chairlift bench: {error}", file=sys.stderr)
            saved = False
    return saved


def _interrupted() -> int:
    print("chairlift bench: interrupted", file=sys.stderr)
    return EXIT_INTERRUPTED


def main() -> int:
    """``python -m chairlift.loadtest.cli``: the same as ``chairlift bench``."""
    parser = CommandParser(description="Load test of an OpenAI-compatible server.")
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
