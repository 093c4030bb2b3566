"""Writes docs/reference/defaults.md from the device profiles.

``python -m chairlift.engine.device.reference > docs/reference/defaults.md``
"""

from __future__ import annotations

import argparse
import inspect
import re
from dataclasses import fields

from chairlift.engine.device.profile import CPU, CUDA, METAL, DeviceProfile

_HEAD = """\
# Defaults by device

Generated from `engine/device/profile.py` by `python -m chairlift.engine.device.reference`; a test
compares this page with the code. Metal's values are reasoned, not measured.

A flag wins over these values: `--max-rows` over `max_rows`, `--max-step-ms` over `step_seconds`
and `step_stretch`. Without `--max-step-tokens` a step computes at most `max_rows` and
`chunk_tokens` tokens together. Without `--kv-memory`, KV cache and prefix cache together take
`kv_share` of the free memory, less what a step needs; the prefix cache is a quarter of that. With
`--kv-memory`, the prefix cache gets a third of it on top.
"""
_BYTES = re.compile(r"_bytes$")


def page() -> str:
    """The whole page, in Markdown."""
    meanings = _meanings()
    lines = [_HEAD, "| setting | CPU | CUDA | Metal | meaning |", "|---|---|---|---|---|"]
    for field in fields(DeviceProfile):
        if field.name == "kind":
            continue
        values = [_text(field.name, getattr(profile, field.name)) for profile in (CPU, CUDA, METAL)]
        lines.append(f"| `{field.name}` | {' | '.join(values)} | {meanings[field.name]} |")
    return "\n".join(lines) + "\n"


def _meanings() -> dict[str, str]:
    """The attributes' descriptions, out of the docstring of ``DeviceProfile``."""
    _, _, attributes = (inspect.getdoc(DeviceProfile) or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.replace("``", "`").split()) for name, text in found}


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) and _BYTES.search(name) and value:
        return f"{value >> 30} GiB" if value % (1 << 30) == 0 else f"{value >> 20} MiB"
    return str(value)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(page(), end="")
