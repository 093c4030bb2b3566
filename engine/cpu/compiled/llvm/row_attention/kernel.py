"""Attention of rows with any numbers of new tokens, in LLVM's language; see ``llvm.kernel``.

A part of a call is a *tile*: a few tokens of a row, with the queries of all heads that share a key
head. The columns that the tile sees are read in blocks (``block``). A block's keys are transposed,
so that functions like those for products with weights compute the scores. A softmax that goes on
from block to block turns them into weights, and the same functions sum the values. While scores are
computed, the values of their columns are prefetched, and while values are summed, the next block's
keys. Otherwise computing and reading would take turns.

Threads share the columns of a long row: a tile has at most ``SPLIT`` of them (``splits``). The part
that ends last adds up the results of all tiles of its tokens and head, in the order of their
columns.

A token's result is identical to the last bit whichever tokens are computed beside it: blocks and
splits begin at the same columns for all tokens, and a column that a token does not see has the
weight 0.

Arguments: the addresses of the queries ``[tokens, heads, dim]``, already multiplied by the scale,
of keys and values ``[rows, key heads, columns, dim]`` (float32, or with ``rows_half`` float16), of
the result ``[tokens, heads, width]``, of the tiles, of the sinks ``[heads]`` (0: none) and of the
number that caps the scores (0: none); the numbers of heads and key heads, ``dim``, ``width``, and
the columns of a row; then, for keys and for values, the numbers from one row, one head and one
column to the next; then ``latent``, 0 or ``width``. A tile is ``TILE`` integers: its first token,
how many tokens, their row, the columns that the first of them sees, and the first of these columns
(behind the last column of a row, its first one follows); its key head; its own first column,
counted from that one, and the number of tiles of its tokens and head; if it has several, the
addresses of memory for their results and of a counter, which is 0 between calls.

With ``latent``, the values are a further part of the keys: a query has ``dim`` numbers for a key
and, behind them, ``width`` for a value.
"""

from __future__ import annotations

from chairlift.engine.cpu.compiled.llvm.attention import WIDE
from chairlift.engine.cpu.compiled.llvm.jobs import shared
from chairlift.engine.cpu.compiled.llvm.lanes import number
from chairlift.engine.cpu.compiled.llvm.row_attention.block import BLOCK, blocks, functions
from chairlift.engine.cpu.compiled.llvm.row_attention.splits import MERGED, SPLIT
from chairlift.engine.cpu.compiled.llvm.softmax import (
    LEAST,
    capping,
    exponential,
    merging,
    softmax,
    tangent,
)

# The functions, by the type of keys and values.
_FUNCTIONS = {"float": "rows", "half": "rows_half"}
# Queries of a tile, which share the transposition of keys.
MAX_QUERIES = 48
# Integers of a tile.
TILE = 10

_ARGUMENTS = (
    "ptr %q, ptr %keys, ptr %values, ptr %out, ptr %tiles, ptr %sinks, ptr %cap, "
    "i64 %heads, i64 %key_heads, i64 %dim, i64 %width, i64 %ring, i64 %kr, i64 %kh, i64 %kc, "
    "i64 %vr, i64 %vh, i64 %vc, i64 %latent"
)

# Reads the tile, and finds the queries and the columns that it has.
_READ = f"""  %tile = getelementptr [{TILE} x i64], ptr %tiles, i64 %part
  %first = load i64, ptr %tile, align 8
  %tokens_at = getelementptr i64, ptr %tile, i64 1
  %tokens = load i64, ptr %tokens_at, align 8
  %row_at = getelementptr i64, ptr %tile, i64 2
  %row = load i64, ptr %row_at, align 8
  %seen_at = getelementptr i64, ptr %tile, i64 3
  %seen = load i64, ptr %seen_at, align 8
  %start_at = getelementptr i64, ptr %tile, i64 4
  %start = load i64, ptr %start_at, align 8
  %head_at = getelementptr i64, ptr %tile, i64 5
  %head = load i64, ptr %head_at, align 8
  %begin_at = getelementptr i64, ptr %tile, i64 6
  %split_begin = load i64, ptr %begin_at, align 8
  %splits_at = getelementptr i64, ptr %tile, i64 7
  %splits = load i64, ptr %splits_at, align 8
  %given_sinks = icmp ne ptr %sinks, null
  %is_first_split = icmp eq i64 %split_begin, 0
  %has_sinks = and i1 %given_sinks, %is_first_split
  %has_cap = icmp ne ptr %cap, null
  %more_seen = add i64 %seen, %tokens
  %all_columns = sub i64 %more_seen, 1
  %split_stop = add i64 %split_begin, {SPLIT}
  %columns = call i64 @llvm.umin.i64(i64 %all_columns, i64 %split_stop)
  %group = udiv i64 %heads, %key_heads
  %queries = mul i64 %tokens, %group
"""

# Copies the queries of the tile's heads together.
_COPY = """copy:
  %t = phi i64 [0, %entry], [%t_next, %copy]
  %token = add i64 %first, %t
  %line = mul i64 %token, %heads
  %query = add i64 %line, %first_head
  %from_o = mul i64 %query, %line_size
  %from = getelementptr float, ptr %q, i64 %from_o
  %to_o = mul i64 %t, %group_dim
  %to = getelementptr float, ptr %own, i64 %to_o
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %group_bytes, i1 0)
  %t_next = add i64 %t, 1
  %t_more = icmp ult i64 %t_next, %tokens
  br i1 %t_more, label %copy, label %begin
"""

# The highest score and the sum of weights of each query, before the first block: those of its sink.
_BEGIN = f"""begin:
  %i = phi i64 [0, %copy], [%i_next, %begun]
  br i1 %has_sinks, label %sink, label %begun
sink:
  %i_head = urem i64 %i, %group
  %i_own = add i64 %first_head, %i_head
  %sink_at = getelementptr float, ptr %sinks, i64 %i_own
  %sink_score = load float, ptr %sink_at, align 4
  br label %begun
begun:
  %high = phi float [{number(LEAST)}, %begin], [%sink_score, %sink]
  %sum = phi float [0.0, %begin], [1.0, %sink]
  %high_at = getelementptr float, ptr %highest, i64 %i
  store float %high, ptr %high_at, align 4
  %sum_at = getelementptr float, ptr %sums, i64 %i
  store float %sum, ptr %sum_at, align 4
  %i_next = add i64 %i, 1
  %i_more = icmp ult i64 %i_next, %queries
  br i1 %i_more, label %begin, label %block
"""

# Divides the sums of values by those of weights.
_WRITE = """write:
  %y = phi i64 [0, %computed], [0, %merge], [%y_next, %write_end]
  %y_token = udiv i64 %y, %group
  %y_head = urem i64 %y, %group
  %y_line = add i64 %first, %y_token
  %y_heads = mul i64 %y_line, %heads
  %y_first = add i64 %y_heads, %first_head
  %y_query = add i64 %y_first, %y_head
  %y_oo = mul i64 %y_query, %width
  %y_out = getelementptr float, ptr %out, i64 %y_oo
  %y_mo = mul i64 %y, %width
  %y_mixed = getelementptr float, ptr %mixed, i64 %y_mo
  %y_sum_at = getelementptr float, ptr %sums, i64 %y
  %y_sum = load float, ptr %y_sum_at, align 4
  br label %number_loop
number_loop:
  %z = phi i64 [0, %write], [%z_next, %number_loop]
  %z_from = getelementptr float, ptr %y_mixed, i64 %z
  %z_value = load float, ptr %z_from, align 4
  %z_share = fdiv float %z_value, %y_sum
  %z_to = getelementptr float, ptr %y_out, i64 %z
  store float %z_share, ptr %z_to, align 4
  %z_next = add i64 %z, 1
  %z_more = icmp ult i64 %z_next, %width
  br i1 %z_more, label %number_loop, label %write_end
write_end:
  %y_next = add i64 %y, 1
  %y_more = icmp ult i64 %y_next, %queries
  br i1 %y_more, label %write, label %end
"""


def source(lanes: int, most: int) -> str:
    """Both functions, for registers of ``lanes`` numbers and up to ``most`` sums each."""
    parts = ["declare i64 @llvm.umin.i64(i64, i64)", exponential(lanes), tangent(lanes)]
    parts += [capping(lanes), softmax(lanes), merging(lanes)]
    parts += ["declare i64 @llvm.smax.i64(i64, i64)"]
    parts += ["declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)"]
    for kind, function in _FUNCTIONS.items():
        passed = f"call void @attend_tile_{kind}({_ARGUMENTS}, i64 %part)\nbr label %part_end"
        parts += functions(lanes, most, kind)
        parts += [_tile(lanes, kind), shared(function, _ARGUMENTS, passed)]
    return "\n".join(parts)


def _tile(lanes: int, kind: str) -> str:
    """The function that computes one tile of keys and values of a type."""
    start = [_READ, _addresses(kind), _memory(WIDE * lanes), _COPY, _BEGIN]
    parts = "".join([*start, blocks(lanes, kind), MERGED, _WRITE])
    return f"""
define internal void @attend_tile_{kind}({_ARGUMENTS}, i64 %part) {{
entry:
{parts}end:
  ret void
}}
"""


def _addresses(kind: str) -> str:
    """Finds the keys and the values of the tile's row and head."""
    return f"""  %kro = mul i64 %row, %kr
  %kho = mul i64 %head, %kh
  %ko = add i64 %kro, %kho
  %k = getelementptr {kind}, ptr %keys, i64 %ko
  %vro = mul i64 %row, %vr
  %vho = mul i64 %head, %vh
  %vo = add i64 %vro, %vho
  %v = getelementptr {kind}, ptr %values, i64 %vo
"""


def _memory(panel: int) -> str:
    """Takes memory for queries, scores and sums, and for the keys (and values) of a panel."""
    return f"""  %line_size = add i64 %dim, %latent
  %is_latent = icmp ne i64 %latent, 0
  %q_size = mul i64 %queries, %line_size
  %own = alloca float, i64 %q_size, align 64
  %s_size = mul i64 %queries, {BLOCK}
  %scores = alloca float, i64 %s_size, align 64
  %m_size = mul i64 %queries, %width
  %mixed = alloca float, i64 %m_size, align 64
  %t_size = mul i64 %line_size, {panel}
  %transposed = alloca float, i64 %t_size, align 64
  %key_size = mul i64 %dim, {panel}
  %transposed_values = getelementptr float, ptr %transposed, i64 %key_size
  %highest = alloca float, i64 %queries, align 64
  %sums = alloca float, i64 %queries, align 64
  %first_head = mul i64 %head, %group
  %group_dim = mul i64 %group, %line_size
  %group_bytes = mul i64 %group_dim, 4
  br label %copy
"""
