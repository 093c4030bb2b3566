"""The products of attention, in LLVM's language; see ``llvm.kernel``, which compiles them.

Each part of a call is the product of one row and key head: ``[m, k]``, the few queries of the head,
by ``[k, n]`` in the KV cache. ``transposed`` reads the second matrix by its columns, which are
contiguous: the scores of keys. ``plain`` reads it by its rows: the sums of values.

Arguments, before those of all functions: the addresses of the first matrices
``[parts, m, k]``, of the second ones, and of the results ``[parts, m, n]``; m, k, n, the heads of a
row; then the numbers from one row of heads, one head, and one column (``plain``: row) to the next
in the second matrices.
"""

from __future__ import annotations

from chairlift.engine.cpu.compiled.llvm.jobs import shared

# Registers of the second matrix that ``plain`` has at a time, and of a panel.
WIDE = 2

_ARGUMENTS = (
    "ptr %a, ptr %b, ptr %c, i64 %m, i64 %k, i64 %n, i64 %heads, i64 %row_step, i64 %head_step, "
    "i64 %step"
)


def source(lanes: int, most: int) -> str:
    """Both functions, for registers of ``lanes`` numbers and up to ``most`` sums each."""
    columns = [_columns(lanes, count) for count in range(1, most + 1)]
    scores = (
        "call void @columns_{count}(ptr %aq, ptr %bp, ptr %cq, i64 %k, i64 %n, i64 %step)\n"
        "br label %queries_end"
    )
    sums = f"""br label %panel{{count}}
panel{{count}}:
  %o{{count}} = phi i64 [0, %tile{{count}}], [%on{{count}}, %panel{{count}}]
  %bo{{count}} = getelementptr float, ptr %bp, i64 %o{{count}}
  %co{{count}} = getelementptr float, ptr %cq, i64 %o{{count}}
  call void @float_{{count}}(ptr %bo{{count}}, ptr %aq, ptr %co{{count}}, i64 %k, i64 %k, i64 %n,
                             i64 %step, i1 1)
  %on{{count}} = add i64 %o{{count}}, {WIDE * lanes}
  %om{{count}} = icmp ult i64 %on{{count}}, %n
  br i1 %om{{count}}, label %panel{{count}}, label %queries_end"""
    vector = f"<{lanes} x float>"
    declared = f"declare float @llvm.vector.reduce.fadd.v{lanes}f32(float, {vector})"
    products = [_product("transposed", scores, most), _product("plain", sums, most)]
    return "\n".join([declared, *columns, *products])


def _product(name: str, tile: str, most: int) -> str:
    tiles = "\n".join(f"tile{n}:\n" + tile.format(count=n) for n in range(1, most + 1))
    cases = " ".join(f"i64 {count}, label %tile{count}" for count in range(1, most))
    body = f"""
  %row = udiv i64 %part, %heads
  %head = urem i64 %part, %heads
  %ro = mul i64 %row, %row_step
  %ho = mul i64 %head, %head_step
  %b_offset = add i64 %ro, %ho
  %bp = getelementptr float, ptr %b, i64 %b_offset
  %first_query = mul i64 %part, %m
  br label %queries
queries:
  %q = phi i64 [0, %work], [%q_next, %queries_end]
  %query = add i64 %first_query, %q
  %a_offset = mul i64 %query, %k
  %aq = getelementptr float, ptr %a, i64 %a_offset
  %c_offset = mul i64 %query, %n
  %cq = getelementptr float, ptr %c, i64 %c_offset
  %rest = sub i64 %m, %q
  switch i64 %rest, label %tile{most} [ {cases} ]
{tiles}
queries_end:
  %q_next = add i64 %q, {most}
  %q_more = icmp ult i64 %q_next, %m
  br i1 %q_more, label %queries, label %part_end
"""
    return shared(name, _ARGUMENTS, body)


def _columns(lanes: int, count: int) -> str:
    """A function that multiplies ``count`` queries by all columns."""
    vector = f"<{lanes} x float>"
    queries = range(count)
    lines = [
        f"define internal void @columns_{count}(ptr %a, ptr %b, ptr %c, i64 %k, i64 %n, "
        "i64 %step) {",
        "entry:",
    ]
    for query in queries:
        lines += [
            f"%ao{query} = mul i64 %k, {query}",
            f"%a{query} = getelementptr float, ptr %a, i64 %ao{query}",
            f"%co{query} = mul i64 %n, {query}",
            f"%c{query} = getelementptr float, ptr %c, i64 %co{query}",
        ]
    lines += [
        "br label %column",
        "column:",
        "%t = phi i64 [0, %entry], [%t_next, %column_end]",
        "%bo = mul i64 %t, %step",
        "%bt = getelementptr float, ptr %b, i64 %bo",
        "br label %inner",
        "inner:",
        "%d = phi i64 [0, %column], [%d_next, %inner]",
    ]
    for query in queries:
        lines.append(f"%s{query} = phi {vector} [zeroinitializer, %column], [%n{query}, %inner]")
    lines += [
        "%bd = getelementptr float, ptr %bt, i64 %d",
        f"%w = load {vector}, ptr %bd, align 4",
    ]
    for query in queries:
        lines += [
            f"%ad{query} = getelementptr float, ptr %a{query}, i64 %d",
            f"%x{query} = load {vector}, ptr %ad{query}, align 4",
            f"%n{query} = call {vector} @llvm.fma.v{lanes}f32({vector} %x{query}, {vector} %w, "
            f"{vector} %s{query})",
        ]
    lines += [
        f"%d_next = add i64 %d, {lanes}",
        "%d_more = icmp ult i64 %d_next, %k",
        "br i1 %d_more, label %inner, label %column_end",
        "column_end:",
    ]
    for query in queries:
        lines += [
            f"%sum{query} = call reassoc float @llvm.vector.reduce.fadd.v{lanes}f32("
            f"float -0.0, {vector} %n{query})",
            f"%ct{query} = getelementptr float, ptr %c{query}, i64 %t",
            f"store float %sum{query}, ptr %ct{query}, align 4",
        ]
    lines += [
        "%t_next = add i64 %t, 1",
        "%t_more = icmp ult i64 %t_next, %n",
        "br i1 %t_more, label %column, label %end",
        "end:",
        "ret void",
        "}",
    ]
    return "\n".join(lines)


def queries(kind: str, most: int) -> str:
    """A function that multiplies all of a tile's queries by one panel; see ``llvm.kernel``."""
    tiles = "\n".join(
        f"tile{count}:\n"
        f"call void @{kind}_{count}(ptr %w, ptr %xq, ptr %yq, i64 %inputs, i64 %count, "
        "i64 %stride, i64 %step, i1 %first, ptr %fetched)\n"
        "br label %next"
        for count in range(1, most + 1)
    )
    cases = " ".join(f"i64 {count}, label %tile{count}" for count in range(1, most))
    return f"""
define internal void @products_{kind}(ptr %w, ptr %x, ptr %y, i64 %queries, i64 %inputs, i64 %count,
                                    i64 %stride, i64 %step, i1 %first, ptr %fetched) {{
entry:
  br label %loop
loop:
  %n = phi i64 [0, %entry], [%n_next, %next]
  %xo = mul i64 %n, %inputs
  %xq = getelementptr float, ptr %x, i64 %xo
  %yo = mul i64 %n, %stride
  %yq = getelementptr float, ptr %y, i64 %yo
  %rest = sub i64 %queries, %n
  switch i64 %rest, label %tile{most} [ {cases} ]
{tiles}
next:
  %n_next = add i64 %n, {most}
  %more = icmp ult i64 %n_next, %queries
  br i1 %more, label %loop, label %end
end:
  ret void
}}
"""
