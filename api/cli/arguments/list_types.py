"""Types of flags whose values are lists, for argparse's ``type``."""

from __future__ import annotations

import argparse
import json
import re

# A number, or a name like GPU-8f0ac9a1 or MIG-....
_DEVICE = re.compile(r"[0-9]{1,3}|[A-Z]+-[0-9A-Za-z/-]{1,64}", re.ASCII)


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


def device_names(text: str) -> list[str]:
    """Parses numbers or names of CUDA devices with commas between them."""
    names = [name.strip() for name in text.split(",")]
    if not all(_DEVICE.fullmatch(name) for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of devices like 0,1")
    return names


# Types whose values are lists; a repeated flag's lists are joined.
LIST_TYPES = (api_keys, origins, device_names)
