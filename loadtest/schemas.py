"""``python -m chairlift.loadtest.schemas``: validates replies to random JSON schemas.

It sends ``--count`` schemas to a server, ``--concurrency`` at a time, and validates every reply
with the package jsonschema. Without ``--url`` it serves the default model on the loopback
interface. The exit code is 1 unless all replies are complete and valid.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.engine.config import DEFAULT_MODEL
from chairlift.loadtest.bench.files import output_file
from chairlift.loadtest.bench.progress import Progress
from chairlift.loadtest.errors import LoadTestError, UsageError
from chairlift.loadtest.random_schemas import Schema, random_schema
from chairlift.loadtest.servers import peers
from chairlift.loadtest.servers.child import ChildServer, exit_on_sigterm

START_LIMIT = 180.0
PATIENCE = 600.0
MAX_TOKENS = 1500
_SHOWN_CHARS = 400


@dataclass(slots=True)
class SchemaReport:
    """The results.

    Attributes:
        replies: the number of replies.
        tokens: their output tokens.
        seconds: the duration.
        cut: replies that max_tokens cut off.
        failures: the faults of invalid replies.
    """

    replies: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cut: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        good = self.replies - len(self.failures)
        return (
            f"{good} of {self.replies} replies are valid ({self.cut} were cut by max_tokens), "
            f"{self.tokens} tokens in {self.seconds:.0f} s"
        )


async def try_schemas(
    url: str, count: int, concurrency: int, seed: int, shown: bool = True
) -> SchemaReport:
    """Requests a reply to each of ``count`` random schemas and validates it.

    Args:
        url: the server's address.
        count: the number of schemas.
        concurrency: maximum requests in flight.
        seed: the seed of the schemas and of sampling.
        shown: whether to show progress.
    """
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(count)]
    report = SchemaReport()
    slots = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    start = time.perf_counter()
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        Progress(count, "schemas", shown=shown) as progress,
    ):

        async def ask(number: int, schema: Schema) -> None:
            async with slots:
                await _ask(http, url, schema, seed + number, report)
            progress.add_done()

        await asyncio.gather(*(ask(number, schema) for number, schema in enumerate(schemas)))
    report.seconds = time.perf_counter() - start
    return report


async def _ask(
    http: aiohttp.ClientSession, url: str, schema: Schema, seed: int, report: SchemaReport
) -> None:
    body = {
        "messages": [{"role": "user", "content": "Make up an example, as JSON."}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "example", "schema": schema, "strict": True},
        },
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": MAX_TOKENS,
        "seed": seed,
    }
    report.replies += 1
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        reply: Any = await response.json()
        if response.status != 200:
            report.failures.append(f"{response.status}: {reply}: {json.dumps(schema)}")
            return
    (choice,) = reply["choices"]
    report.tokens += reply["usage"]["completion_tokens"]
    report.cut += choice["finish_reason"] == "length"
    if problem := _problem(choice["message"]["content"], schema):
        content = choice["message"]["content"][:_SHOWN_CHARS]
        report.failures.append(f"{problem}: {content!r}: {json.dumps(schema)}")


def _problem(text: str, schema: Schema) -> str | None:
    """Describes why a reply is invalid; None if it is valid."""
    from jsonschema import Draft202012Validator

    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    checker = Draft202012Validator.FORMAT_CHECKER
    problems = Draft202012Validator(schema, format_checker=checker).iter_errors(value)
    first = next(problems, None)
    return None if first is None else f"not valid: {first.message}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = CommandParser(prog="python -m chairlift.loadtest.schemas", description=__doc__)
    parser.add_argument("--url", help="address of a running server (default: start one)")
    parser.add_argument(
        "--model",
        type=Path,
        default=Path(DEFAULT_MODEL),
        help="the model to serve (default: %(default)s)",
    )
    parser.add_argument(
        "--count", type=int, default=200, help="schemas to send (default: %(default)s)"
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=16,
        help="requests at the same time (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random schemas (default: %(default)s)"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result as JSON")
    given = parser.parse_args(argv)
    exit_on_sigterm()
    try:
        try:
            import jsonschema  # noqa: F401
        except ImportError:
            raise UsageError("needs the package jsonschema: pip install jsonschema") from None
        spec = peers.ours(given.model)
        with nullcontext() if given.url else ChildServer(spec, START_LIMIT):
            trying = try_schemas(
                given.url or spec.base_url, given.count, given.concurrency, given.seed
            )
            report = uvloop.run(trying)
    except (LoadTestError, aiohttp.ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("schemas: interrupted", file=sys.stderr)
        return 130
    for failure in report.failures:
        print(failure, file=sys.stderr)
    print(report)
    if given.json is not None:
        given.json.write_text(json.dumps(asdict(report), indent=2) + "\n")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
