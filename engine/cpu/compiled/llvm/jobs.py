"""Jobs that several threads share, in LLVM's language.

A job is a block of 64-bit numbers: its function, the number of its parts, two numbers that say how
many parts a thread takes at a time, two counters, and the function's arguments. A function takes
parts of its job until none is left: a fraction of those that are left, so that the first are many
and the last few. Taking parts means writing to a cache line that another core has just written,
which takes as long as a small part. ``run`` publishes a job, takes parts, and returns when all
parts are finished and no other thread reads the job. ``run_all`` does so for jobs that follow
each other in memory. Another thread calls ``serve``, which takes parts of each job that is
published, and returns when none was for some time, but not while jobs of a ``run_all`` are left. A
job never waits for a thread that has not begun.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

from chairlift.engine.cpu.compiled.llvm.host_compiler import host_compiler

# Bytes of a line of the cache, on the CPUs for which the kernels were measured.
LINE_BYTES = 64
# Numbers of a job: places of its function, parts, the least parts that a thread takes, the divisor
# of those that are left (0: threads do not share the job), counters of taken and of finished parts,
# and arguments; and its size. Each counter has a cache line of its own.
FUNCTION, PARTS, LEAST, DIVISOR, TAKEN, FINISHED, ARGUMENTS, SIZE = 0, 1, 2, 3, 8, 16, 24, 56
# Numbers of the state that threads share: places of the published job, of the number of jobs that
# were published, of the threads that read one, and whether a ``run_all`` has begun; and its size.
PUBLISHED, COUNT, READERS, ACTIVE, STATE_SIZE = 0, 8, 16, 24, 32
# Pauses of a waiting thread, after which it offers its core to others.
_PATIENCE = 4096


class Pool(NamedTuple):
    """The compiled functions; all release the interpreter's lock.

    Attributes:
        run: arguments: the addresses of the state and of a job.
        run_all: arguments: the addresses of the state and of the first job, the number of jobs, and
            whether threads may share them. Each job begins when the one before it is finished.
        serve: arguments: the address of the state, the number of jobs that the thread has seen, and
            the pauses after which it returns, outside of ``run_all``. Returns the number of jobs
            that it has seen then.
    """

    run: Callable[[int, int], None]
    run_all: Callable[[int, int, int, int], None]
    serve: Callable[[int, int, int], int]


@functools.cache
def compiled() -> Pool | None:
    """The functions; None without ``llvmlite``."""
    compiler = host_compiler()
    if compiler is None:
        return None
    module = compiler.compile(_source())
    address, size = ctypes.c_void_p, ctypes.c_int64
    run: Any = ctypes.CFUNCTYPE(None, address, address)(module.address("run"))
    run_all: Any = ctypes.CFUNCTYPE(None, address, address, size, size)(module.address("run_all"))
    serve: Any = ctypes.CFUNCTYPE(size, address, size, size)(module.address("serve"))
    run.module = run_all.module = module
    return Pool(run, run_all, serve)


def shared(name: str, arguments: str, body: str, begin: str = "", end: str = "") -> str:
    """A function that takes parts of its job until none is left.

    Args:
        arguments: their types, ptr or i64, and names.
        body: computes ``%part``, and ends at ``%part_end``.
        begin, end: computed before the first part and after the last.
    """
    loads = []
    for place, argument in enumerate(arguments.split(",")):
        kind, variable = argument.split()
        at = f"{variable}.at"
        loads += [
            f"  {at} = getelementptr i64, ptr %job, i64 {ARGUMENTS + place}",
            f"  {variable} = load {kind}, ptr {at}, align 8",
        ]
    assert len(loads) // 2 <= SIZE - ARGUMENTS
    loaded = "\n".join(loads)
    return f"""
define void @{name}(ptr %job) {{
entry:
  %parts.at = getelementptr i64, ptr %job, i64 {PARTS}
  %parts = load i64, ptr %parts.at, align 8
  %least.at = getelementptr i64, ptr %job, i64 {LEAST}
  %least = load i64, ptr %least.at, align 8
  %divisor.at = getelementptr i64, ptr %job, i64 {DIVISOR}
  %divisor = load i64, ptr %divisor.at, align 8
  %is.shared = icmp ne i64 %divisor, 0
  %parts.divisor = select i1 %is.shared, i64 %divisor, i64 1
  %taken.at = getelementptr i64, ptr %job, i64 {TAKEN}
  %finished = getelementptr i64, ptr %job, i64 {FINISHED}
{loaded}
  {begin}
  %parts.begin = load atomic i64, ptr %taken.at monotonic, align 8
  br label %look
look:
  %start = phi i64 [%parts.begin, %entry], [%parts.now, %take], [%parts.later, %done]
  %computed = phi i64 [0, %entry], [%computed, %take], [%computed.next, %done]
  %parts.any = icmp ult i64 %start, %parts
  br i1 %parts.any, label %take, label %none
take:
  %parts.left = sub i64 %parts, %start
  %parts.share = udiv i64 %parts.left, %parts.divisor
  %parts.many = icmp ugt i64 %parts.share, %least
  %parts.wanted = select i1 %parts.many, i64 %parts.share, i64 %least
  %parts.fit = icmp ult i64 %parts.wanted, %parts.left
  %parts.number = select i1 %parts.fit, i64 %parts.wanted, i64 %parts.left
  %stop = add i64 %start, %parts.number
  %exchanged = cmpxchg ptr %taken.at, i64 %start, i64 %stop monotonic monotonic
  %parts.now = extractvalue {{i64, i1}} %exchanged, 0
  %parts.mine = extractvalue {{i64, i1}} %exchanged, 1
  br i1 %parts.mine, label %work, label %look
work:
  %part = phi i64 [%start, %take], [%part_next, %part_end]
{body}
part_end:
  %part_next = add i64 %part, 1
  %part_more = icmp ult i64 %part_next, %stop
  br i1 %part_more, label %work, label %done
done:
  %computed.next = add i64 %computed, %parts.number
  %parts.later = load atomic i64, ptr %taken.at monotonic, align 8
  br label %look
none:
  {end}
  %parts.some = icmp ne i64 %computed, 0
  br i1 %parts.some, label %report, label %leave
report:
  %before = atomicrmw add ptr %finished, i64 %computed acq_rel
  br label %leave
leave:
  ret void
}}
"""


def _source() -> str:
    """``run``, ``run_all`` and ``serve``."""
    if platform.machine() in ("aarch64", "arm64"):
        declared, pause = "declare void @llvm.aarch64.hint(i32)", "@llvm.aarch64.hint(i32 1)"
    else:
        declared, pause = "declare void @llvm.x86.sse2.pause()", "@llvm.x86.sse2.pause()"
    functions = [_wait(pause), _RUN, _RUN_ALL, _serve(pause)]
    return "\n".join([declared, "declare i32 @sched_yield()", *functions])


def _wait(pause: str) -> str:
    """A function that returns when a counter has reached a number."""
    return f"""
define internal void @wait(ptr %number, i64 %wanted) {{
entry:
  br label %look
look:
  %n = phi i64 [0, %entry], [%n_next, %again]
  %now = load atomic i64, ptr %number seq_cst, align 8
  %there = icmp eq i64 %now, %wanted
  br i1 %there, label %end, label %rest
rest:
  call void {pause}
  %n_next = add i64 %n, 1
  %long = icmp ugt i64 %n_next, {_PATIENCE}
  br i1 %long, label %offer, label %again
offer:
  %ignored = call i32 @sched_yield()
  br label %again
again:
  br label %look
end:
  ret void
}}
"""


# The functions ``run`` and ``run_all`` of ``Pool``.
_RUN = f"""
define void @run(ptr %state, ptr %job) {{
entry:
  %published = getelementptr i64, ptr %state, i64 {PUBLISHED}
  %count = getelementptr i64, ptr %state, i64 {COUNT}
  %readers = getelementptr i64, ptr %state, i64 {READERS}
  %parts.at = getelementptr i64, ptr %job, i64 {PARTS}
  %parts = load i64, ptr %parts.at, align 8
  %finished = getelementptr i64, ptr %job, i64 {FINISHED}
  %address = ptrtoint ptr %job to i64
  %function = load ptr, ptr %job, align 8
  store atomic i64 %address, ptr %published seq_cst, align 8
  %before = atomicrmw add ptr %count, i64 1 seq_cst
  call void %function(ptr %job)
  call void @wait(ptr %finished, i64 %parts)
  store atomic i64 0, ptr %published seq_cst, align 8
  call void @wait(ptr %readers, i64 0)
  ret void
}}
"""

_RUN_ALL = f"""
define void @run_all(ptr %state, ptr %jobs, i64 %number, i64 %may_share) {{
entry:
  %allowed = icmp ne i64 %may_share, 0
  %active = getelementptr i64, ptr %state, i64 {ACTIVE}
  br i1 %allowed, label %begin, label %next
begin:
  store atomic i64 1, ptr %active seq_cst, align 8
  br label %next
next:
  %i = phi i64 [0, %entry], [0, %begin], [%i_next, %finished]
  %place = mul i64 %i, {SIZE}
  %job = getelementptr i64, ptr %jobs, i64 %place
  %taken.at = getelementptr i64, ptr %job, i64 {TAKEN}
  store i64 0, ptr %taken.at, align 8
  %finished.at = getelementptr i64, ptr %job, i64 {FINISHED}
  store i64 0, ptr %finished.at, align 8
  %wanted.at = getelementptr i64, ptr %job, i64 {DIVISOR}
  %wanted = load i64, ptr %wanted.at, align 8
  %is_wanted = icmp ne i64 %wanted, 0
  %shared = and i1 %is_wanted, %allowed
  br i1 %shared, label %publish, label %alone
publish:
  call void @run(ptr %state, ptr %job)
  br label %finished
alone:
  %function = load ptr, ptr %job, align 8
  call void %function(ptr %job)
  br label %finished
finished:
  %i_next = add i64 %i, 1
  %more = icmp ult i64 %i_next, %number
  br i1 %more, label %next, label %all
all:
  br i1 %allowed, label %over, label %end
over:
  store atomic i64 0, ptr %active seq_cst, align 8
  br label %end
end:
  ret void
}}
"""


def _serve(pause: str) -> str:
    """The function ``serve`` of ``Pool``."""
    return f"""
define i64 @serve(ptr %state, i64 %known, i64 %pauses) {{
entry:
  %published = getelementptr i64, ptr %state, i64 {PUBLISHED}
  %count = getelementptr i64, ptr %state, i64 {COUNT}
  %readers = getelementptr i64, ptr %state, i64 {READERS}
  %active = getelementptr i64, ptr %state, i64 {ACTIVE}
  br label %look
look:
  %seen = phi i64 [%known, %entry], [%seen, %again], [%now, %left]
  %n = phi i64 [0, %entry], [%n_next, %again], [0, %left]
  %turn = phi i64 [0, %entry], [%turn_next, %again], [0, %left]
  %now = load atomic i64, ptr %count seq_cst, align 8
  %new = icmp ne i64 %now, %seen
  br i1 %new, label %enter, label %idle
idle:
  %runs = load atomic i64, ptr %active seq_cst, align 8
  %ended = icmp eq i64 %runs, 0
  %n_more = add i64 %n, 1
  %n_next = select i1 %ended, i64 %n_more, i64 0
  %over = icmp ugt i64 %n_next, %pauses
  br i1 %over, label %end, label %rest
rest:
  call void {pause}
  %turn_next = add i64 %turn, 1
  %rests = urem i64 %turn_next, {_PATIENCE}
  %long = icmp eq i64 %rests, 0
  br i1 %long, label %offer, label %again
offer:
  %ignored = call i32 @sched_yield()
  br label %again
again:
  br label %look
enter:
  %others = atomicrmw add ptr %readers, i64 1 seq_cst
  %address = load atomic i64, ptr %published seq_cst, align 8
  %any = icmp ne i64 %address, 0
  br i1 %any, label %take, label %left
take:
  %job = inttoptr i64 %address to ptr
  %function = load ptr, ptr %job, align 8
  call void %function(ptr %job)
  br label %left
left:
  %fewer = atomicrmw sub ptr %readers, i64 1 seq_cst
  br label %look
end:
  ret i64 %seen
}}
"""
