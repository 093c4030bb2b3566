"""A real browser: Debian's Chromium, which ``make test`` installs, or another installed one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 180_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser; skips the test if none is installed."""
    executable = next(filter(None, map(shutil.which, _NAMES)), None)
    if executable is None:
        pytest.skip("no Chromium: `make test` brings Debian's to root; elsewhere install one")
    with sync_playwright() as playwright:
        # NOTE: Chromium's sandbox does not work for root.
        browser = playwright.chromium.launch(
            executable_path=executable, chromium_sandbox=os.geteuid() != 0
        )
        yield browser
        browser.close()


@contextmanager
def open_page(browser: Browser, url: str, key: str | None = None, **context: Any) -> Iterator[Page]:
    """Opens the page at ``url``.

    Args:
        key: the API key that the tab has stored; None for none.
        context: arguments of Playwright's ``new_context``.

    Raises:
        AssertionError: the browser's console shows an error other than that of a missing key.
    """
    tab = browser.new_context(**context)
    tab.set_default_timeout(PATIENCE_MS)
    if key is not None:
        tab.add_init_script(f"sessionStorage.setItem('chairlift-key', '{key}')")
    page = tab.new_page()
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(url)
    yield page
    tab.close()
    errors = [text for text in messages if key is not None or "status of 401" not in text]
    assert not errors, errors


def ask(page: Page, text: str) -> None:
    """Sends a message in the chat, and waits until the reply is complete."""
    count = page.locator(".message.assistant").count()
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")
    expect(page.locator(".message.assistant")).to_have_count(count + 1)
    expect(page.locator("#send")).to_be_visible()


def control(page: Page, name: str) -> Locator:
    """A control of the last message that has it."""
    return page.locator("#conversation").get_by_role("button", name=name, exact=True).last
