"""Attention of rows with any numbers of new tokens, in LLVM's language; see ``llvm.kernel``.

A part of a call is a *tile*: a few tokens of a row, with the queries of all heads that share a key
head. The columns that the tile sees are read in blocks. A block's keys are
transposed, so that functions like those for products with weights compute the scores. A softmax
that goes on from block to block turns them into weights, and the same functions sum the values.
While scores are computed, the values of their columns are prefetched, and while values are summed,
the next block's keys. Otherwise computing and reading would take turns.

Threads share the columns of a long row: a tile has at most ``SPLIT`` of them. The part that ends
last adds up the results of all tiles of its tokens and head, in the order of their columns.

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

from chairlift.engine.cpu.compiled.llvm.attention import WIDE, queries
from chairlift.engine.cpu.compiled.llvm.jobs import shared
from chairlift.engine.cpu.compiled.llvm.lanes import number
from chairlift.engine.cpu.compiled.llvm.softmax import (
    LEAST,
    capping,
    exponential,
    merging,
    softmax,
    tangent,
    transpose,
)

# The functions, by the type of keys and values.
_FUNCTIONS = {"float": "rows", "half": "rows_half"}
# Queries of a tile, which share the transposition of keys.
MAX_QUERIES = 48
# Integers of a tile.
TILE = 10
# Columns of a block: a tile's scores of a block, and its values, stay in the L1 or L2 cache.
_BLOCK = 128
# Columns of a tile. The first ones wait for memory, all others are prefetched.
SPLIT = 8 * _BLOCK
# A split's result for a query has the highest score and the sum of weights, beside sums of values.
BESIDE = 2

_ARGUMENTS = (
    "ptr %q, ptr %keys, ptr %values, ptr %out, ptr %tiles, ptr %sinks, ptr %cap, "
    "i64 %heads, i64 %key_heads, i64 %dim, i64 %width, i64 %ring, i64 %kr, i64 %kh, i64 %kc, "
    "i64 %vr, i64 %vh, i64 %vc, i64 %latent"
)

# The part of ``_tile`` that keeps a split's results, and merges those of all splits.
_MERGED = f"""computed:
  %is_whole = icmp eq i64 %splits, 1
  br i1 %is_whole, label %write, label %keep
keep:
  %kept_at = getelementptr i64, ptr %tile, i64 8
  %kept = load ptr, ptr %kept_at, align 8
  %counter_at = getelementptr i64, ptr %tile, i64 9
  %counter = load ptr, ptr %counter_at, align 8
  %beside = mul i64 %queries, {BESIDE}
  %kept_size = add i64 %m_size, %beside
  %split = udiv i64 %split_begin, {SPLIT}
  %split_o = mul i64 %split, %kept_size
  %own_kept = getelementptr float, ptr %kept, i64 %split_o
  %own_highest = getelementptr float, ptr %own_kept, i64 %m_size
  %own_sums = getelementptr float, ptr %own_highest, i64 %queries
  %mixed_bytes = mul i64 %m_size, 4
  %query_bytes = mul i64 %queries, 4
  call void @llvm.memcpy.p0.p0.i64(ptr %own_kept, ptr %mixed, i64 %mixed_bytes, i1 0)
  call void @llvm.memcpy.p0.p0.i64(ptr %own_highest, ptr %highest, i64 %query_bytes, i1 0)
  call void @llvm.memcpy.p0.p0.i64(ptr %own_sums, ptr %sums, i64 %query_bytes, i1 0)
  %ended = atomicrmw add ptr %counter, i64 1 acq_rel
  %others = sub i64 %splits, 1
  %is_last = icmp eq i64 %ended, %others
  br i1 %is_last, label %gather, label %end
gather:
  store i64 0, ptr %counter, align 8
  %f_highest = getelementptr float, ptr %kept, i64 %m_size
  %f_sums = getelementptr float, ptr %f_highest, i64 %queries
  call void @llvm.memcpy.p0.p0.i64(ptr %mixed, ptr %kept, i64 %mixed_bytes, i1 0)
  call void @llvm.memcpy.p0.p0.i64(ptr %highest, ptr %f_highest, i64 %query_bytes, i1 0)
  call void @llvm.memcpy.p0.p0.i64(ptr %sums, ptr %f_sums, i64 %query_bytes, i1 0)
  br label %merge
merge:
  %g = phi i64 [1, %gather], [%g_next, %merge]
  %g_o = mul i64 %g, %kept_size
  %g_kept = getelementptr float, ptr %kept, i64 %g_o
  call void @merge(ptr %mixed, ptr %highest, ptr %sums, ptr %g_kept, i64 %queries, i64 %width)
  %g_next = add i64 %g, 1
  %g_more = icmp ult i64 %g_next, %splits
  br i1 %g_more, label %merge, label %write
"""


def source(lanes: int, most: int) -> str:
    """Both functions, for registers of ``lanes`` numbers and up to ``most`` sums each."""
    parts = ["declare i64 @llvm.umin.i64(i64, i64)", exponential(lanes), tangent(lanes)]
    parts += [capping(lanes), softmax(lanes), merging(lanes)]
    parts += ["declare i64 @llvm.smax.i64(i64, i64)"]
    parts += ["declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)"]
    for kind, function in _FUNCTIONS.items():
        passed = f"call void @attend_tile_{kind}({_ARGUMENTS}, i64 %part)\nbr label %part_end"
        parts += [transpose(lanes, kind), queries(f"scores_{kind}", most)]
        if kind != "float":
            parts.append(queries(f"values_{kind}", most))
        parts += [_tile(WIDE * lanes, kind), shared(function, _ARGUMENTS, passed)]
    return "\n".join(parts)


def _tile(panel: int, kind: str) -> str:
    """The function that computes one tile of keys and values of a type."""
    values = "scores_float" if kind == "float" else f"values_{kind}"
    return f"""
define internal void @attend_tile_{kind}({_ARGUMENTS}, i64 %part) {{
entry:
  %tile = getelementptr [{TILE} x i64], ptr %tiles, i64 %part
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
  %kro = mul i64 %row, %kr
  %kho = mul i64 %head, %kh
  %ko = add i64 %kro, %kho
  %k = getelementptr {kind}, ptr %keys, i64 %ko
  %vro = mul i64 %row, %vr
  %vho = mul i64 %head, %vh
  %vo = add i64 %vro, %vho
  %v = getelementptr {kind}, ptr %values, i64 %vo
  %line_size = add i64 %dim, %latent
  %is_latent = icmp ne i64 %latent, 0
  %q_size = mul i64 %queries, %line_size
  %own = alloca float, i64 %q_size, align 64
  %s_size = mul i64 %queries, {_BLOCK}
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
copy:
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
begin:
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
block:
  %b = phi i64 [%split_begin, %begun], [%b_next, %block_end]
  %left = sub i64 %columns, %b
  %unwrapped = add i64 %start, %b
  %wraps = icmp uge i64 %unwrapped, %ring
  %turned = sub i64 %unwrapped, %ring
  %at = select i1 %wraps, i64 %turned, i64 %unwrapped
  %run = sub i64 %ring, %at
  %fit = call i64 @llvm.umin.i64(i64 %run, i64 {_BLOCK})
  %count = call i64 @llvm.umin.i64(i64 %left, i64 %fit)
  %bo = mul i64 %at, %kc
  %kb = getelementptr {kind}, ptr %k, i64 %bo
  br label %panel
panel:
  %p = phi i64 [0, %block], [%p_next, %score]
  %po = mul i64 %p, %kc
  %kp = getelementptr {kind}, ptr %kb, i64 %po
  %wide = sub i64 %count, %p
  call void @transpose_{kind}(ptr %kp, ptr %transposed, i64 %dim, i64 %kc, i64 %wide)
  %sp = getelementptr float, ptr %scores, i64 %p
  %v_column = add i64 %at, %p
  %v_fo = mul i64 %v_column, %vc
  %v_fetched = getelementptr {kind}, ptr %v, i64 %v_fo
  br i1 %is_latent, label %share, label %score
share:
  call void @transpose_{kind}(ptr %v_fetched, ptr %transposed_values, i64 %latent, i64 %vc,
                              i64 %wide)
  br label %score
score:
  call void @products_scores_{kind}(ptr %transposed, ptr %own, ptr %sp, i64 %queries,
      i64 %line_size, i64 %line_size, i64 {_BLOCK}, i64 {panel}, i1 1, ptr %v_fetched)
  %p_next = add i64 %p, {panel}
  %p_more = icmp ult i64 %p_next, %count
  br i1 %p_more, label %panel, label %weigh
weigh:
  %n = phi i64 [0, %score], [%n_next, %bounded]
  %n_token = udiv i64 %n, %group
  %n_seen = add i64 %seen, %n_token
  %n_left = sub i64 %n_seen, %b
  %n_so = mul i64 %n, {_BLOCK}
  %n_s = getelementptr float, ptr %scores, i64 %n_so
  %n_high = getelementptr float, ptr %highest, i64 %n
  %n_sum = getelementptr float, ptr %sums, i64 %n
  %n_mo = mul i64 %n, %width
  %n_mixed = getelementptr float, ptr %mixed, i64 %n_mo
  %n_limit = call i64 @llvm.smax.i64(i64 %n_left, i64 0)
  %n_visible = call i64 @llvm.umin.i64(i64 %n_limit, i64 %count)
  br i1 %has_cap, label %bound, label %bounded
bound:
  %cap_number = load float, ptr %cap, align 4
  call void @bound(ptr %n_s, i64 %count, float %cap_number)
  br label %bounded
bounded:
  call void @softmax(ptr %n_s, i64 %n_visible, i64 %count, ptr %n_high, ptr %n_sum, ptr %n_mixed,
                     i64 %width)
  %n_next = add i64 %n, 1
  %n_more = icmp ult i64 %n_next, %queries
  br i1 %n_more, label %weigh, label %mix
mix:
  %is_first = icmp eq i64 %b, %split_begin
  %vbo = mul i64 %at, %vc
  %vb = getelementptr {kind}, ptr %v, i64 %vbo
  %k_no = mul i64 {_BLOCK}, %kc
  %k_next = getelementptr {kind}, ptr %kb, i64 %k_no
  br label %mix_panel
mix_panel:
  %d = phi i64 [0, %mix], [%d_next, %mix_panel]
  %vp = getelementptr {kind}, ptr %vb, i64 %d
  %mp = getelementptr float, ptr %mixed, i64 %d
  %k_fo = mul i64 %d, {_BLOCK}
  %k_fetched = getelementptr {kind}, ptr %k_next, i64 %k_fo
  call void @products_{values}(ptr %vp, ptr %scores, ptr %mp, i64 %queries, i64 {_BLOCK},
      i64 %count, i64 %width, i64 %vc, i1 %is_first, ptr %k_fetched)
  %d_next = add i64 %d, {panel}
  %d_more = icmp ult i64 %d_next, %width
  br i1 %d_more, label %mix_panel, label %block_end
block_end:
  %b_next = add i64 %b, %count
  %b_more = icmp ult i64 %b_next, %columns
  br i1 %b_more, label %block, label %computed
{_MERGED}write:
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
end:
  ret void
}}
"""
