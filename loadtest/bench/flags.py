"""The flags of ``chairlift bench``."""

from __future__ import annotations

import argparse
import math
from typing import Any, Protocol, get_args

from chairlift.loadtest.bench.config import DatasetName
from chairlift.loadtest.bench.metrics import METRIC_NAMES
from chairlift.loadtest.bench.target import BACKENDS, HOST, PORT
from chairlift.loadtest.data.random_images import BUCKETS, LIMITS

# The same as for ``chairlift chat``. Of a list with commas, the first key is sent.
KEY_VARIABLES = ("CHAIRLIFT_API_KEY", "OPENAI_API_KEY")


class Add(Protocol):
    """The type of ``ArgumentParser.add_argument``."""

    def __call__(self, *names: str, **options: Any) -> argparse.Action: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``chairlift bench``."""
    add = parser.add_argument
    add(
        "--backend",
        choices=BACKENDS,
        help="the kind of requests: texts for openai and vllm, conversations for openai-chat"
        " (default: that of --endpoint)",
    )
    add("--base-url", metavar="URL", help="the server's address, in place of --host and --port")
    add("--host", help=f"the server's name or IP address (default: {HOST})")
    add("--port", type=int, help=f"the server's port (default: {PORT})")
    add(
        "--endpoint",
        metavar="PATH",
        help="path of the requests (default: /v1/completions, for openai-chat"
        " /v1/chat/completions)",
    )
    add(
        "--tokenizer",
        metavar="NAME",
        help="count the prompts' tokens with this tokenizer: a tokenizer.json, a folder with one,"
        " or a model of the hub (default: the server's, by its /tokenize)",
    )
    add("--model", help="model name in the requests (default: the first of GET /v1/models)")
    add("--api-key", help=f"bearer token (default: ${', else $'.join(KEY_VARIABLES)}, if set)")
    add("--label", help="a name for this run, stored in the result file")
    _add_dataset(parser.add_argument_group("Data set").add_argument)
    _add_load(parser.add_argument_group("Load").add_argument)
    _add_report(parser.add_argument_group("Results").add_argument)


def _add_dataset(add: Add) -> None:
    add(
        "--dataset-name",
        choices=get_args(DatasetName),
        default="random",
        help="where the prompts come from (default: %(default)s)",
    )
    add(
        "--dataset-path",
        metavar="FILE",
        help='custom: a JSONL file of {"prompt": text, "output_tokens": n (optional)}, sent in'
        " order and repeated if it has too few lines. sharegpt: a JSON file of conversations, of"
        " which the first turns are sent. trace: JSON lines or CSV of arrival times and token"
        " counts, also in Azure's and Mooncake's format; random prompts are sent at those times",
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
    _add_images(add)
    for name, default, meaning in (
        ("prefix-len", 256, "tokens of each shared prefix"),
        ("suffix-len", 256, "prompt tokens after the prefix"),
        ("num-prefixes", 10, "number of different prefixes"),
        ("output-len", 128, "reply tokens"),
    ):
        add(
            f"--prefix-repetition-{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"{meaning} (default: %(default)s)",
        )
    add(
        "--edit-len",
        type=int,
        default=512,
        metavar="N",
        help="approximate tokens of each document of the data set edit, which is to be repeated "
        "with a small change (default: %(default)s)",
    )
    add(
        "--edit-prediction",
        action="store_true",
        help="send each document as the request's prediction (conversations only)",
    )
    add("--sharegpt-output-len", type=int, help="reply tokens (default: those of the file)")
    add(
        "--custom-output-len",
        type=int,
        help="reply tokens of the custom data set (default: those of the file, else 256)",
    )
    add(
        "--ignore-eos",
        action="store_true",
        help="generate replies of full length; always on with random, random-mm, prefix_repetition,"
        " trace",
    )
    add("--temperature", type=float, help="sampling temperature (default: left to the server)")
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of prompts, lengths, arrivals, cancellations and slow readers"
        " (default: %(default)s)",
    )


def _add_images(add: Add) -> None:
    add(
        "--random-mm-base-items-per-request",
        type=int,
        default=1,
        metavar="N",
        help="images of each request of random-mm (default: %(default)s)",
    )
    add(
        "--random-mm-num-mm-items-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="the number of images varies uniformly in [N*(1-R), N*(1+R)] (default: %(default)s)",
    )
    add(
        "--random-mm-limit-mm-per-prompt",
        default=LIMITS,
        metavar="DICT",
        help="the most images of a request (default: %(default)s; videos are not supported)",
    )
    add(
        "--random-mm-bucket-config",
        default=BUCKETS,
        metavar="DICT",
        help="the probability of each (height, width, frames) of an image (default: %(default)s)",
    )


def _add_load(add: Add) -> None:
    add("--num-warmups", type=int, default=0, help="unmeasured requests before the run")
    add(
        "--duration",
        type=float,
        metavar="SECONDS",
        help="send requests for this long instead of --num-prompts, at the given rate or as many"
        " as --max-concurrency allows; running requests are then completed",
    )
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        help="requests per second; inf sends all at once (default: %(default)s)",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        help="shape of the gamma-distributed gaps between arrivals: 1 is a Poisson process, lower"
        " is burstier, higher is more regular (default: %(default)s)",
    )
    add("--max-concurrency", type=int, help="maximum requests in flight (default: no limit)")
    add(
        "--ramp-up-strategy",
        choices=["linear", "exponential"],
        help="increase the rate from request to request, by a constant difference or factor",
    )
    add("--ramp-up-start-rps", type=float, metavar="RATE", help="initial requests per second")
    add("--ramp-up-end-rps", type=float, metavar="RATE", help="final requests per second")
    add(
        "--sweep",
        metavar="FLAG=A,B,...",
        help="one run for each of these values of request-rate or max-concurrency, and one report;"
        " the seed increases by one from run to run",
    )
    add(
        "--cancel-rate",
        type=float,
        default=0.0,
        metavar="PART",
        help="fraction of clients that disconnect at a random token, such as 0.2"
        " (default: %(default)s)",
    )
    add(
        "--slow-reader-rate",
        type=float,
        default=0.0,
        metavar="PART",
        help="fraction of clients that read slowly; excluded from latencies (default: %(default)s)",
    )
    add(
        "--slow-reader-bytes-per-s",
        type=float,
        default=512.0,
        metavar="N",
        help="speed of slow readers (default: %(default)s)",
    )


def _add_report(add: Add) -> None:
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="latency objectives of a good request, such as ttft:500 tpot:50 e2el:5000",
    )
    add(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        help=f"latencies to print, of {','.join(METRIC_NAMES)} (default: %(default)s)",
    )
    add(
        "--metric-percentiles",
        default="99",
        help="percentiles, such as 50,95,99 (default: %(default)s)",
    )
    add("--save-result", action="store_true", help="write the result to a JSON file")
    add("--save-detailed", action="store_true", help="include each request's times and text")
    add("--result-dir", help="folder of the result file (default: the current one)")
    add("--result-filename", help="name of the result file (default: label, rate, model and date)")
    add("--html", metavar="FILE", help="write a report with plots as one self-contained file")
    add(
        "--check-metrics",
        action="store_true",
        help="exit with code 1 if the server's metrics disagree with what the clients saw; the"
        " comparison is always printed",
    )
    add("--metrics-url", metavar="URL", help="the metrics' URL (default: /metrics of --base-url)")
    add(
        "--verify",
        action="store_true",
        help="use temperature 0 and afterwards send every request again, alone: both replies must"
        " be equal",
    )
    add("--disable-tqdm", action="store_true", help="do not show progress")
