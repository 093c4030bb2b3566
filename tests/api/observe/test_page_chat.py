"""The chat in a real browser: what it keeps and sends; with a scripted engine."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Download, Page, Route, expect
from support.api.thinking_caller import CALLING
from support.page.browser import PATIENCE_MS, ask, control, open_page
from support.page.page_server import PageServer

pytestmark = pytest.mark.system
EVENTS = "text/event-stream"
WIDE = {"width": 1440, "height": 960}
expect.set_options(timeout=PATIENCE_MS)
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]


@pytest.fixture
def page(browser: Browser, server: PageServer) -> Iterator[Page]:
    server.set("Hello.")
    with open_page(browser, server.url, "-", viewport=WIDE, accept_downloads=True) as page:
        yield page


def turns(server: PageServer) -> list[str]:
    """The contents of the messages that the model was given last."""
    return re.findall(r"<\|im_start\|>\w+\n(.*?)<\|im_end\|>", server.prompt, re.DOTALL)


def saved(download: Download) -> str:
    return Path(download.path()).read_text()


def open_list(page: Page) -> None:
    page.get_by_role("button", name="Conversations").click()
    expect(page.locator("#conversations")).to_be_visible()


def test_one_of_several_models_answers_and_is_kept(page: Page, server: PageServer) -> None:
    """The states of the models come with the server's snapshots; with one there is no choice."""
    page.locator("#settings summary").click()
    expect(page.locator("#temperature")).to_be_visible()
    expect(page.locator("#chat-model")).to_be_hidden()
    with urllib.request.urlopen(f"{server.url}/ui/events", timeout=180) as events:
        lines = (line.decode() for line in events)
        data = next(line for line in lines if line.startswith("data: "))
    snapshot = json.loads(data.removeprefix("data: "))
    [first] = snapshot["models"]
    snapshot["models"].append({"name": "<b>other</b>", "state": "unloaded"})
    event = f"data: {json.dumps(snapshot)}\n\n"
    page.route("**/ui/events", lambda route: route.fulfill(body=event, content_type=EVENTS))
    page.reload()
    page.locator("#settings summary").click()
    options = page.locator("#chat-model option")
    expect(options).to_have_text(["the server's first model", first["name"], "<b>other</b>"])
    asked = []

    def answer(route: Route) -> None:
        body = route.request.post_data_json
        asked.append(body.pop("model", None))  # the scripted server has only one
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", answer)
    for chosen in ("<b>other</b>", first["name"], ""):
        page.locator("#chat-model").select_option(chosen)
        ask(page, "Which are you?")
    assert asked == ["<b>other</b>", first["name"], None]
    page.locator("#chat-model").select_option(first["name"])
    page.reload()
    page.locator("#settings summary").click()
    expect(page.locator("#chat-model")).to_have_value(first["name"])


def test_reload_keeps_conversations_drafts_and_settings(page: Page) -> None:
    ask(page, "The first question")
    page.locator("#settings summary").click()
    page.locator("#system").fill("Be brief.")
    page.locator("#temperature").fill("0.5")
    page.locator("#max-tokens").fill("")
    page.locator("#prompt").fill("A draft <b>that</b> stays")
    page.reload()
    expect(page.locator(".message.assistant > .text")).to_have_text("Hello.")
    expect(page.locator("#prompt")).to_have_value("A draft <b>that</b> stays")
    expect(page.locator("#system")).to_have_value("Be brief.")
    expect(page.locator("#temperature")).to_have_value("0.5")
    expect(page.locator("#max-tokens")).to_have_value("")
    expect(page.locator("#not-kept")).to_be_hidden()
    # A new conversation has settings and a draft of its own.
    page.locator("#new").click()
    for name in ("prompt", "system", "temperature"):
        expect(page.locator(f"#{name}")).to_have_value("")
    ask(page, "The second question")
    open_list(page)
    titles = page.locator("#conversation-list .title")
    expect(titles).to_have_text(["The second question", "The first question"])
    titles.last.click()
    expect(page.locator(".message.user > .text")).to_have_text("The first question")
    expect(page.locator("#prompt")).to_have_value("A draft <b>that</b> stays")


def test_conversations_are_renamed_exported_and_deleted(page: Page) -> None:
    ask(page, "One")
    page.locator("#new").click()
    ask(page, "Two")
    open_list(page)
    page.get_by_role("button", name="Rename: One").click()
    expect(page.get_by_label("Title")).to_be_focused()
    page.keyboard.type("Snow & ice")
    page.keyboard.press("Enter")
    titles = page.locator("#conversation-list .title")
    expect(titles).to_have_text(["Two", "Snow & ice"])
    expect(titles.last).to_be_focused()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as JSON: Snow & ice").click()
    assert download.value.suggested_filename == "Snow-ice.json"
    exported = json.loads(saved(download.value))
    assert {message["content"] for message in exported["messages"]} == {"One", "Hello."}
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as Markdown: Snow & ice").click()
    assert saved(download.value) == "# Snow & ice\n\n## You\n\nOne\n\n## Model\n\nHello.\n"
    page.get_by_role("button", name="Delete: Two").click()
    page.get_by_role("button", name="Cancel").click()
    expect(titles).to_have_count(2)
    page.get_by_role("button", name="Delete: Two").click()
    page.locator("#confirm-yes").click()
    expect(titles).to_have_text(["Snow & ice"])
    expect(page.locator("#conversations-toggle")).to_be_focused()
    # The deleted one was shown.
    expect(page.locator(".message")).to_have_count(0)
    page.locator("#delete-all").click()
    page.locator("#confirm-yes").click()
    expect(titles).to_have_count(0)
    expect(page.locator("#conversations-toggle")).to_be_focused()
    page.reload()
    open_list(page)
    expect(page.locator("#no-conversations")).to_be_visible()


def test_without_a_database_the_chat_works_and_says_that_it_keeps_nothing(
    browser: Browser, server: PageServer
) -> None:
    server.set("Hello.")
    with browser.new_context() as tab:
        tab.add_init_script(
            "indexedDB.open = () => { throw new DOMException('no', 'SecurityError') }"
        )
        page = tab.new_page()
        page.goto(server.url)
        expect(page.locator("#not-kept")).to_be_visible()
        ask(page, "One")
        page.locator("#new").click()
        open_list(page)
        page.locator("#conversation-list .title").click()
        expect(page.locator(".message.user > .text")).to_have_text("One")
        page.reload()
        expect(page.locator("#not-kept")).to_be_visible()
        expect(page.locator(".message")).to_have_count(0)


def test_edit_and_regenerate_make_branches(page: Page, server: PageServer) -> None:
    ask(page, "One")
    ask(page, "Two")
    assert turns(server) == ["One", "Hello.", "Two"]
    server.set("Again.")
    control(page, "Regenerate").click()
    replies = page.locator(".message.assistant > .text")
    expect(replies).to_have_text(["Hello.", "Again."])
    assert turns(server) == ["One", "Hello.", "Two"]
    control(page, "Previous version").click()
    expect(replies).to_have_text(["Hello.", "Hello."])
    # Edit the first question: the rest is another branch.
    page.locator(".message.user").first.get_by_role("button", name="Edit").click()
    editor = page.get_by_label("Edit the message").get_by_label("Message")
    expect(editor).to_be_focused()
    editor.fill("Uno")
    page.keyboard.press("Enter")
    expect(replies).to_have_text(["Again."])
    assert turns(server) == ["Uno"]
    page.reload()
    expect(page.locator(".message.user > .text")).to_have_text("Uno")
    page.locator(".message.user").get_by_role("button", name="Previous version").click()
    expect(replies).to_have_text(["Hello.", "Again."])
    expect(page.locator(".message.user > .text")).to_have_text(["One", "Two"])


def test_a_cut_reply_continues_where_it_ended(page: Page, server: PageServer) -> None:
    server.set("```py\nx = [1,", "length")
    ask(page, "Count.")
    note = page.locator(".note")
    expect(note).to_contain_text("cut at the most tokens")
    server.set(" 2]\n```\nDone.")
    control(page, "Continue").click()
    expect(note).not_to_contain_text("cut")
    expect(note).to_have_text(re.compile(r"^org/tiny · \d+ tokens, "))
    expect(page.locator(".message.assistant pre")).to_have_text("x = [1, 2]\n")
    expect(page.locator(".message.assistant > .text")).to_contain_text("Done.")
    assert server.prompt.endswith("assistant\n```py\nx = [1,")
    # The whole is one message from now on.
    ask(page, "And?")
    assert turns(server) == ["Count.", "```py\nx = [1, 2]\n```\nDone.", "And?"]


def test_a_stopped_reply_is_kept_and_a_failed_one_can_be_retried(
    page: Page, server: PageServer
) -> None:
    server.set("word " * 2000, step_seconds=0.02)
    page.locator("#prompt").fill("Go on.")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant > .text")).to_contain_text("word word")
    # Another conversation does not end the reply; the first shows it again.
    page.locator("#new").click()
    open_list(page)
    page.locator("#conversation-list .title").click()
    expect(page.locator(".message.assistant > .text")).to_contain_text("word word word")
    page.locator("#prompt").focus()
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_contain_text("; stopped")
    page.reload()
    expect(page.locator(".message.assistant > .text")).to_contain_text("word word word")
    server.set("Hello.")
    failure = 'data: {"error": {"message": "The row failed."}}\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=failure))
    ask(page, "Next")
    expect(page.locator(".message .error")).to_have_text("The row failed.")
    page.unroute("**/v1/chat/completions")
    control(page, "Retry").click()
    expect(page.locator(".message.assistant > .text").last).to_have_text("Hello.")


def test_a_reply_that_a_reload_interrupts_can_be_continued(page: Page, server: PageServer) -> None:
    server.set("word " * 2000, step_seconds=0.02)
    page.locator("#prompt").fill("Go on.")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant > .text")).to_contain_text("word word")
    page.reload()
    expect(page.locator(".message.user > .text")).to_have_text("Go on.")
    expect(page.locator(".message.assistant > .text")).to_contain_text("word word")
    server.set("the end.")
    control(page, "Continue").click()
    expect(page.locator(".message.assistant > .text")).to_contain_text("the end.")
    assert "assistant\nword word" in server.prompt


def test_thoughts_are_folded_and_calls_are_answered(page: Page, server: PageServer) -> None:
    server.set(CALLING)
    page.locator("#settings summary").click()
    page.locator("#tools").fill("{}")
    page.locator("#prompt").fill("Weather?")
    page.locator("#prompt").press("Enter")
    expect(page.locator("#tools")).to_be_focused()  # it is no array
    page.locator("#tools").fill(json.dumps(TOOLS))
    ask(page, "Weather?")
    thought = page.locator(".thought")
    assert thought.get_attribute("open") is None
    thought.locator("summary").click()
    expect(thought).to_contain_text("It asks for two.")
    expect(page.locator(".call")).to_have_count(2)
    expect(page.locator(".call").first).to_contain_text('Calls get_weather{"city": "Zürich"}')
    server.set("Sunny in both.")
    page.get_by_label("Result of get_weather").first.fill("sunny, 20")
    page.get_by_label("Result of get_weather").last.fill("sunny, 21")
    expect(page.get_by_label("Result of get_weather").first).to_have_value("sunny, 20")
    # By the keyboard: on a busy machine the page may still scroll under the mouse.
    page.get_by_role("button", name="Send the results").press("Enter")
    expect(page.locator(".message.assistant > .text").last).to_have_text("Sunny in both.")
    assert server.prompt.count("<tool_call>") == 2
    assert turns(server)[-2:] == ["sunny, 20", "sunny, 21"]


def test_token_probabilities_are_shown_on_demand(page: Page) -> None:
    page.locator("#settings summary").click()
    page.get_by_label("Token probabilities").check()
    ask(page, "Hi")
    control(page, "Token probabilities").click()
    text = page.get_by_label("Tokens; the arrow keys choose one")
    expect(text).to_have_text("Hello.")
    expect(text.locator("span").first).to_have_class("p1")
    text.focus()
    expect(page.locator(".alternatives li").first).to_have_text("H60.7 %")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".alternatives li")).to_have_count(5)
    expect(page.locator(".alternatives li").first).to_have_text("e60.7 %")
    text.locator("span").nth(4).hover()
    expect(page.locator(".alternatives .taken")).to_have_text("o60.7 %")
    control(page, "Token probabilities").click()
    expect(page.locator(".message.assistant > .text")).to_have_text("Hello.")


def test_text_files_are_quoted_and_others_are_refused(page: Page, server: PageServer) -> None:
    drop = """files => {
      const transfer = new DataTransfer();
      for (const [name, bytes] of files) {
        transfer.items.add(new File([new Uint8Array(bytes)], name));
      }
      const init = { dataTransfer: transfer, bubbles: true, cancelable: true };
      document.getElementById('prompt').dispatchEvent(new DragEvent('drop', init));
    }"""
    text = "a ``` fence\nüber"
    page.evaluate(drop, [["notes.md", list(text.encode())], ["x.png", [137, 80, 0, 255]]])
    error = page.locator("#file-error")
    expect(error).to_have_text("x.png: cannot be read as text in UTF-8")
    page.evaluate(drop, [["zero.txt", [65, 0, 66]], ["big.txt", [65] * (256 * 1024 + 1)]])
    expect(error).to_have_text("zero.txt: is no text; big.txt: is larger than 256 KiB")
    expect(page.locator("#files li")).to_have_text(["notes.md, 16 characters Remove"])
    page.reload()
    expect(page.locator("#files li")).to_have_count(1)
    page.locator("#file").set_input_files(
        {"name": "b.txt", "mimeType": "text/plain", "buffer": b"b"}
    )
    expect(page.locator("#files li")).to_have_count(2)
    page.get_by_role("button", name="Remove b.txt").click()
    ask(page, "What is it?")
    assert turns(server) == [f"notes.md:\n````\n{text}\n````\n\nWhat is it?"]
    expect(page.locator("#files li")).to_have_count(0)
    expect(page.locator(".message.user summary")).to_have_text("notes.md, 16 characters")


def test_code_and_messages_are_copied(page: Page, server: PageServer) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    reply = "Do:\n\n```sh\nls -l\n```\n"
    server.set(reply)
    ask(page, "How?")
    page.get_by_role("button", name="Copy the code").click()
    expect(page.locator("#announce")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "ls -l\n"
    page.get_by_role("button", name="Copy the message").last.click()
    expect(page.get_by_text("Copied")).to_have_count(3)
    assert page.evaluate("navigator.clipboard.readText()") == reply
