"""Threads that work beside the steps have a lower priority, and only they."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from chairlift.engine.device.priority import MAX_NICENESS, NICENESS, give_way


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
@pytest.mark.parametrize("own", [0, 7, MAX_NICENESS])
def test_only_the_calling_thread_gives_way_and_none_gains_priority(own: int) -> None:
    def start() -> None:
        # A thread inherits the priority of the one that starts it; this stands for the process's.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own)
        give_way()

    before = _niceness()
    with ThreadPoolExecutor(1, initializer=start) as thread:
        assert thread.submit(_niceness).result() == min(own + NICENESS, MAX_NICENESS)
    assert _niceness() == before
