"""The live view in a real browser, beside a scripted engine whose history the tests write."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect
from support.api.fake_engine import model_info, step_stats
from support.page.browser import PATIENCE_MS, chromium, open_page
from support.page.live_server import COUNT, DOWN, RIDERS, ROWS, Served, served

from chairlift.api.observe.access import PAGE_REQUESTS
from chairlift.api.observe.history import INTERVAL_SECONDS

pytestmark = pytest.mark.system
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
VIEWS = pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def site() -> Iterator[Served]:
    with served() as each:
        yield each


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@contextmanager
def opened(browser: Browser, site: Served, **context: Any) -> Iterator[Page]:
    with open_page(browser, site.server.url, "key", **{"viewport": WIDE, **context}) as page:
        # It is folded on a phone.
        page.locator("#live").evaluate("details => (details.open = true)")
        expect(page.locator(".seat")).to_have_count(ROWS)
        expect(page.locator("#chart-output .trace")).to_have_count(1)
        yield page


def test_a_new_page_shows_the_time_before_it(browser: Browser, site: Served) -> None:
    asked: list[str] = []
    with opened(browser, site) as page:
        page.on("request", lambda request: asked.append(request.url))
        page.reload()
        expect(page.locator("#chart-output .trace")).to_have_count(1)
        # Lines before and after the gap, and what was marked.
        for chart in ("output", "prompts", "itl", "choices", "kv"):
            lines = page.locator(f"#chart-{chart} .trace-0").get_attribute("d")
            assert lines is not None
            assert lines.count("M") >= 2, chart
            assert page.locator(f"#chart-{chart} .restart").count() == 1
            assert page.locator(f"#chart-{chart} .away").count() == len(DOWN)
        assert page.locator("#chart-choices .failure").count() == 1
        expect(page.locator("#choices-more")).to_contain_text("2 requests failed in 15 minutes")
        # Axes with units.
        ticks = page.locator("#chart-output text").all_text_contents()
        assert {"0", "20/s", "40/s", "60/s"} <= set(ticks)
        assert "100 %" in page.locator("#chart-kv text").all_text_contents()
        assert len([tick for tick in ticks if ":" in tick]) >= 2
        # The same as text.
        label = page.locator("#chart-itl svg").get_attribute("aria-label")
        assert label is not None
        assert "median: latest" in label
        page.locator("#history summary").click()
        expect(page.locator("#minutes tr")).not_to_have_count(0)
        cells = page.locator("#minutes tr").evaluate_all(
            "rows => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
        assert len(cells) in (COUNT * INTERVAL_SECONDS // 60 + extra for extra in (0, 1, 2))
        assert sum(int(cell[-2]) for cell in cells) == 2
        assert sum(int(cell[-1]) for cell in cells) == 1
        assert "128" in {cell[-5] for cell in cells}
        # A point under the pointer.
        page.locator("#chart-itl svg").hover(position={"x": 60, "y": 40})
        expect(page.locator("#chart-itl .cursor text")).to_contain_text("median 2")
    paths = {url.removeprefix(site.server.url) for url in asked}
    assert "/ui/events" in paths
    # The access log has no lines of them at INFO.
    assert paths <= PAGE_REQUESTS


def test_the_history_grows_and_nothing_shifts(browser: Browser, site: Served) -> None:
    with opened(browser, site) as page:
        before = page.locator("#chart-output .trace").get_attribute("d")
        places = "panels => panels.map((panel) => JSON.stringify(panel.getBoundingClientRect()))"
        placed = page.locator(".panel").evaluate_all(places)
        page.evaluate(
            "window.shifts = 0; new PerformanceObserver((list) => { for (const entry of"
            " list.getEntries()) window.shifts += entry.value })"
            ".observe({ type: 'layout-shift', buffered: false })"
        )
        site.call(lambda: site.server.engine.on_step(step_stats([0.3] * 5000)))
        expect(page.locator("#chart-output text").first).not_to_have_text("60/s")
        expect(page.locator("#chart-output")).to_contain_text("000/s")
        assert page.locator("#chart-output .trace").get_attribute("d") != before
        # A number's unit moves as the number grows; nothing else does.
        assert page.evaluate("window.shifts") < 0.001
        assert page.locator(".panel").evaluate_all(places) == placed


@VIEWS
def test_all_rows_fit_a_screen(browser: Browser, site: Served, viewport: dict[str, int]) -> None:
    engine = site.server.engine
    before = engine.info
    with opened(browser, site, viewport=viewport) as page:
        try:
            for rows in (1, 32, 33, 96, ROWS, 384, 1024):
                engine.info = model_info(max_rows=rows, max_queue=5000)
                expect(page.locator(".seat")).to_have_count(rows)
                line = page.locator(".slope").bounding_box()
                last = page.locator(".seat").last.bounding_box()
                assert line is not None
                assert last is not None
                assert line["height"] < viewport["height"] * 0.8, rows
                assert last["y"] + last["height"] <= line["y"] + line["height"]
                width = page.evaluate("document.documentElement.scrollWidth")
                assert width == viewport["width"]
        finally:
            engine.info = before
        expect(page.locator(".seat")).to_have_count(ROWS)


def test_details_of_a_row_by_pointer_touch_and_keyboard(browser: Browser, site: Served) -> None:
    detail = "#seat-detail"
    with opened(browser, site) as page:
        expect(page.locator(".seat.taken")).to_have_count(RIDERS)
        expect(page.locator(detail)).to_contain_text("arrow keys")
        page.locator(".seat").nth(2).hover()
        expect(page.locator(detail)).to_contain_text("Chair 3: request …")
        expect(page.locator(detail)).to_contain_text("tokens in")
        page.locator("h1").hover()
        expect(page.locator(detail)).to_contain_text("arrow keys")
        page.locator("#chairs").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        chairs = page.locator("#chairs")
        expect(chairs).to_have_attribute("aria-activedescendant", "seat-1")
        expect(page.locator("#seat-1")).to_have_attribute(
            "aria-label", re.compile("^Chair 2: request")
        )
        page.keyboard.press("ArrowDown")
        below = page.locator("[aria-selected=true]").bounding_box()
        above = page.locator("#seat-1").bounding_box()
        assert below is not None
        assert above is not None
        assert below["x"] == above["x"]
        assert below["y"] > above["y"]
        page.keyboard.press("End")
        expect(page.locator(detail)).to_have_text(f"Chair {ROWS}: free")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowLeft")
        expect(chairs).to_have_attribute("aria-activedescendant", "seat-0")
    with opened(browser, site, viewport=PHONE, has_touch=True) as page:
        page.locator(".seat").nth(3).tap()
        expect(page.locator(detail)).to_contain_text("Chair 4: request …")


def test_a_stopped_request_is_no_error(browser: Browser, site: Served) -> None:
    with opened(browser, site) as page:
        page.evaluate(
            """async (body) => {
              const leave = new AbortController();
              const headers = { "Content-Type": "application/json" };
              const options = { method: "POST", headers, body, signal: leave.signal };
              const reply = await fetch("v1/chat/completions", options);
              await reply.body.getReader().read();
              leave.abort();
            }""",
            '{"messages": [{"role": "user", "content": "x"}], "stream": true}',
        )
        status = page.locator("#recent tr").first.locator("td").nth(3)
        expect(status).to_have_text("stopped")
        assert "left" in str(status.get_attribute("title"))
        red = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--bad')")
        colour = status.evaluate("element => getComputedStyle(element).color")
        assert colour != page.evaluate(
            "(red) => { const probe = document.createElement('i'); probe.style.color = red;"
            " document.body.append(probe); return getComputedStyle(probe).color }",
            red,
        )


@VIEWS
def test_axe_finds_no_violations(browser: Browser, site: Served, viewport: dict[str, int]) -> None:
    with opened(browser, site, viewport=viewport) as page:
        page.locator("#history summary").click()
        page.locator("#chairs").focus()
        page.keyboard.press("ArrowRight")
        schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
        for scheme in schemes:
            page.emulate_media(color_scheme=scheme)
            found = Axe().run(page)
            assert found.response["passes"], "axe looked at nothing"
            assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]


def test_ticks_are_few_round_and_reach_the_highest_value(browser: Browser, site: Served) -> None:
    with opened(browser, site) as page:
        values = [math.exp(index / 7) * 1e-5 for index in range(200)]
        steps = page.evaluate(
            """async (values) => {
              const { tickStep } = await import("/ui/chart.js");
              return values.map((value) => tickStep(value, 1e-6));
            }""",
            values,
        )
    for value, step in zip(values, steps, strict=True):
        assert 1 <= math.ceil(value / step - 1e-6) <= 3
        assert f"{step:.0e}"[0] in "125"
        assert float(f"{step:.0e}") == pytest.approx(step)
    assert all(first <= second for first, second in pairwise(steps))


def test_samples_of_the_next_server_follow_those_of_the_last(
    browser: Browser, site: Served
) -> None:
    with opened(browser, site) as page:
        kept = page.evaluate(
            """async () => {
              const { History } = await import("/ui/history.js");
              const history = new History();
              // The charts learn their size after a frame.
              for (const _ of [1, 2]) await new Promise(requestAnimationFrame);
              const known = { seconds: 2, serving: true, restarts: 0, failed: 0, running: 1,
                waiting: 0, generated_pace: 1, prefilled_pace: 1, kv_share: null,
                ttft_p50: null, ttft_p99: null, itl_p50: null, itl_p99: null };
              const sample = (at) => ({ at, ...known });
              const kept = [];
              for (const [now, times] of [
                [1001, [996, 998, 1000]],
                [1002, []],
                [1003, [1000, 1002]], // the connection broke off: all of them again
                [1101, [1098, 1100]], // the server was started again
                [2000.5, [2000]], // fifteen minutes later
                [61, [58, 60]], // another machine
              ]) {
                history.add({ now, history: times.map(sample) });
                kept.push([history.samples.map(({ at }) => at),
                  history.charts[0].path("generated_pace").split("M").length - 1]);
              }
              return kept;
            }"""
        )
    assert kept == [
        [[996, 998, 1000], 1],
        [[996, 998, 1000], 1],
        [[996, 998, 1000, 1002], 1],
        [[996, 998, 1000, 1002, 1098, 1100], 2],
        [[2000], 1],
        [[58, 60], 1],
    ]


def test_the_page_says_when_it_cannot_reach_the_server(browser: Browser, site: Served) -> None:
    # NOTE: without ``open_page``, because the browser reports each failed attempt as an error.
    tab = browser.new_context(viewport=WIDE)
    page = tab.new_page()
    page.goto(site.server.url)
    expect(page.locator("#chart-output .trace")).to_have_count(1)
    # Offline, the browser keeps the streams that it has.
    tab.set_offline(True)
    closing = site.server.service.live.closing
    site.call(closing.set)
    expect(page.locator("#state")).to_have_text("The server cannot be reached; trying again …")
    faded = "element => Number(getComputedStyle(element).opacity)"
    assert page.locator("#chairs").evaluate(faded) < 1
    site.call(closing.clear)
    tab.set_offline(False)
    expect(page.locator("#state")).to_have_text("Serving")
    assert page.locator("#chairs").evaluate(faded) == 1
    tab.close()


def test_a_silent_connection_counts_as_lost(browser: Browser, site: Served) -> None:
    with opened(browser, site) as page:
        error = page.evaluate(
            """async () => {
              const { events } = await import("/ui/server.js");
              const silent = new Response(new ReadableStream({}));
              const began = performance.now();
              try {
                for await (const event of events(silent, 200)) return "an event";
              } catch (error) {
                return [error.message, performance.now() - began >= 190];
              }
            }"""
        )
        assert error == ["The connection broke off.", True]
