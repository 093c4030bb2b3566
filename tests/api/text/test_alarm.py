"""The time limit of work that blocks the event loop."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import regex

from chairlift.api.text.alarm import TimeUp, within


def test_work_without_an_end_is_interrupted() -> None:
    started = time.thread_time()
    with pytest.raises(TimeUp):
        within(0.05, lambda: regex.search(r"(?:a|a|aa)+$", "a" * 5000 + "b"))
    assert 0.05 <= time.thread_time() - started < 1


def test_other_threads_do_not_use_up_the_limit() -> None:
    done = threading.Event()

    def spin() -> None:
        while not done.is_set():
            sum(range(10_000))

    threads = [threading.Thread(target=spin) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        # Asleep, this thread takes no CPU time while the others take several times the limit.
        assert within(0.05, lambda: time.sleep(0.3) or "done") == "done"
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("collects", [True, False])
def test_no_collection_of_garbage_takes_part(collects: bool) -> None:
    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        assert within(1, gc.isenabled) is False
        assert gc.isenabled() is collects
        with pytest.raises(ZeroDivisionError):
            within(1, lambda: 1 // 0)
        assert gc.isenabled() is collects
    finally:
        (gc.enable if was else gc.disable)()
