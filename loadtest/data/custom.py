"""The custom data set: prompts out of a file, as in ``vllm bench serve``."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from chairlift.loadtest.data.workload import Request
from chairlift.loadtest.errors import UsageError

# As vLLM's: the length of a reply where neither flag nor file gives one.
DEFAULT_CUSTOM_OUTPUT_LEN = 256


def custom_requests(path: Path, count: int, output_len: int | None) -> list[Request]:
    """The first ``count`` prompts of a JSONL file of ``{"prompt": …, "output_tokens": …}``.

    A file with fewer lines is gone through again. ``output_len`` overrides the file's own.

    Raises:
        UsageError: the file cannot be read, is empty, or a line is not as above.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--dataset-path: {error}") from error
    requests = [
        _parse_line(line, f"{path}:{number}", output_len)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not requests:
        raise UsageError(f"--dataset-path: {path} holds no prompts")
    return list(itertools.islice(itertools.cycle(requests), count))


def _parse_line(line: str, where: str, output_len: int | None) -> Request:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON ({error})") from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise UsageError(f'{where}: no "prompt" text')
    wanted = output_len or entry.get("output_tokens", DEFAULT_CUSTOM_OUTPUT_LEN)
    if not isinstance(wanted, int) or wanted < 1:
        raise UsageError(f'{where}: "output_tokens" must be a whole number of at least 1')
    # Its own words count as tokens until the server's usage tells better.
    return Request(prompt, len(prompt.split()), wanted)
