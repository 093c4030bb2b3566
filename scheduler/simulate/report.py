"""Reports a simulation's results: as figures by name, and as text."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import Any

from chairlift.scheduler.simulate.budget import Budget
from chairlift.scheduler.simulate.measurements import (
    MICROSECONDS,
    SLICE_SECONDS,
    Measurements,
    Served,
    Slice,
)

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
# Rows of the table that shows the run over time.
PARTS = 10


def figures(measurements: Measurements, budget: Budget) -> dict[str, Any]:
    """All figures of the report; deterministic. Times are in seconds.

    Quantiles are nearest-rank. ``slowdown`` is a request's time from arrival to end divided by its
    time alone on the machine. ``jain_index`` measures fairness over users, by the share of that
    speed which each got: 1 if all got the same, 1/users if one got everything.
    """
    served, limits = measurements.served, budget.limits
    total = _sum(measurements.slices.values())
    output = sum(request.output_tokens for request in served)
    seconds = measurements.seconds
    return {
        "finished": len(served),
        "refused": measurements.refused,
        "seconds": seconds,
        "steps": measurements.steps,
        "requests_per_s": _ratio(len(served), seconds),
        "output_tokens": output,
        "output_tokens_per_s": _ratio(output, seconds),
        "prefill_tokens_per_s": _ratio(total.prefill_tokens, seconds),
        "busy": _ratio(total.seconds, seconds),
        "gap": _quantiles({us / MICROSECONDS: n for us, n in measurements.gaps.items()}),
        "groups": _groups(served),
        "users": len({request.user for request in served}),
        "jain_index": _jain(served),
        "preemptions": total.preemptions,
        "padding_ratio": _ratio(total.padding, total.columns),
        "rows": {"mean": _ratio(total.row_seconds, seconds), "max": measurements.max_rows},
        "waiting": {
            "mean": _ratio(total.waiting_seconds, seconds),
            "max": measurements.max_waiting,
        },
        "budget": {
            "rows": {"most": budget.rows, "limit": limits.max_rows},
            "step_tokens": {"most": budget.step_tokens, "limit": limits.max_step_tokens},
            "kv_bytes": {"most": budget.kv_bytes, "limit": limits.kv_bytes},
        },
        "parts": _parts(measurements),
    }


def _groups(served: Seq[Served]) -> list[dict[str, Any]]:
    """Waiting times of all requests, of each priority, and of each quartile of prompt lengths."""
    groups = {"all": served}
    for priority in sorted({request.priority for request in served}):
        groups[f"priority {priority}"] = [r for r in served if r.priority == priority]
    ordered = sorted(served, key=lambda request: request.prompt_tokens)
    cuts = [len(ordered) * part // 4 for part in range(5)]
    for part, (low, high) in enumerate(pairwise(cuts), 1):
        if low < high:
            longest = ordered[high - 1].prompt_tokens
            groups[f"prompts {part}/4, to {longest}"] = ordered[low:high]
    return [
        {
            "name": name,
            "requests": len(group),
            "queue": _quantiles(Counter(request.queue for request in group)),
            "ttft": _quantiles(Counter(request.ttft for request in group)),
            "slowdown": _quantiles(Counter(request.total / request.alone for request in group)),
        }
        for name, group in groups.items()
    ]


def _jain(served: Iterable[Served]) -> float:
    """Jain's index over users: the squared sum divided by the number times the sum of squares."""
    alone: defaultdict[str, float] = defaultdict(float)
    total: defaultdict[str, float] = defaultdict(float)
    for request in served:
        alone[request.user] += request.alone
        total[request.user] += request.total
    shares = [alone[user] / total[user] for user in alone]
    return _ratio(sum(shares) ** 2, len(shares) * sum(share**2 for share in shares))


def _parts(measurements: Measurements) -> list[dict[str, float]]:
    """The figures over time, in at most ``PARTS`` parts."""
    last = max(measurements.slices, default=-1)
    width = -(-(last + 1) // PARTS)
    parts = []
    for start in range(0, last + 1, max(1, width)):
        numbers = range(start, min(start + width, last + 1))
        part = _sum(measurements.slices[n] for n in numbers if n in measurements.slices)
        begin = start * SLICE_SECONDS
        lasted = min(measurements.seconds - begin, len(numbers) * SLICE_SECONDS)
        parts.append(
            {
                "from": begin,
                "busy": _ratio(part.seconds, lasted),
                "rows": _ratio(part.row_seconds, lasted),
                "waiting": _ratio(part.waiting_seconds, lasted),
                "padding_ratio": _ratio(part.padding, part.columns),
                "prefill_tokens_per_s": _ratio(part.prefill_tokens, lasted),
                "decode_tokens_per_s": _ratio(part.decode_tokens, lasted),
                "preemptions": part.preemptions,
            }
        )
    return parts


def _ratio(part: float, total: float) -> float:
    return part / total if total else 0.0


def _sum(slices: Iterable[Slice]) -> Slice:
    total = Slice()
    for part in slices:
        total.add(part)
    return total


def _quantiles(counts: Mapping[float, int]) -> dict[str, float]:
    """``QUANTILES`` of values, given as the count of each value; empty without values."""
    total = sum(counts.values())
    ranks = {name: math.ceil(quantile * total) for name, quantile in QUANTILES.items()}
    found: dict[str, float] = {}
    passed = 0
    for value in sorted(counts):
        passed += counts[value]
        for name, rank in ranks.items():
            if name not in found and passed >= rank:
                found[name] = value
    return found


def text(report: Mapping[str, Any]) -> str:
    """The figures as text for people."""
    return "\n".join([*_summary(report), "", *_waits(report), "", *_course(report)])


def _summary(report: Mapping[str, Any]) -> list[str]:
    gap, rows, waiting = report["gap"], report["rows"], report["waiting"]
    lines = {
        "requests": f"{report['finished']:,} served, {report['refused']:,} refused as too long",
        "simulated": f"{report['seconds']:,.1f} s in {report['steps']:,} steps, "
        f"{report['busy']:.1%} of the time busy",
        "output": f"{report['output_tokens']:,} tokens, {report['output_tokens_per_s']:,.1f} a "
        f"second; {report['requests_per_s']:,.2f} requests a second",
        "prompts": f"{report['prefill_tokens_per_s']:,.1f} tokens a second",
        "rows": f"{rows['mean']:,.1f} on average, {rows['max']:,} at most",
        "waiting": f"{waiting['mean']:,.1f} on average, {waiting['max']:,} at most",
        "preemptions": f"{report['preemptions']:,}",
        "padding": f"{report['padding_ratio']:.1%} of the columns held",
        "fairness": f"Jain's index {report['jain_index']:.4f} over {report['users']:,} users",
        "gaps (ms)": ", ".join(f"{name} {value * 1e3:,.1f}" for name, value in gap.items()),
    }
    for name, used in report["budget"].items():
        lines[f"most {name}"] = f"{used['most']:,} of {used['limit']:,}"
    return [f"{name:<18}{value}" for name, value in lines.items()]


def _waits(report: Mapping[str, Any]) -> list[str]:
    names = "".join(f"{name:>9}" for name in QUANTILES)
    lines = [
        f"{'':<20}{'requests':>10}   {'queue (s)':<36}   {'TTFT (s)':<36}   slowdown",
        f"{'':<30}   {names}   {names}   {names}",
    ]
    for group in report["groups"]:
        kinds = (group["queue"], group["ttft"], group["slowdown"])
        columns = ("".join(f"{value:>9.2f}" for value in kind.values()) for kind in kinds)
        lines.append(f"{group['name']:<20}{group['requests']:>10,}   {'   '.join(columns)}")
    return lines


def _course(report: Mapping[str, Any]) -> list[str]:
    head = (
        f"{'from (s)':>10}{'busy':>8}{'rows':>8}{'waiting':>10}{'padding':>9}"
        f"{'prompt/s':>10}{'output/s':>10}{'preempted':>11}"
    )
    lines = (
        f"{part['from']:>10,.0f}{part['busy']:>8.1%}{part['rows']:>8.1f}"
        f"{part['waiting']:>10.1f}{part['padding_ratio']:>9.1%}"
        f"{part['prefill_tokens_per_s']:>10,.0f}{part['decode_tokens_per_s']:>10,.0f}"
        f"{part['preemptions']:>11,}"
        for part in report["parts"]
    )
    return [head, *lines]
