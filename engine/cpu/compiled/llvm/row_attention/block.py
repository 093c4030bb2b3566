"""One block of columns of a tile: scores, weights, and sums of values; see ``kernel``."""

from __future__ import annotations

from chairlift.engine.cpu.compiled.llvm.attention import WIDE, queries
from chairlift.engine.cpu.compiled.llvm.softmax import transpose

# Columns of a block: a tile's scores of a block, and its values, stay in the L1 or L2 cache.
BLOCK = 128

# The softmax of each query's scores. Scores of columns that it does not see get the weight 0.
_WEIGHTS = f"""weigh:
  %n = phi i64 [0, %score], [%n_next, %bounded]
  %n_token = udiv i64 %n, %group
  %n_seen = add i64 %seen, %n_token
  %n_left = sub i64 %n_seen, %b
  %n_so = mul i64 %n, {BLOCK}
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
"""

_NEXT = """block_end:
  %b_next = add i64 %b, %count
  %b_more = icmp ult i64 %b_next, %columns
  br i1 %b_more, label %block, label %computed
"""


def functions(lanes: int, most: int, kind: str) -> list[str]:
    """The functions that blocks of a type of keys and values call."""
    products = [transpose(lanes, kind), queries(f"scores_{kind}", most)]
    return products if kind == "float" else [*products, queries(f"values_{kind}", most)]


def blocks(lanes: int, kind: str) -> str:
    """The loop over the blocks of a tile, from the label ``block`` to a jump to ``computed``."""
    panel = WIDE * lanes
    return _columns(kind) + _scores(panel, kind) + _WEIGHTS + _sums(panel, kind) + _NEXT


def _columns(kind: str) -> str:
    """Finds the block's columns, which end where the row's last column is in memory."""
    return f"""block:
  %b = phi i64 [%split_begin, %begun], [%b_next, %block_end]
  %left = sub i64 %columns, %b
  %unwrapped = add i64 %start, %b
  %wraps = icmp uge i64 %unwrapped, %ring
  %turned = sub i64 %unwrapped, %ring
  %at = select i1 %wraps, i64 %turned, i64 %unwrapped
  %run = sub i64 %ring, %at
  %fit = call i64 @llvm.umin.i64(i64 %run, i64 {BLOCK})
  %count = call i64 @llvm.umin.i64(i64 %left, i64 %fit)
  %bo = mul i64 %at, %kc
  %kb = getelementptr {kind}, ptr %k, i64 %bo
  br label %panel
"""


def _scores(panel: int, kind: str) -> str:
    """Multiplies the queries by the keys, a panel of columns at a time."""
    return f"""panel:
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
      i64 %line_size, i64 %line_size, i64 {BLOCK}, i64 {panel}, i1 1, ptr %v_fetched)
  %p_next = add i64 %p, {panel}
  %p_more = icmp ult i64 %p_next, %count
  br i1 %p_more, label %panel, label %weigh
"""


def _sums(panel: int, kind: str) -> str:
    """Adds the weighted values to the sums, a panel of their numbers at a time."""
    values = "scores_float" if kind == "float" else f"values_{kind}"
    return f"""mix:
  %is_first = icmp eq i64 %b, %split_begin
  %vbo = mul i64 %at, %vc
  %vb = getelementptr {kind}, ptr %v, i64 %vbo
  %k_no = mul i64 {BLOCK}, %kc
  %k_next = getelementptr {kind}, ptr %kb, i64 %k_no
  br label %mix_panel
mix_panel:
  %d = phi i64 [0, %mix], [%d_next, %mix_panel]
  %vp = getelementptr {kind}, ptr %vb, i64 %d
  %mp = getelementptr float, ptr %mixed, i64 %d
  %k_fo = mul i64 %d, {BLOCK}
  %k_fetched = getelementptr {kind}, ptr %k_next, i64 %k_fo
  call void @products_{values}(ptr %vp, ptr %scores, ptr %mp, i64 %queries, i64 {BLOCK},
      i64 %count, i64 %width, i64 %vc, i1 %is_first, ptr %k_fetched)
  %d_next = add i64 %d, {panel}
  %d_more = icmp ult i64 %d_next, %width
  br i1 %d_more, label %mix_panel, label %block_end
"""
