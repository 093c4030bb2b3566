"""Images in the chat, in a real browser: attached, shown, sent, kept; with a scripted engine."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from support.page.browser import PATIENCE_MS, ask, control, open_page
from support.page.page_server import Describer, PageServer
from support.vision.vision_dir import picture

pytestmark = pytest.mark.system
expect.set_options(timeout=PATIENCE_MS)
# Drops or pastes files, each of [name, type, bytes in base64].
GIVE = """([kind, files]) => {
  const transfer = new DataTransfer();
  for (const [name, type, data] of files) {
    const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
    transfer.items.add(new File([bytes], name, { type }));
  }
  const init = { bubbles: true, cancelable: true };
  const event = kind === 'drop'
    ? new DragEvent(kind, { ...init, dataTransfer: transfer })
    : new ClipboardEvent(kind, { ...init, clipboardData: transfer });
  document.getElementById('prompt').dispatchEvent(event);
}"""
# A file of this name says that it is too large.
HUGE = """() => Object.defineProperty(File.prototype, 'size', {
  get() { return this.name === 'huge.png' ? 21 << 20 : 4000 },
})"""
LOADED = "images => images.length && images.every(image => image.naturalWidth > 0)"


@pytest.fixture
def eyes(server: PageServer) -> Iterator[Describer]:
    with server.seeing() as eyes:
        yield eyes


@pytest.fixture
def page(browser: Browser, server: PageServer) -> Iterator[Page]:
    server.set("Grey.")
    viewport: Any = {"width": 1440, "height": 960}
    with open_page(browser, server.url, "-", viewport=viewport, accept_downloads=True) as page:
        yield page


def give(page: Page, kind: str, *files: tuple[str, str, bytes]) -> None:
    encoded = [(name, type, base64.b64encode(data).decode()) for name, type, data in files]
    page.evaluate(GIVE, [kind, encoded])


def test_images_are_offered_only_to_a_model_that_sees(page: Page, server: PageServer) -> None:
    expect(page.locator("#state")).to_have_text("Serving")
    give(page, "drop", ("a.png", "image/png", picture(1)), ("b.svg", "image/svg+xml", b"<svg/>"))
    error = page.locator("#file-error")
    expect(error).to_have_text("a.png: the model takes no images; b.svg: the model takes no images")
    expect(page.locator("#attach")).to_have_text("Attach text files")
    with server.seeing():
        expect(page.locator("#attach")).to_have_text("Attach images or text files")
        expect(page.locator("#empty")).to_contain_text("drop images or text files here")
        page.evaluate(HUGE)
        wrong = {
            "b.svg": "is no image in PNG, JPEG, WebP or GIF",
            "text.png": "is no image in PNG, JPEG, WebP or GIF",
            "cut.png": "cannot be read as an image",
            "huge.png": "is larger than 20 MiB",
        }
        contents = (b"<svg/>", b"text", picture(1)[:60], picture(1))
        types = ("image/svg+xml", "image/png", "image/png", "image/png")
        give(page, "drop", *zip(wrong, types, contents, strict=True))
        expect(error).to_have_text("; ".join(f"{name}: {text}" for name, text in wrong.items()))
        expect(page.locator("#files li")).to_have_count(0)


def test_an_image_is_shown_sent_kept_and_exported(
    page: Page, server: PageServer, eyes: Describer
) -> None:
    expect(page.locator("#attach")).to_have_text("Attach images or text files")
    first, second = picture(1), picture(2, kind="JPEG")
    give(page, "paste", ("image.png", "image/png", first))
    expect(page.locator("#files img")).to_have_count(1)
    # The content says what it is, whatever the name says.
    chosen = {"name": "photo", "mimeType": "", "buffer": second}
    page.locator("#file").set_input_files([chosen, {**chosen, "name": "other.png"}])
    expect(page.locator("#files li")).to_have_count(3)
    page.get_by_role("button", name="Remove other.png").click()
    page.reload()
    expect(page.locator("#files img")).to_have_count(2)
    assert page.locator("#files img").evaluate_all(LOADED)
    expect(page.locator("#attach")).to_have_text("Attach images or text files")
    ask(page, "What?")
    expect(page.locator("#files li")).to_have_count(0)
    assert "user\n[image/png][image/jpeg]What?<" in server.prompt
    assert eyes.images == [first, second]
    shown = page.locator(".message.user > img")
    assert shown.evaluate_all(LOADED)
    # Later turns, other versions and edits have them, too.
    control(page, "Regenerate").click()
    expect(page.locator(".place")).to_have_text("2 / 2")
    ask(page, "And?")
    assert server.prompt.count("[image/png][image/jpeg]What?") == 1
    page.locator(".message.user").first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").get_by_label("Message").fill("Why?")
    page.keyboard.press("Enter")
    expect(page.locator(".message.user > .text")).to_have_text("Why?")
    expect(page.locator(".message.assistant > .text")).to_have_text("Grey.")
    assert "[image/png][image/jpeg]Why?<" in server.prompt
    page.reload()
    expect(shown).to_have_count(2)
    assert shown.evaluate_all(LOADED)
    page.get_by_role("button", name="Conversations").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as Markdown: What?").click()
    url = f"data:image/png;base64,{base64.b64encode(first).decode()}"
    assert f"![image.png]({url})" in Path(download.value.path()).read_text()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as JSON: What?").click()
    messages = json.loads(Path(download.value.path()).read_text())["messages"]
    assert next(each["files"] for each in messages if "files" in each)[0] == {
        "name": "image.png",
        "image": url,
    }


def test_large_images_are_scaled_down_and_a_failed_message_keeps_its_image(
    page: Page, server: PageServer, eyes: Describer
) -> None:
    expect(page.locator("#attach")).to_have_text("Attach images or text files")
    file = io.BytesIO()
    Image.new("RGBA", (4096, 1024)).save(file, "PNG")  # transparent
    give(page, "drop", ("large.png", "image/png", file.getvalue()))
    expect(page.locator("#files img")).to_have_count(1)
    failure = 'data: {"error": {"message": "The row failed."}}\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=failure))
    page.locator("#prompt").press("Enter")  # an image needs no text
    expect(page.locator(".message .error")).to_have_text("The row failed.")
    page.unroute("**/v1/chat/completions")
    # The failed reply is empty, so both messages are sent as one.
    ask(page, "What?")
    assert server.prompt.count("user\n[image/jpeg]What?<") == 1
    with Image.open(io.BytesIO(eyes.images[0])) as sent:
        assert (sent.size, sent.getpixel((0, 0))) == ((2048, 512), (255, 255, 255))
