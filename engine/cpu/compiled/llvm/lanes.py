"""Registers that have the same number in all lanes, in LLVM's language."""

from __future__ import annotations

import struct


def number(value: float) -> str:
    """A float32 in LLVM's notation, which has the digits of a double."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return f"0x{struct.pack('>d', rounded).hex().upper()}"


def splat(value: float, lanes: int, kind: str = "float") -> str:
    """A register of equal numbers, of float32 or a type of integers."""
    text = number(value) if kind == "float" else f"{value}"
    return "<" + ", ".join([f"{kind} {text}"] * lanes) + ">"


def spread(name: str, value: str, lanes: int, kind: str = "float") -> str:
    """``name``: a register that has the number ``value`` in all lanes."""
    vector = f"<{lanes} x {kind}>"
    return (
        f"{name}.first = insertelement {vector} poison, {kind} {value}, i32 0\n"
        f"  {name} = shufflevector {vector} {name}.first, {vector} poison, "
        f"<{lanes} x i32> zeroinitializer\n"
    )
