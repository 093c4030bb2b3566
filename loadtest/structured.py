"""``python -m chairlift.loadtest.structured``: measures the cost of rows with a grammar.

It serves the default model on the loopback interface and runs batches of ``--rows`` concurrent
requests with ``--tokens`` output tokens each. Batches without grammars alternate with batches in
which half of the rows follow a JSON schema whose replies are longer than ``--tokens``. It compares
the tokens per second of both kinds of batches, and of a free row in each. The exit code is 1 if
either ratio is below MIN_RATIO.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import uvloop

from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.engine.config import DEFAULT_MODEL
from chairlift.loadtest.bench.files import output_file
from chairlift.loadtest.bench.progress import Progress
from chairlift.loadtest.errors import LoadTestError, ServerError
from chairlift.loadtest.servers import peers
from chairlift.loadtest.servers.child import ChildServer, exit_on_sigterm

MIN_RATIO = 0.85
START_LIMIT = 180.0
PATIENCE = 600.0
# Replies of this schema are much longer than ``--tokens``.
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["lift", "gondola", "cable car"]},
            "seats": {"type": "integer", "minimum": 1, "maximum": 200},
            "open": {"type": "boolean"},
            "notes": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": ["name", "kind", "seats", "open"],
        "additionalProperties": False,
    },
}


class Batch(NamedTuple):
    """Tokens per second: of all rows of a batch together, and of one free row."""

    total: float
    free_row: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Medians over all rounds, in tokens per second; a ratio compares the batches of one round."""

    free_total: float
    mixed_total: float
    total_ratio: float
    free_row_ratio: float

    @classmethod
    def from_batches(cls, free: Sequence[Batch], mixed: Sequence[Batch]) -> Costs:
        pairs = list(zip(free, mixed, strict=True))
        return cls(
            statistics.median(batch.total for batch in free),
            statistics.median(batch.total for batch in mixed),
            statistics.median(m.total / f.total for f, m in pairs),
            statistics.median(m.free_row / f.free_row for f, m in pairs),
        )

    @property
    def passed(self) -> bool:
        return min(self.total_ratio, self.free_row_ratio) >= MIN_RATIO

    def __str__(self) -> str:
        return (
            f"medians: free {self.free_total:.1f} tokens/s, mixed {self.mixed_total:.1f}; "
            f"of the rounds' ratios {self.total_ratio:.3f} x, of a free row's "
            f"{self.free_row_ratio:.3f} x (at least {MIN_RATIO})"
        )


async def measure(url: str, rows: int, tokens: int, rounds: int) -> Costs:
    """Runs ``rounds`` batches of each kind, after one warm-up batch of each.

    Raises:
        ServerError: a request failed, or ended with too few tokens.
    """
    free: list[Batch] = []
    mixed: list[Batch] = []
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        Progress(2 * (rounds + 1), "structured", unit="batches") as progress,
    ):
        for number in range(rounds + 1):
            # The kinds take turns in going first, so that a drift affects both.
            for batches, constrained in ((free, 0), (mixed, rows // 2))[:: 1 if number % 2 else -1]:
                batch = await _batch(http, url, rows, constrained, tokens, number)
                progress.add_done()
                if number:
                    batches.append(batch)
    return Costs.from_batches(free, mixed)


async def _batch(
    http: aiohttp.ClientSession, url: str, rows: int, constrained: int, tokens: int, number: int
) -> Batch:
    async def one(row: int) -> float:
        body: dict[str, Any] = {
            "prompt": f"Chairlift {row} of the valley, described in full:",
            "max_tokens": tokens,
            "temperature": 1.0,
            "top_p": 1.0,
            "seed": 1000 * number + row,
            "ignore_eos": True,
        }
        if row < constrained:
            body["structured_outputs"] = {"json": SCHEMA}
        start = time.perf_counter()
        async with http.post(f"{url}/v1/completions", json=body) as response:
            reply: Any = await response.json()
        if response.status != 200 or reply["usage"]["completion_tokens"] != tokens:
            raise ServerError(f"a request failed: {str(reply)[:500]}")
        return time.perf_counter() - start

    start = time.perf_counter()
    seconds = await asyncio.gather(*map(one, range(rows)))
    duration = time.perf_counter() - start
    return Batch(rows * tokens / duration, tokens / statistics.mean(seconds[constrained:]))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = CommandParser(prog="python -m chairlift.loadtest.structured", description=__doc__)
    parser.add_argument(
        "--model",
        type=Path,
        default=Path(DEFAULT_MODEL),
        help="the model to serve (default: %(default)s)",
    )
    parser.add_argument(
        "--rows", type=int, default=16, help="concurrent requests of a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=128,
        help="output tokens of each request (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="measured pairs of batches (default: %(default)s)"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result as JSON")
    given = parser.parse_args(argv)
    if given.rows < 2 or min(given.tokens, given.rounds) < 1:
        parser.error("--rows must be at least 2, and --tokens and --rounds 1")
    exit_on_sigterm()
    spec = peers.ours(given.model)
    try:
        with ChildServer(spec, START_LIMIT):
            measuring = measure(spec.base_url, given.rows, given.tokens, given.rounds)
            costs = uvloop.run(measuring)
    except (LoadTestError, aiohttp.ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("structured: interrupted", file=sys.stderr)
        return 130
    print(costs)
    if given.json is not None:
        given.json.write_text(json.dumps(asdict(costs), indent=2) + "\n")
    return 0 if costs.passed else 1


if __name__ == "__main__":
    sys.exit(main())
