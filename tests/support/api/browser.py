"""A real browser: Debian's Chromium, as ``make test`` installs it, or one that is there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 60_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("no Chromium: `make test` brings Debian's to root; elsewhere install one")
    with sync_playwright() as playwright:
        # Chromium's sandbox does not take root.
        browser = playwright.chromium.launch(
            executable_path=found, chromium_sandbox=os.geteuid() != 0
        )
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: str, key: str | None = None, **context: Any) -> Iterator[Page]:
    """The page at ``url``, whose tab knows ``key``; ``context`` is what Playwright calls so.

    Raises:
        AssertionError: the browser complained of something other than that a key is wanted.
    """
    made = browser.new_context(**context)
    made.set_default_timeout(PATIENCE_MS)
    if key is not None:
        made.add_init_script(f"sessionStorage.setItem('chairlift-key', '{key}')")
    page = made.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    yield page
    made.close()
    wrong = [text for text in complaints if key is not None or "status of 401" not in text]
    assert not wrong, wrong
