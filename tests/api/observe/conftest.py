"""A browser, and a server with a scripted engine, for each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser
from support.page.browser import chromium
from support.page.page_server import PageServer, page_server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[PageServer]:
    with page_server() as server:
        yield server
