"""The flags of ``chairlift bench``."""

from __future__ import annotations

import argparse
import math
from typing import Any, Protocol, get_args

from chairlift.loadtest.bench.config import DatasetName
from chairlift.loadtest.bench.metrics import METRIC_NAMES


class Add(Protocol):
    """``ArgumentParser.add_argument``."""

    def __call__(self, *names: str, **options: Any) -> argparse.Action: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``chairlift bench``."""
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    add(
        "--endpoint",
        default="/v1/completions",
        help="path to send to; /v1/chat/completions sends chats (default: %(default)s)",
    )
    add("--model", help="model name to ask for (default: the first of GET /v1/models)")
    add("--api-key", help="bearer token (default: the environment's OPENAI_API_KEY)")
    add("--label", help="a name for this run, kept in the result file")
    _add_dataset(parser.add_argument_group("what is sent").add_argument)
    _add_load(parser.add_argument_group("when, and by whom").add_argument)
    _add_report(parser.add_argument_group("what is told of it").add_argument)


def _add_dataset(add: Add) -> None:
    add("--dataset-name", choices=get_args(DatasetName), default="random")
    add(
        "--dataset-path",
        metavar="FILE",
        help='custom: a JSONL file of {"prompt": text, "output_tokens": n (optional)}; its lines'
        " are sent in order, and again from the first if there are too few. sharegpt: a JSON file"
        " of conversations; first turns are sent. trace: JSON lines or CSV of arrivals and token"
        " counts, also Azure's and Mooncake's; random prompts are sent at those times",
    )
    add("--num-prompts", type=int, default=1000, help="requests to send (default: %(default)s)")
    add("--random-input-len", type=int, default=1024, help="prompt tokens (default: %(default)s)")
    add("--random-output-len", type=int, default=128, help="reply tokens (default: %(default)s)")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="both lengths vary uniformly in [len*(1-R), len*(1+R)] (default: %(default)s)",
    )
    for name, default, meaning in (
        ("prefix-len", 256, "tokens of each shared beginning"),
        ("suffix-len", 256, "prompt tokens after it"),
        ("num-prefixes", 10, "different beginnings"),
        ("output-len", 128, "reply tokens"),
    ):
        add(
            f"--prefix-repetition-{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"{meaning} (default: %(default)s)",
        )
    add("--sharegpt-output-len", type=int, help="reply tokens (default: the answers' own)")
    add(
        "--custom-output-len",
        type=int,
        help="reply tokens of the custom data set (default: the file's own, else 256)",
    )
    add(
        "--ignore-eos",
        action="store_true",
        help="replies go on to their full length; always so with random, prefix_repetition, trace",
    )
    add("--temperature", type=float, help="sampling temperature (default: left to the server)")
    add("--seed", type=int, default=0, help="of prompts, lengths, arrivals and who misbehaves")


def _add_load(add: Add) -> None:
    add("--num-warmups", type=int, default=0, help="requests sent before, not measured")
    add(
        "--duration",
        type=float,
        metavar="SECONDS",
        help="send for so long, instead of --num-prompts: at the given rate, else as many as"
        " --max-concurrency lets; what runs then is awaited",
    )
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        help="requests a second; inf sends all at once (default: %(default)s)",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        help="shape of the gamma-distributed gaps between arrivals: 1 is a Poisson process, less"
        " is burstier, more is more regular (default: %(default)s)",
    )
    add("--max-concurrency", type=int, help="most requests in flight (default: no limit)")
    add(
        "--ramp-up-strategy",
        choices=["linear", "exponential"],
        help="the rate climbs from request to request: by the same number, or the same factor",
    )
    add("--ramp-up-start-rps", type=float, metavar="RATE", help="from so many requests a second")
    add("--ramp-up-end-rps", type=float, metavar="RATE", help="to so many")
    add(
        "--sweep",
        metavar="FLAG=A,B,...",
        help="one run after the other, with these values of request-rate or max-concurrency, and"
        " one report; each run's seed is one more than the last one's",
    )
    add(
        "--cancel-rate",
        type=float,
        default=0.0,
        metavar="PART",
        help="part of the clients that leave at a random token, such as 0.2 (default: %(default)s)",
    )
    add(
        "--slow-reader-rate",
        type=float,
        default=0.0,
        metavar="PART",
        help="part of the clients that read slowly, in no latency (default: %(default)s)",
    )
    add(
        "--slow-reader-bytes-per-s",
        type=float,
        default=512.0,
        metavar="N",
        help="how slowly (default: %(default)s)",
    )


def _add_report(add: Add) -> None:
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="objectives a good request meets, of ttft, tpot and e2el: ttft:500 tpot:50 e2el:5000",
    )
    add(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        help=f"latencies to print, of {','.join(METRIC_NAMES)} (default: %(default)s)",
    )
    add("--metric-percentiles", default="99", help="such as 50,95,99 (default: %(default)s)")
    add("--save-result", action="store_true", help="write the result to a JSON file")
    add("--save-detailed", action="store_true", help="with every request's times and text")
    add("--result-dir", help="folder of the result file (default: this one)")
    add("--result-filename", help="its name (default: made of label, rate, model and date)")
    add("--html", metavar="FILE", help="write a report with plots, one file that needs no other")
    add(
        "--check-metrics",
        action="store_true",
        help="exit code 1 if the server's metrics do not agree with what the clients saw; the"
        " comparison is printed anyway",
    )
    add("--metrics-url", metavar="URL", help="where they are (default: /metrics of --base-url)")
    add(
        "--verify",
        action="store_true",
        help="temperature 0, and afterwards every request is sent again alone: the two replies"
        " must be equal",
    )
    add("--disable-tqdm", action="store_true", help="no live progress line")
