"""Takes the pictures of the page in docs/images: ``python page_pictures.py`` in this folder."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from playwright.sync_api import expect
from support.page.browser import chromium, open_page
from support.paths import ROOT

from chairlift.loadtest.servers.child import ChildServer, ServerSpec
from chairlift.loadtest.servers.ports import free_port

CHAIRLIFT = str(Path(sys.executable).parent / "chairlift")
DOCS = ROOT / "docs" / "images"
QUESTION = "Name three ski resorts, and what each of them is known for."
SECONDS_OF_LOAD = 25
WIDE, PHONE = {"width": 1440, "height": 960}, {"width": 390, "height": 844}
PICTURES: dict[str, dict[str, Any]] = {
    "page-phone": {"color_scheme": "dark", "viewport": PHONE},
    "page-light": {"color_scheme": "light", "viewport": WIDE},
    "page-dark": {"color_scheme": "dark", "viewport": WIDE},
}


def main() -> None:
    port = free_port()
    command = [CHAIRLIFT, "serve", "--port", str(port), "--max-rows", "16"]
    load = "--duration 60 --request-rate 1.5 --max-concurrency 12 --random-range-ratio 0.8 "
    load += "--random-input-len 40 --random-output-len 100"
    with ExitStack() as stack:
        server = stack.enter_context(ChildServer(ServerSpec("page", command, port), 120))
        url = server.spec.base_url
        browser = stack.enter_context(chromium())
        pages = {
            name: stack.enter_context(open_page(browser, url, **context))
            for name, context in PICTURES.items()
        }
        bench = subprocess.Popen([CHAIRLIFT, "bench", "--base-url", url, *load.split()])
        stack.callback(bench.wait)
        stack.callback(bench.terminate)
        pages["page-light"].wait_for_timeout(SECONDS_OF_LOAD * 1000)
        for name, page in pages.items():
            page.locator("#prompt").fill(QUESTION)
            page.locator("#prompt").press("Enter")
            expect(page.locator(".message.assistant li")).to_have_count(2, timeout=60_000)
            page.screenshot(path=DOCS / f"{name}.png")


if __name__ == "__main__":
    main()
