"""Memory as pages: what fits alone and together, what choices share, and who waits."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler.loop import GEOMETRY, EngineLoop, make_limits, make_sequence

from chairlift.cache.capacity import Capacity, KVGeometry
from chairlift.cache.pages.budget import PROMPTS
from chairlift.cache.pages.page import step_size, step_size_below
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import NO_CAPACITY
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.step_memory.bands import ONE_BAND
from chairlift.scheduler.step_memory.page_planner import PagePlanner

FULL = KVGeometry(100)
BITS = str.maketrans("ab", "01")
PAGE = 64 * 100


def _pages(usable: int, rows: int = 8, tokens: int = 64) -> Limits:
    """Limits with this many pages besides page 0."""
    return Limits(rows, tokens, (usable + 1) * PAGE, FULL, paged=True)


@settings(max_examples=25, deadline=None)
@given(
    geometry=st.builds(
        KVGeometry,
        st.integers(0, 200),
        st.dictionaries(st.integers(1, 200), st.integers(1, 100), min_size=1, max_size=2),
        st.sampled_from([0, 500]),
    ),
    tokens=st.integers(5, 200),
    kv=st.integers(250_000, 500_000),
    outputs=st.integers(0, 130),
)
def test_max_context_is_exactly_what_fits_alone(
    geometry: KVGeometry, tokens: int, kv: int, outputs: int
) -> None:
    limits = Limits(4, tokens, kv, geometry, paged=True)
    bounded = limits.max_context <= kv
    longest = min(limits.max_context, 1500)
    assert limits.bytes_alone(longest) <= kv
    loop = EngineLoop(limits)
    loop.scheduler.add(make_sequence("alone", max(1, longest - outputs), min(outputs, longest - 1)))
    loop.drain()
    assert (len(loop.finished), loop.preemptions) == (1, 0)
    if bounded and longest < 1500:
        scheduler = Scheduler(limits)
        scheduler.add(make_sequence("too long", longest + 1, outputs=0))
        assert not scheduler.plan([NO_CAPACITY]).chunks, "it fits at no time"


@pytest.mark.parametrize("outputs", [0, 1, 100])
def test_the_longest_request_is_served_and_delays_no_other_for_ever(outputs: int) -> None:
    loop = EngineLoop(_pages(3))
    longest = loop.scheduler.limits.max_context
    loop.scheduler.add(make_sequence("longest", longest - outputs, outputs))
    loop.scheduler.add(make_sequence("other", 3, 3, arrival=1.0))
    loop.drain()
    assert [s.request_id for s in loop.finished] == ["longest", "other"]


def test_a_shortage_is_explained_in_pages() -> None:
    limits = Limits(4, 24, 60_000, GEOMETRY, paged=True)
    # 6 pages of each kind; the window needs no more than 31 + 24 tokens.
    assert limits.max_context == 5 * 64
    assert limits.bytes_alone(320) == 5 * 64 * 100 + 2 * 64 * 50
    assert limits.shortage(321) == (
        "321 tokens need 2 pages of 64 tokens in layers with a window of 32 tokens (5 exist), "
        "6 pages of 64 tokens in full-attention layers (5 exist) in 60000 bytes of KV memory; 320 "
        "tokens are the most"
    )


@pytest.mark.parametrize(("kv", "bands"), [(2 * PAGE - 1, 1), (10**6, 2)])
def test_unusable_pages_are_refused(kv: int, bands: int) -> None:
    with pytest.raises(ValueError, match="bands" if bands > 1 else "kv-memory"):
        Limits(8, 64, kv, FULL, bands=bands, paged=True)


def test_limits_with_pages_survive_the_way_between_processes() -> None:
    limits = make_limits(paged=True)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(limits), type=Limits)
    assert decoded == limits
    assert decoded.max_context == limits.max_context


def test_a_plan_leaves_capacities_and_bands_alone() -> None:
    scheduler = Scheduler(_pages(9))
    sequence = make_sequence("one", 100, outputs=50)
    scheduler.add(sequence)
    now = [Capacity(8, 640)]
    for _ in range(4):
        plan = scheduler.plan(now)
        assert (plan.capacities, plan.bands) == ((Capacity(8, 640),), ONE_BAND)
        scheduler.commit(plan)
    assert list(plan.decode.values()) == [0]


def test_choices_share_the_full_pages_of_their_prompt() -> None:
    """Three choices of 130 tokens: two shared pages, one each, and one to spare for each."""
    loop = EngineLoop(_pages(8))
    loop.scheduler.add(make_sequence("n", 130, outputs=30, n=3))
    plans = [loop.step() for _ in range(4)]
    assert [len(plan.joins) for plan in plans] == [0, 0, 3, 0]
    loop.drain()
    assert (len(loop.finished), loop.preemptions) == (3, 0)
    alone = EngineLoop(_pages(7))
    alone.scheduler.add(make_sequence("n", 130, outputs=30, n=3))
    assert len(alone.scheduler.waiting) == 3, "the choices would not fit together"
    alone.drain()
    assert len(alone.finished) == 3


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.text("ab", max_size=4), st.integers(1, 150)), max_size=5),
    prompts=st.lists(st.tuples(st.text("ab", max_size=4), st.integers(1, 150)), max_size=3),
    more=st.tuples(st.text("ab", max_size=4), st.integers(65, 150)),
)
def test_pages_of_a_tree_of_prefixes_count_once(
    rows: list[tuple[str, int]], prompts: list[tuple[str, int]], more: tuple[str, int]
) -> None:
    """A prefix is a path in a binary tree; each of its nodes is a page that sequences share."""

    def sequence(path: str, own: int) -> Sequence:
        made = make_sequence(path, 64 * len(path) + own, outputs=1000)
        made.pages = tuple(int("1" + path[: i + 1].translate(BITS), 2) for i in range(len(path)))
        return made

    def pages(spare: int) -> int:
        shared = {path[: i + 1] for path, _ in (*rows, *prompts, more) for i in range(len(path))}
        own = [64 * len(path) + tokens for path, tokens in rows]
        begun = [64 * len(path) + tokens + 1 for path, tokens in (*prompts, more)]
        prefixes = sum(len(path) for path, _ in (*rows, *prompts, more))
        return sum(-(-(n + spare) // 64) for n in (*own, *begun)) - prefixes + len(shared)

    # Beside others a prompt begins only if each of them has a page to grow.
    enough = pages(64 if rows or prompts else 0)
    for usable in (enough - 1, enough):
        planner = PagePlanner(
            _pages(usable, rows=20),
            [sequence(*row) for row in rows],
            [sequence(*prompt) for prompt in prompts],
            [NO_CAPACITY],
        )
        fits = planner.capacities(sequence(*more)) is not None
        assert fits == (usable == enough), (usable, enough)


@pytest.mark.parametrize("beside", [False, True])
def test_a_prompt_that_begins_within_a_page_needs_the_copied_one_too(beside: bool) -> None:
    row = make_sequence("row", 100, outputs=20)
    prompt = make_sequence("prompt", 100, outputs=20)
    for copied in (False, True):
        prompt.copies_page = copied
        needed = 2 + 2 * beside + copied
        for usable in (needed - 1, needed):
            planner = PagePlanner(_pages(usable), [row] if beside else [], [], [NO_CAPACITY])
            assert (planner.capacities(prompt) is not None) == (usable == needed)
            planner.add(prompt, 0)
            assert (planner.capacities() is not None) == (usable == needed)
    prompt.computed = 90
    assert PagePlanner(_pages(2), [], [prompt], [NO_CAPACITY]).capacities() is not None


def test_a_preempted_choice_shares_nothing_any_more() -> None:
    """It is computed again in pages of its own, next to choices that still share theirs."""
    loop = EngineLoop(_pages(28, tokens=2000))
    loop.scheduler.add(make_sequence("old", 640, outputs=200))
    loop.scheduler.add(make_sequence("n", 256, outputs=400, n=3))
    for _ in range(210):
        loop.step()
    assert (len(loop.finished), loop.preemptions) == (1, 1)
    assert len(loop.scheduler.running) == 3, "the preempted choice has a row again"
    # 8 pages of that choice, 8 of one of the others, 4 of the other, 3 to spare: 5 are left.
    for pages, fits in ((6, False), (5, True)):
        loop.scheduler.add(make_sequence("more", 64 * pages, outputs=1, arrival=1.0))
        assert bool(loop.step().cached) is fits, pages
        loop.scheduler.finish(loop.scheduler.sequences_of("more")[0])
    loop.drain()
    assert len(loop.finished) == 4


def test_a_prompt_in_prefill_takes_a_window_of_the_longest_step() -> None:
    limits = Limits(8, 300, 11 * PAGE, KVGeometry(0, {32: 100}), paged=True)
    loop = EngineLoop(limits)
    for name in ("first", "second"):
        loop.scheduler.add(make_sequence(name, 630, outputs=9))
    begun = [[s.request_id for s in loop.step().cached] for _ in range(4)]
    # A prompt takes 31 + 300 tokens, 7 pages; a row 32 tokens, 2 pages.
    assert begun == [["first"], [], [], ["second"]]


def test_a_prompt_leaves_a_page_for_each_row_that_grows() -> None:
    """Rows that end within their pages need none."""
    for outputs, begins in ((200, False), (20, True)):
        loop = EngineLoop(_pages(4))
        loop.scheduler.add(make_sequence("row", 70, outputs=outputs))
        for _ in range(3):
            loop.step()
        loop.scheduler.add(make_sequence("more", 70, outputs=20))
        assert bool(loop.step().cached) is begins, outputs


def test_prompts_without_rows_wait_for_recurrent_states() -> None:
    geometry = KVGeometry(100, row_bytes=1000)
    scheduler = Scheduler(Limits(2, 64, 10**6, geometry, paged=True))
    for number in range(20):
        scheduler.add(make_sequence(str(number), 1, outputs=0))
    assert len(scheduler.plan([NO_CAPACITY]).chunks) == 2 + PROMPTS


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 60),
    prompts=st.lists(st.integers(1, 900), min_size=1, max_size=6),
    tokens=st.integers(100, 700),
)
def test_a_step_that_cuts_a_prompt_needs_no_padding(
    rows: int, prompts: list[int], tokens: int
) -> None:
    limits = Limits(64, tokens, 1 << 24, FULL, paged=True)
    scheduler = Scheduler(limits)
    for number in range(rows):
        scheduler.add(make_sequence(f"row {number}", 1, outputs=9))
    while len(scheduler.running) < rows:
        scheduler.commit(scheduler.plan([NO_CAPACITY]))
    for number, length in enumerate(prompts):
        scheduler.add(make_sequence(str(number), length, outputs=1))
    plan = scheduler.plan([NO_CAPACITY])
    before = len(plan.decode)
    computed = before + sum(plan.chunks.values())
    cut = any(size < sequence.num_tokens for sequence, size in plan.chunks.items())
    assert computed <= tokens
    possible = step_size_below(tokens) > before
    assert not (cut and possible) or step_size(computed) == computed
