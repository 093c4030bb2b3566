"""Types of flags whose values are lists, for argparse's ``type``."""

from __future__ import annotations

import argparse
import json


def api_keys(text: str) -> list[str]:
    """Parses API keys with commas between them. The error does not repeat them."""
    keys = [key for part in text.split(",") if (key := part.strip())]
    if not keys:
        # Otherwise --api-key "$UNSET" would start a server that needs no key.
        raise argparse.ArgumentTypeError("is empty")
    return keys


def origins(text: str) -> list[str]:
    """Parses origins of web pages: a JSON list, as vLLM takes, or with commas between them."""
    if not text.lstrip().startswith("["):
        return [origin for part in text.split(",") if (origin := part.strip())]
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, list) or not all(isinstance(item, str) for item in parsed):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of strings")
    return parsed


# Types whose values are lists; a repeated flag's lists are joined.
LIST_TYPES = (api_keys, origins)
