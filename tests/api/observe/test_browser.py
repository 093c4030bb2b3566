"""The page at / in a real browser, served by a real server with a tiny model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect
from support.models import write_reciting_gguf
from support.page.browser import PATIENCE_MS, open_page

from chairlift.loadtest.servers.child import ChildServer, ServerSpec
from chairlift.loadtest.servers.ports import free_port

pytestmark = pytest.mark.system
CHAIRLIFT = str(Path(sys.executable).parent / "chairlift")
KEY = "sk-of-the-test"
ROWS = 4
WIDE = {"width": 1440, "height": 960}
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def url(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = tmp_path_factory.mktemp("model") / "reciting.gguf"
    write_reciting_gguf(model, "Paris.")
    port = free_port()
    command = [CHAIRLIFT, "serve", str(model), "--port", str(port), "--max-rows", str(ROWS)]
    with ChildServer(ServerSpec("page", command, port, env={"CHAIRLIFT_API_KEY": KEY}), 120):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    with open_page(browser, url, KEY, viewport=WIDE) as page:
        expect(page.locator("#state")).to_have_text("Serving")
        yield page


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def expect_focus(page: Page, name: str) -> None:
    expect(page.locator(f"#{name}")).to_be_focused()


def test_the_page_asks_for_a_key_and_keeps_it(browser: Browser, url: str) -> None:
    with open_page(browser, url, viewport=WIDE) as page:
        expect_focus(page, "key")
        page.keyboard.type("sk-of-somebody-else")
        press(page, "Enter")
        expect(page.locator("#key-error")).to_contain_text("API key")
        expect_focus(page, "key")
        press(page, "Control+a")
        page.keyboard.type(KEY)
        press(page, "Enter")
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.locator("#state")).to_have_text("Serving")
        page.reload()
        expect(page.locator("#state")).to_have_text("Serving")


def test_a_conversation_by_the_keyboard_alone(page: Page) -> None:
    press(page, "Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the chat")
    press(page, "Enter")
    expect_focus(page, "prompt")
    press(page, "Tab")
    expect_focus(page, "send")
    press(page, "Tab", "Enter", "Tab")
    expect_focus(page, "system")
    press(page, "Tab")
    expect_focus(page, "temperature")
    page.keyboard.type("7")
    press(page, "Shift+Tab", "Shift+Tab", "Shift+Tab", "Shift+Tab")
    expect_focus(page, "prompt")
    page.keyboard.type("What is the capital of France?")
    press(page, "Enter")
    # The cursor moves to the invalid field, and nothing is sent.
    expect_focus(page, "temperature")
    expect(page.locator(".message")).to_have_count(0)
    press(page, "Control+a")
    page.keyboard.type("0")
    press(page, "Enter")
    expect(page.locator(".message.assistant")).to_contain_text("Paris.")
    note = page.locator(".note")
    expect(note).to_have_text(
        # A busy machine may show all tokens at once, which tells no speed.
        re.compile(r" · \d+ tokens(, [\d,.]+ tokens/s)?, first after [\d.]+ m?s$")
    )
    expect(page.locator("#recent tr td:nth-child(4)").first).to_have_text("200")


def never_ends(route: Route) -> None:
    """Lets a reply go on until its limit, whatever the model would do."""
    route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True})


def test_a_stopped_reply_frees_its_chair(page: Page) -> None:
    page.route("**/v1/chat/completions", never_ends)
    page.locator("#prompt").fill("Tell a long story of a chairlift <b>that</b> never stops.")
    press(page, "Enter")
    expect(page.locator(".seat.taken")).to_have_count(1)
    expect(page.locator("#readout")).to_contain_text("about")
    # To the button by keyboard.
    press(page, "Tab", "Space")
    expect(page.locator(".note")).to_contain_text("; stopped")
    expect(page.locator(".seat.taken")).to_have_count(0)
    expect(page.locator("#summary")).to_have_text(f"0 of {ROWS} chairs taken")
    expect(page.locator(".message.user")).to_contain_text("<b>that</b>")
    expect_focus(page, "prompt")
    page.locator("#prompt").fill("Another one.")
    press(page, "Enter")
    expect(page.locator("#readout")).to_contain_text("about")
    press(page, "Escape")
    expect(page.locator(".note")).to_have_count(2)
    expect(page.locator(".note").last).to_contain_text("; stopped")
    page.locator("#new").click()
    expect(page.locator("#empty")).to_be_visible()
    expect(page.locator(".message")).to_have_count(0)


def test_seats_fill_and_empty_under_a_load(page: Page, url: str) -> None:
    expect(page.locator(".seat")).to_have_count(ROWS)
    bench = subprocess.Popen(
        [
            *(CHAIRLIFT, "bench", "--base-url", url, "--api-key", KEY, "--num-prompts", "12"),
            *("--max-concurrency", str(ROWS + 2), "--random-input-len", "20"),
            *("--random-output-len", "800"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    expect(page.locator(".seat.taken")).to_have_count(ROWS)
    expect(page.locator("#summary")).to_contain_text(f"{ROWS} of {ROWS} chairs taken, ")
    expect(page.locator("#queue span")).not_to_have_count(0)
    assert bench.wait(PATIENCE_MS / 1000) == 0
    expect(page.locator(".seat.taken, .seat.boarding")).to_have_count(0)
    expect(page.locator("#queue")).to_have_text("empty")
    expect(page.locator("#recent tr")).to_have_count(12)
    for gauge in ("pace", "ttft", "itl", "kv", "hits"):
        expect(page.locator(f"#{gauge}")).to_have_text(re.compile(r"\d"))
