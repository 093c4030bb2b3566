"""Files on the page that take a while to be read, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect
from support.page.browser import PATIENCE_MS, open_page
from support.page.page_server import PageServer

pytestmark = pytest.mark.system
expect.set_options(timeout=PATIENCE_MS)
SLOW = """() => {
  const read = Blob.prototype.arrayBuffer;
  Blob.prototype.arrayBuffer = async function () {
    await new Promise((resolve) => setTimeout(resolve, 500));
    return read.call(this);
  };
}"""


@pytest.fixture
def page(browser: Browser, server: PageServer) -> Iterator[Page]:
    server.set("Hello.")
    with open_page(browser, server.url, "-", viewport={"width": 1440, "height": 960}) as page:
        page.evaluate(SLOW)
        page.locator("#prompt").fill("What is it?")
        yield page


def attach(page: Page, content: bytes) -> None:
    page.locator("#file").set_input_files(
        {"name": "a.txt", "mimeType": "text/plain", "buffer": content}
    )


def test_a_message_is_sent_with_a_file_that_is_still_being_read(
    page: Page, server: PageServer
) -> None:
    attach(page, b"In the file")
    page.locator("#prompt").press("Enter")
    page.locator("#prompt").press("Enter")
    expect(page.locator(".message.assistant > .text")).to_have_text("Hello.")
    expect(page.locator(".message.user details summary")).to_have_text("a.txt, 11 characters")
    expect(page.locator("#files li")).to_have_count(0)
    assert "In the file" in server.prompt


def test_a_message_with_a_file_that_cannot_be_read_is_not_sent(page: Page) -> None:
    attach(page, b"\0")
    page.locator("#prompt").press("Enter")
    expect(page.locator("#file-error")).to_have_text("a.txt: is no text")
    expect(page.locator("#prompt")).to_have_value("What is it?")
    expect(page.locator(".message")).to_have_count(0)


def test_a_file_does_not_go_to_another_conversation(page: Page) -> None:
    attach(page, b"In the file")
    page.locator("#new").click()
    page.wait_for_timeout(1500)
    expect(page.locator("#files li")).to_have_count(0)
