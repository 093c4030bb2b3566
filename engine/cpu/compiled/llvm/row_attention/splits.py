"""Long rows: threads share the columns of a tile, and one adds up their results; see ``kernel``."""

from __future__ import annotations

from chairlift.engine.cpu.compiled.llvm.row_attention.block import BLOCK

# Columns of a tile. The first ones wait for memory, all others are prefetched.
SPLIT = 8 * BLOCK
# A split's result for a query has the highest score and the sum of weights, beside sums of values.
BESIDE = 2

# Keeps the results of a tile that is one of several splits. The part that ends last goes on to
# ``write`` with the results of all, the others to ``end``.
MERGED = f"""computed:
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
