"""What a user does on the page while a reply arrives, in a real browser; with a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect
from support.page.browser import PATIENCE_MS, ask, control, open_page
from support.page.page_server import PageServer

from chairlift.api.admission.keys import NO_LIMITS, given_keys

pytestmark = pytest.mark.system
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture
def page(browser: Browser, server: PageServer) -> Iterator[Page]:
    """A page on which a reply arrives that takes minutes."""
    server.set("word " * 5000, chunk=5, step_seconds=0.1)
    with open_page(browser, server.url, "-", viewport={"width": 1440, "height": 960}) as page:
        page.locator("#prompt").fill("One")
        page.keyboard.press("Enter")
        expect(page.locator(".message.assistant")).to_contain_text("word")
        yield page


def stop(page: Page) -> None:
    page.locator("#stop").click()
    expect(page.locator("#send")).to_be_visible()


def test_a_conversation_is_renamed_although_its_reply_arrives_out_of_sight(page: Page) -> None:
    page.locator("#new").click()
    page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="Rename: One").click()
    page.keyboard.type("Snow")
    page.keyboard.press("Enter")
    expect(page.locator("#conversation-list .title")).to_have_text(["Snow"])
    stop(page)
    page.reload()
    page.get_by_role("button", name="Conversations").click()
    expect(page.locator("#conversation-list .title")).to_have_text(["Snow"])


def test_an_edited_message_waits_in_its_field_for_the_end_of_the_reply(page: Page) -> None:
    control(page, "Edit the message").dispatch_event("click")  # the arriving reply scrolls it away
    page.locator(".editor textarea").fill("Two, at length")
    page.keyboard.press("Enter")
    expect(page.locator("#announce")).to_contain_text("A reply is arriving")
    expect(page.locator(".editor textarea")).to_have_value("Two, at length")
    stop(page)
    page.locator(".editor textarea").press("Enter")
    expect(page.locator(".message.user > .text")).to_have_text("Two, at length")
    stop(page)


def test_escape_in_a_dialog_or_in_an_input_method_does_not_stop_the_reply(page: Page) -> None:
    page.locator("#prompt").evaluate(
        "field => field.dispatchEvent(new KeyboardEvent('keydown',"
        " { key: 'Escape', isComposing: true, bubbles: true }))"
    )
    page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="Delete: One").click()
    expect(page.locator("#confirm")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#confirm")).to_be_hidden()
    expect(page.locator("#stop")).to_be_visible()
    page.wait_for_timeout(300)
    expect(page.locator("#stop")).to_be_visible()
    page.locator("#prompt").press("Escape")
    expect(page.locator("#send")).to_be_visible()


def test_a_key_that_the_chat_needs_while_events_arrive_is_taken(
    browser: Browser, server: PageServer
) -> None:
    """The server's keys were replaced; streams that have begun go on."""
    server.set("Hello.")
    accounts = server.running.service.accounts
    with open_page(browser, server.url) as page:
        expect(page.locator("#state")).to_have_text("Serving")
        try:
            accounts.replace(given_keys(["sk-of-the-test"], NO_LIMITS))
            ask(page, "One")
            expect(page.locator("#key-form")).to_be_visible()
            page.locator("#key").fill("sk-of-somebody-else")
            page.keyboard.press("Enter")
            expect(page.locator("#key-error")).to_contain_text("API key")
            page.locator("#key").fill("sk-of-the-test")
            page.keyboard.press("Enter")
            expect(page.locator("#key-form")).to_be_hidden()
            control(page, "Retry").click()
            expect(page.locator(".message.assistant > .text")).to_have_text("Hello.")
        finally:
            accounts.replace(())
