"""The page in a real browser on wide screens and phones, checked with axe."""

from __future__ import annotations

from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect
from support.page.browser import PATIENCE_MS, ask, control, open_page
from support.page.page_server import PageServer
from support.vision.vision_dir import picture

pytestmark = pytest.mark.system
WIDE, PHONE = {"width": 1440, "height": 960}, {"width": 390, "height": 844}
expect.set_options(timeout=PATIENCE_MS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_axe_finds_no_violations_in_a_full_conversation(
    browser: Browser,
    server: PageServer,
    scheme: Literal["light", "dark"],
    viewport: dict[str, int],
) -> None:
    markdown = "# A\n\n`b` [c](https://d.example)\n\n```py\ne\n```\n\n| f |\n|--|\n| $g$ |\n"
    server.set(f"<think>{markdown}</think>\n\n{markdown}")
    with (
        server.seeing(),
        open_page(browser, server.url, "-", color_scheme=scheme, viewport=viewport) as page,
    ):
        page.locator("#settings summary").click()
        page.get_by_label("Token probabilities").check()
        expect(page.locator("#attach")).to_have_text("Attach images or text files")
        text = {"name": "b.txt", "mimeType": "text/plain", "buffer": b"b"}
        image = {"name": "a.png", "mimeType": "image/png", "buffer": picture(1, 600, 20)}
        page.locator("#file").set_input_files([text, image])
        expect(page.locator("#files li")).to_have_count(2)
        ask(page, "Hi")
        page.locator("#file").set_input_files([image])
        page.locator(".thought summary").click()
        control(page, "Regenerate").click()
        expect(page.locator(".place")).to_have_text("2 / 2")
        control(page, "Token probabilities").click()
        page.locator(".token-text").focus()
        page.get_by_role("button", name="Conversations").click()
        page.locator("#live").evaluate("live => (live.open = true)")
        expect(page.locator("#recent tr")).not_to_have_count(0)
        found = Axe().run(page)
        assert found.response["passes"], "axe looked at nothing"
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]


def test_on_a_phone_the_chat_is_above_the_fold_and_the_live_view_is_folded(
    browser: Browser, server: PageServer
) -> None:
    with open_page(browser, server.url, "-", viewport=PHONE) as page:
        for name in ("conversation", "prompt", "send"):
            box = page.locator(f"#{name}").bounding_box()
            assert box is not None
            assert box["y"] + box["height"] <= PHONE["height"], name
        expect(page.locator("#chairs")).to_be_hidden()
        expect(page.locator("#live-brief")).to_contain_text("chairs taken")
        page.locator("#live > summary").click()
        expect(page.locator("#chairs")).to_be_visible()
