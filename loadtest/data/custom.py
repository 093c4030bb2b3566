"""The data set custom: prompts from a file, as in ``vllm bench serve``."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from chairlift.loadtest.data.workload import MAX_TOKENS, WorkloadRequest
from chairlift.loadtest.errors import UsageError

# Tokens of a reply if neither flag nor file gives a number; vLLM's value.
DEFAULT_CUSTOM_OUTPUT_LEN = 256


def custom_requests(path: Path, count: int, output_len: int | None) -> list[WorkloadRequest]:
    """The first ``count`` prompts of a JSONL file of ``{"prompt": …, "output_tokens": …}``.

    A file with fewer lines is repeated. ``output_len`` overrides the lengths in the file.

    Raises:
        UsageError: the file cannot be read, is empty, or one of these lines has another format.
    """
    requests: list[WorkloadRequest] = []
    try:
        # The file may be large, so no more of it is read than needed.
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    requests.append(_parse_line(line, f"{path}:{number}", output_len))
                if len(requests) == count:
                    break
    except OSError as error:
        raise UsageError(f"--dataset-path: {error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--dataset-path: {path} is not UTF-8: {error}") from error
    if not requests:
        raise UsageError(f"--dataset-path: {path} holds no prompts")
    return list(itertools.islice(itertools.cycle(requests), count))


def _parse_line(line: str, where: str, output_len: int | None) -> WorkloadRequest:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON ({error})") from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise UsageError(f'{where}: no "prompt" text')
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f'{where}: the "prompt" cannot be sent: {error.reason}') from error
    num_tokens = output_len or entry.get("output_tokens", DEFAULT_CUSTOM_OUTPUT_LEN)
    if type(num_tokens) is not int or not 1 <= num_tokens <= MAX_TOKENS:
        raise UsageError(f'{where}: "output_tokens" must be a whole number from 1 to {MAX_TOKENS}')
    # Words approximate tokens until the server's usage gives the number.
    return WorkloadRequest(prompt, len(prompt.split()), num_tokens)
