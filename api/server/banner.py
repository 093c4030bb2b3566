"""The lines that the log shows once the model is loaded: what is served, where, and how fast."""

from __future__ import annotations

from typing import Any

from chairlift.api.http.version import VERSION
from chairlift.engine.messages import ModelInfo


def banner_lines(name: str, info: ModelInfo, address: str, page: bool) -> list[str]:
    """The banner as at most six lines of text.

    Args:
        name: the model's id in the API.
        address: the server's address, as ``http://127.0.0.1:8000``.
        page: whether the page at ``/`` is served.
    """
    weights = f"{_size(info.weight_bytes)} of weights, {info.dtype}"
    quantized = f" with {info.kv_bits} bits" if info.kv_bits else ""
    where = f"{info.replicas} replicas on {info.device}" if info.replicas > 1 else info.device
    prefixes = _size(info.prefix_bytes) if info.prefix_bytes else "off"
    lines = [
        f"Chairlift {VERSION} serves {name} ({info.architecture}, {weights}) on {where}",
        f"  limits  context {info.max_context} tokens, {info.max_rows} rows, KV cache "
        f"{_size(info.kv_limit_bytes)}{quantized}, prefix cache {prefixes}",
        f"  API     {address}/v1",
        f"  docs    {address}/openapi.json",
    ]
    if page:
        lines.append(f"  page    {address}/")
    if info.advice:
        more = len(info.advice) - 1
        others = f" ({more} more: chairlift doctor)" if more else ""
        lines.append(f"  faster  {info.advice[0]}{others}")
    return lines


def banner_fields(name: str, info: ModelInfo, address: str, page: bool) -> dict[str, Any]:
    """The same as fields of a structured log line; sizes are bytes."""
    return {
        "version": VERSION,
        "model": name,
        "architecture": info.architecture,
        "device": info.device,
        "replicas": info.replicas,
        "dtype": info.dtype,
        "weight_bytes": info.weight_bytes,
        "max_context": info.max_context,
        "max_rows": info.max_rows,
        "kv_bytes": info.kv_limit_bytes,
        "prefix_bytes": info.prefix_bytes,
        "api": f"{address}/v1",
        "docs": f"{address}/openapi.json",
        "page": f"{address}/" if page else None,
        "advice": list(info.advice),
    }


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
