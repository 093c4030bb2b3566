"""Simulates the scheduler on a machine that is described by numbers.

It serves the requests of a trace, or requests generated from a seed, on a simulated clock, and
prints waiting times, gaps between tokens, fairness, padding and the use of each limit. The report
depends only on the flags, not on the speed of this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from chairlift.scheduler.limits import Limits
from chairlift.scheduler.simulate.machine import MACHINES, factors
from chairlift.scheduler.simulate.report import figures, text
from chairlift.scheduler.simulate.simulation import Simulation
from chairlift.scheduler.simulate.trace import TraceError, TraceRequest, read_trace
from chairlift.scheduler.simulate.traffic import Traffic

DEFAULTS = Traffic(requests=10_000, rate=10.0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m chairlift.scheduler.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_requests(parser)
    _add_machine(parser)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures as JSON")
    return parser


def _add_requests(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("requests")
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="JSON lines or CSV: ours, Azure's or Mooncake's"
    )
    load.add_argument(
        "--requests",
        type=int,
        help=f"requests to serve (default: {DEFAULTS.requests}, or the whole trace)",
    )
    load.add_argument("--rate", type=float, default=DEFAULTS.rate, help="requests a second")
    load.add_argument(
        "--burstiness", type=float, default=DEFAULTS.burstiness, help="1 is Poisson, less burstier"
    )
    load.add_argument(
        "--users",
        type=int,
        default=DEFAULTS.users,
        help="users that send them (default: %(default)s)",
    )
    load.add_argument(
        "--priorities",
        type=_shares,
        default=DEFAULTS.priorities,
        metavar="P:SHARE,...",
        help="share of the requests of each priority (default: 0:0.8,1:0.2)",
    )
    load.add_argument(
        "--seed",
        type=int,
        default=DEFAULTS.seed,
        help="seed of the generated requests (default: %(default)s)",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    machine = parser.add_argument_group("machine and limits; the defaults are the machine's")
    machine.add_argument(
        "--machine",
        choices=MACHINES,
        default=next(iter(MACHINES)),
        help="the measured machine to simulate (default: %(default)s)",
    )
    machine.add_argument(
        "--noise", type=float, default=0.1, help="how much step times vary, 0.1 is ± 10 %%"
    )
    machine.add_argument("--max-rows", type=int, help="rows of the decode batch")
    machine.add_argument("--max-step-tokens", type=int, help="tokens of one step, prompts and rows")
    machine.add_argument(
        "--max-step-ms", type=float, help="duration of a step while rows are decoding"
    )
    machine.add_argument(
        "--kv-bytes", type=_bytes, help="memory for the KV cache in bytes, like 60e9"
    )
    machine.add_argument(
        "--pages",
        action="store_true",
        help="divide this memory into pages (default: as the machine does)",
    )


def _bytes(value: str) -> int:
    try:
        return int(float(value))
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"must be a number of bytes, not {value!r}") from error


def _shares(value: str) -> dict[int, float]:
    try:
        pairs = (part.split(":") for part in value.split(","))
        return {int(priority): float(share) for priority, share in pairs}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be like 0:0.8,1:0.2, not {value!r}") from error


def _or(chosen: int | None, default: int) -> int:
    return default if chosen is None else chosen


def _limits(options: argparse.Namespace) -> Limits:
    limits = MACHINES[options.machine].limits
    rows = _or(options.max_rows, limits.max_rows)
    chunk = limits.max_step_tokens - limits.max_rows
    limits = replace(
        limits,
        max_rows=rows,
        max_step_tokens=_or(options.max_step_tokens, rows + chunk),
        kv_bytes=_or(options.kv_bytes, limits.kv_bytes),
        bands=1 if options.pages else limits.bands,
        paged=options.pages or limits.paged,
    )
    if options.max_step_ms is None:
        return limits
    return replace(limits, step_seconds=options.max_step_ms / 1e3, max_step_stretch=0.0)


def _requests(options: argparse.Namespace) -> Iterable[TraceRequest]:
    if options.requests is not None and options.requests < 1:
        raise ValueError(f"requests must be above 0, not {options.requests}")
    if options.trace:
        return islice(read_trace(options.trace), options.requests)
    return Traffic(
        requests=DEFAULTS.requests if options.requests is None else options.requests,
        rate=options.rate,
        burstiness=options.burstiness,
        users=options.users,
        priorities=options.priorities,
        seed=options.seed,
    ).draw()


def main(arguments: list[str] | None = None) -> int:
    """Simulates and prints the report, after Ctrl-C of the requests so far.

    Returns 0; 2 if the flags or the trace are not valid; 130 after Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    try:
        limits = _limits(options)
        requests = _requests(options)
        noise = factors(options.noise, options.seed)
        if options.json:  # checked before a long simulation
            options.json.open("a").close()
    except (ValueError, OSError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    simulation = Simulation(limits, MACHINES[options.machine].cost, noise)
    total = options.requests if options.trace else options.requests or DEFAULTS.requests
    began = time.monotonic()
    interrupted = False
    try:
        # None shows it on terminals only.
        with tqdm(
            total=total, unit=" requests", smoothing=0.05, mininterval=1.0, disable=None
        ) as progress:
            for done in simulation.run(requests):
                if done:
                    progress.update(done)
    except (TraceError, OSError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("simulate: interrupted; the report is of the requests so far", file=sys.stderr)
        interrupted = True
    took = time.monotonic() - began
    report = figures(simulation.measurements, simulation.budget)
    print(text(report))
    if options.json:
        try:
            options.json.write_text(json.dumps(report, indent=2) + "\n")
        except OSError as error:
            print(f"simulate: {error}", file=sys.stderr)
            return 2
    steps = simulation.measurements.steps
    print(f"{took:.1f} s here, {steps / took:,.0f} steps planned a second", file=sys.stderr)
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
