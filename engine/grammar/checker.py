"""Whether a grammar can be compiled, found out where it can do no harm."""

from __future__ import annotations

import asyncio
import hashlib
import os
import select
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from chairlift.engine.errors import GrammarError, QueueFull, UnsupportedModel
from chairlift.engine.grammar.language import MAX_CHARS, Lexicon
from chairlift.engine.messages import Grammar

# A schema with 200 properties takes a hundredth of a second, one with a thousand half of one.
SECONDS = 2.0
# Until the process is there: Python's start, imports, the vocabulary.
START_SECONDS = 30.0
# They are tried one at a time; more of them would wait for half a minute at worst.
MAX_WAITING = 16
# Grammars of which it is known what is wrong with them, if anything.
MAX_KNOWN = 1024
# Else each thread of the library reserves 64 MB of addresses.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1"}


class Checker:
    """Tries grammars one after the other, in a process that is started for the first of them.

    One that takes too long, or too much memory, ends that process, which the next one starts anew.
    ``close`` ends it for good.

    Args:
        lexicon: the model's vocabulary; asked for in another thread.
    """

    def __init__(self, lexicon: Callable[[], Lexicon]) -> None:
        self._lexicon = lexicon
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chairlift-grammar")
        self._waiting = 0
        # By hash, what is wrong with it: nothing, or a line.
        self._known: OrderedDict[bytes, str] = OrderedDict()

    async def check(self, grammar: Grammar) -> None:
        """Returns if rows can be held to a grammar.

        Raises:
            GrammarError: it is not valid, not supported, or takes too much.
            UnsupportedModel: the model's vocabulary cannot be used for any.
            QueueFull: too many others wait to be tried.
        """
        if len(grammar.text) > MAX_CHARS:
            raise GrammarError(f"longer than {MAX_CHARS} characters")
        key = hashlib.sha256(msgspec.json.encode(grammar)).digest()
        if key not in self._known:
            problem = await self._queue(grammar)
            self._known[key] = problem
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if problem := self._known[key]:
            raise GrammarError(problem)

    def close(self) -> None:
        """Ends the process; nothing can be checked any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._end()

    async def _queue(self, grammar: Grammar) -> str:
        if self._waiting >= MAX_WAITING:
            raise QueueFull("too many grammars wait to be compiled", SECONDS * MAX_WAITING)
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._try, grammar)
        finally:
            self._waiting -= 1

    def _try(self, grammar: Grammar) -> str:
        """What is wrong with it; in the thread."""
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it was nobody's fault here
        try:
            process = self._process or self._start()
            return self._ask(process, grammar, SECONDS)
        # Neither is remembered: on another day it may be in time.
        except TimeoutError:
            self._end()
            raise GrammarError(f"takes longer than {SECONDS:g} s to compile") from None
        except EOFError:
            self._end()
            raise GrammarError("takes more memory or stack than it may to compile") from None

    def _start(self) -> subprocess.Popen[bytes]:
        # NOTE: a session of its own keeps the terminal's Ctrl-C from it; it ends with its input.
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "chairlift.engine.grammar.trial", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=ENVIRONMENT | os.environ,
        )
        try:
            problem = self._ask(process, self._lexicon(), START_SECONDS)
        except (TimeoutError, EOFError):
            problem = "the process that compiles grammars does not start"
        if problem:
            self._end()
            raise UnsupportedModel(problem)
        return process

    def _ask(self, process: subprocess.Popen[bytes], what: msgspec.Struct, seconds: float) -> str:
        """The line that answers ``what``.

        Raises:
            TimeoutError: there is none in time.
            EOFError: the process has ended.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        try:
            process.stdin.write(msgspec.json.encode(what) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        # NOTE: select() itself takes no file number above 1023.
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise TimeoutError
        line = process.stdout.readline()
        if not line:
            raise EOFError
        return msgspec.json.decode(line, type=str)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
