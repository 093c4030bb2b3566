"""Functions that multiply tokens by panels of weights, in LLVM's language; see ``llvm.kernel``."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from chairlift.engine.cpu.compiled.llvm import quantized
from chairlift.engine.cpu.compiled.llvm.attention import WIDE
from chairlift.engine.cpu.compiled.llvm.jobs import shared

# Inputs whose weights in a panel stay in the L1 or L2 cache while all tokens are multiplied.
_BLOCK = 1024
# Tiles of tokens up to which quantized weights are not written in float32.
_MAX_TILES = 2
# The further argument of functions for quantized weights.
_GROUP = ", i64 %group_inputs"


class Registers(NamedTuple):
    """Vector registers: the float32 numbers of each, and the tokens whose sums they hold.

    Attributes:
        quantized: the tokens, beside the scales and biases of quantized weights.
    """

    lanes: int
    tokens: int
    quantized: int

    def tokens_of(self, kind: str) -> int:
        """The tokens of a tile of this kind of weights."""
        return self.quantized if kind in quantized.BITS else self.tokens


def panels(kind: str, registers: Registers) -> str:
    """The function that takes panels until none is left; see ``llvm.kernel.Kernel``."""
    arguments = "ptr %w, ptr %x, ptr %y, i64 %tokens, i64 %inputs, i64 %stride"
    return _shared(kind, kind, arguments, _panel(kind, registers, "%part", "%x", "%y"), registers)


def groups(kind: str, registers: Registers) -> str:
    """The function that takes panels of groups until none is left; see ``llvm.kernel.Kernel``."""
    begin = f"""{find_group()}
  %gx = mul i64 %first_token, %inputs
  %xg = getelementptr float, ptr %x, i64 %gx
  %gy = mul i64 %first_token, %stride
  %yg = getelementptr float, ptr %y, i64 %gy
"""
    arguments = "ptr %w, ptr %x, ptr %y, ptr %groups, i64 %panels, i64 %inputs, i64 %stride"
    body = begin + _panel(kind, registers, "%index", "%xg", "%yg", "%panel")
    return _shared(f"{kind}_groups", kind, arguments, body, registers)


def find_group() -> str:
    """Finds the ``%tokens`` of a part's group, the first of them, and the part's ``%panel``.

    ``%index`` is the panel's number among those of all matrices.
    """
    return """
  %group = udiv i64 %part, %panels
  %panel = urem i64 %part, %panels
  %go = mul i64 %group, 3
  %g0 = getelementptr i64, ptr %groups, i64 %go
  %g1 = getelementptr i64, ptr %g0, i64 1
  %g2 = getelementptr i64, ptr %g0, i64 2
  %matrix = load i64, ptr %g0, align 8
  %first_token = load i64, ptr %g1, align 8
  %tokens = load i64, ptr %g2, align 8
  %mo = mul i64 %matrix, %panels
  %index = add i64 %mo, %panel"""


def _shared(name: str, kind: str, arguments: str, body: str, registers: Registers) -> str:
    """As ``llvm.jobs.shared``, with a buffer and a further argument for quantized weights."""
    if kind not in quantized.BITS:
        return shared(name, arguments, body)
    buffer = f"%buffer = alloca [{_BLOCK * WIDE * registers.lanes} x float], align 64"
    return shared(name, arguments + _GROUP, body, begin=buffer)


def _panel(
    kind: str, registers: Registers, panel: str, x: str, y: str, place: str = "%part"
) -> str:
    """Multiplies tokens by one panel; ends at ``%part_end``.

    If there are many tokens, quantized weights of a block become float32 first.

    Args:
        panel: the variable with the panel's number among all.
        x, y: those with the addresses of the tokens and of their results.
        place: that with the panel's number among those of the result.
    """
    outputs, most = WIDE * registers.lanes, registers.tokens
    if kind in quantized.BITS:
        begin, size_of = quantized.record_size(kind, registers.lanes), quantized.size_of
        few = _MAX_TILES * registers.quantized
        loops = f"""
  %is_few = icmp ule i64 %tokens, {few}
  br i1 %is_few, label %few, label %many
{_tokens("few", "", kind, registers.quantized, "%wb", "%record", _GROUP)}
{_tokens("many", quantized.call_expand(kind), "float", most, "%buffer", str(outputs))}"""
    else:
        begin, size_of = "", partial(_size_of, outputs)
        loops = f"""
  br label %all
{_tokens("all", "", kind, most, "%wb", str(outputs))}"""
    element = {"float": "float", "bfloat": "i16"}.get(kind, "i8")
    return f"""{begin}
  {size_of("%inputs", "%weights")}
  %wo = mul i64 {panel}, %weights
  %wp = getelementptr {element}, ptr %w, i64 %wo
  %yo = mul i64 {place}, {outputs}
  %yp = getelementptr float, ptr {y}, i64 %yo
  br label %block
block:
  %k = phi i64 [0, %work], [%k_next, %block_end]
  %first = icmp eq i64 %k, 0
  %left = sub i64 %inputs, %k
  %small = icmp ule i64 %left, {_BLOCK}
  %count = select i1 %small, i64 %left, i64 {_BLOCK}
  {size_of("%k", "%bo")}
  %wb = getelementptr {element}, ptr %wp, i64 %bo
  %xb = getelementptr float, ptr {x}, i64 %k
{loops}
block_end:
  %k_next = add i64 %k, %count
  %k_more = icmp ult i64 %k_next, %inputs
  br i1 %k_more, label %block, label %part_end
"""


def _size_of(outputs: int, inputs: str, name: str) -> str:
    """Computes the numbers of some inputs in a panel."""
    return f"{name} = mul i64 {inputs}, {outputs}"


def _tokens(
    label: str, begin: str, kind: str, most: int, weights: str, step: str, more: str = ""
) -> str:
    """Multiplies all tokens by a block of a panel; goes to ``%block_end``.

    The tokens are divided evenly: a small tile takes nearly as long as a large one.

    Args:
        label: of this code.
        begin: comes first.
        kind, most: those of the tiles.
        weights: the variable with the block's address.
        step, more: the tiles' arguments.
    """
    v = f"%{label}."
    tiles = "\n".join(
        f"{label}{tokens}:\n"
        f"  call void @{kind}_{tokens}(ptr {weights}, ptr {v}x, ptr {v}y, i64 %inputs, "
        f"i64 %count, i64 %stride, i64 {step}, i1 %first{more})\n"
        f"  br label %{label}_end"
        for tokens in range(1, most + 1)
    )
    cases = " ".join(f"i64 {tokens}, label %{label}{tokens}" for tokens in range(1, most))
    return f"""
{label}:
  {begin}
  br label %{label}_loop
{label}_loop:
  {v}t = phi i64 [0, %{label}], [{v}next, %{label}_end]
  {v}xo = mul i64 {v}t, %inputs
  {v}x = getelementptr float, ptr %xb, i64 {v}xo
  {v}yo = mul i64 {v}t, %stride
  {v}y = getelementptr float, ptr %yp, i64 {v}yo
  {v}rest = sub i64 %tokens, {v}t
  {v}rest_up = add i64 {v}rest, {most - 1}
  {v}tiles = udiv i64 {v}rest_up, {most}
  {v}others = sub i64 {v}tiles, 1
  {v}tile_up = add i64 {v}rest, {v}others
  {v}tile = udiv i64 {v}tile_up, {v}tiles
  switch i64 {v}tile, label %{label}{most} [ {cases} ]
{tiles}
{label}_end:
  {v}next = add i64 {v}t, {v}tile
  {v}more = icmp ult i64 {v}next, %tokens
  br i1 {v}more, label %{label}_loop, label %block_end
"""
