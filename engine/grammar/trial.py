"""A process that compiles grammars to see whether they can be; ``checker`` starts it and ends it.

The library is native code: a grammar that takes for ever can only be ended with its process, and
one that overflows the stack (``r0: r1``, ``r1: r2`` and so on, 5,000 times) takes it along.

Each line of standard input is JSON: first the Lexicon, then grammars. Each is answered by a line
with a JSON string: what is wrong with it, or nothing. The process ends with its input.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress

import msgspec
import numpy as np
from llguidance import LLMatcher

from chairlift.engine.errors import GrammarError, UnsupportedModel
from chairlift.engine.grammar.language import Lexicon, check, compiled
from chairlift.engine.lifeline import follow_parent
from chairlift.engine.messages import Grammar

# Of addresses, most of which are never used; what does not fit ends the process.
MEMORY_BYTES = 2 << 30
# What compiles here must not overflow the engine's thread, which may have no more than 2 MB.
STACK_BYTES = 1 << 20
# A server that was killed cannot end it.
CPU_SECONDS = 4
# A grammar can be compiled that is too much for the limits of a mask, mostly of the first few.
STEPS = 16


def main() -> None:
    """Answers until standard input ends. The argument is the server's process id."""
    with suppress(OSError):  # a server that is killed closes standard input, too
        follow_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere it is refused
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    try:
        tokenizer = msgspec.json.decode(sys.stdin.buffer.readline(), type=Lexicon).load()
    except UnsupportedModel as error:
        _answer(str(error))
        return
    _answer("")
    for line in sys.stdin.buffer:
        _limit_time()
        try:
            _walk(compiled(msgspec.json.decode(line, type=Grammar), tokenizer))
        except GrammarError as error:
            _answer(str(error))
        else:
            _answer("")


def _limit_time() -> None:
    """Lets the process compute for so long from now on."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    until = int(own.ru_utime + own.ru_stime) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (until, most))


def _walk(matcher: LLMatcher) -> None:
    """Takes some of the tokens that may come first; raises GrammarError if it cannot."""
    for _ in range(STEPS):
        mask = matcher.compute_bitmask()
        check(matcher)
        if matcher.is_stopped():
            return
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        if not len(allowed):
            raise GrammarError("nothing is allowed to come first")
        matcher.consume_token(int(allowed[len(allowed) // 2]))
        check(matcher)


def _answer(problem: str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(problem) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
