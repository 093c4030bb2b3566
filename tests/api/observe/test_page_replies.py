"""Replies in a real browser: markdown, hostile output, long replies; with a scripted engine."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from support.page.browser import PATIENCE_MS, ask, open_page
from support.page.page_server import PageServer

pytestmark = pytest.mark.system
WIDE = {"width": 1440, "height": 960}
expect.set_options(timeout=PATIENCE_MS)

BLOCKS = (
    "# Title\n\n",
    "A [reference] and **bold**,\nin two lines.\n\n",
    "Setext\n===\n",
    "- a\n- b\n\n  c\n\n- d\n",
    "1. one\n\n2. two\n   ```py\n   x = 1\n\n   y\n   ```\n3. three\n\n",
    "```python\ndef f():\n\n    return '`'\n```\n",
    "  ~~~\n  ```\n   indented\n~~~~\n",
    "````md\n```\ninner\n```\n````\n\n",
    "| a | b |\n|--:|---|\n| 1 | `2` |\n\n",
    "> quote\n> more\n\n",
    "\\[\nx = 1\n- y\n\\]\n\n",
    "$$e^{i\\pi} = -1$$\n\nPay $5 or $6, or $x_1$ and \\(y\\).\n\n",
    "    indented code\n\n    more\n\n",
    "***\n",
    "Umlaute: äöü 漢字 😀 & <b>no tag</b>\r\nnext\r\n\r\n",
)
REFERENCE = "[reference]: https://example.org/there\n\n"

HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">
<iframe src="https://evil.example/frame"></iframe><style>* { display: none }</style>
<form action="https://evil.example/form"><input name="key"><button>Send</button></form>
<svg><script>window.hacked = 1</script></svg><math href="javascript:hacked()"></math>

![track](https://evil.example/pixel.png) ![data](data:image/svg+xml;base64,PHN2Zz4=)
[a](javascript:window.hacked=1) [b](JaVaScRiPt&colon;window.hacked=1) [c](data:text/html,x)
[d](/v1/models) [e](vbscript:x) <javascript:window.hacked=1>
[f](https://fine.example/ "t\\" x=\\"y")
<link rel="stylesheet" href="https://evil.example/style.css"> [g](//evil.example/x)

$\\href{javascript:window.hacked=1}{x}$ $\\includegraphics{https://evil.example/tex.png}$
$\\htmlData{act=copy}{x}$ $\\def\\a{\\a\\a}\\a$ $\\url{https://evil.example/u}$
$\\text{</annotation><img src=https://evil.example/i.png onerror=window.hacked=1>}$

| <img src="https://evil.example/cell.png"> | a |
|:-:|--|
| [x](javascript:hacked()) | ![y](https://evil.example/y.png) |

```html" onclick="window.hacked=1
<script>window.hacked = 1</script>
```
"""

# Attributes that load or run something, and elements that do.
INSPECT = """root => ({
  hacked: window.hacked ?? null,
  elements: [...root.querySelectorAll('*')].map(e => e.localName),
  attributes: [...root.querySelectorAll('.text *')].flatMap(e => e.getAttributeNames()),
  links: [...root.querySelectorAll('[href]')].map(e => e.getAttribute('href')),
})"""

# Renders each document at once and in pieces, and compares what is shown.
COMPARE = """async documents => {
  const { Blocks } = await import('/ui/chat/blocks.js');
  const { render } = await import('/ui/chat/markdown.js');
  const { load } = await import('/ui/chat/maths.js');
  await load();
  const flat = node => {
    const frames = node.querySelectorAll('.block:not(.code), .code pre span');
    for (const box of frames) box.replaceWith(...box.childNodes);
    for (const code of node.querySelectorAll('pre code')) code.removeAttribute('class');
    for (const box of node.querySelectorAll('.code')) box.className = 'code';
    node.normalize();
    return node.innerHTML.replaceAll(/>\\n+</g, '><').replace(/\\n+$/, '');
  };
  const different = [];
  for (const { text, pieces, env } of documents) {
    const whole = document.createElement('div');
    whole.append(render(text));
    const grown = document.createElement('div');
    const blocks = new Blocks(grown);
    for (const piece of pieces) {
      blocks.append(piece);
      await new Promise(requestAnimationFrame);
    }
    await blocks.finish();
    if (flat(whole) !== flat(grown)) different.push([text, flat(whole), flat(grown)]);
  }
  return different;
}"""

ENDED = """async () => {
  while (!document.querySelector('.note')) await new Promise(requestAnimationFrame);
}"""
# Whether the log has followed what arrived; blocks get their sizes within a few frames.
AT_END = """async () => {
  const log = document.getElementById('conversation');
  for (let frame = 0; frame < 100; frame++) {
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 40) return true;
    await new Promise(requestAnimationFrame);
  }
  return false;
}"""
SCROLL = """async () => {
  const log = document.getElementById('conversation');
  for (const step of [-700, 700]) {
    for (let n = 0; n < 40; n++) {
      log.scrollTop += step;
      await new Promise(requestAnimationFrame);
    }
  }
}"""


@pytest.fixture
def page(browser: Browser, server: PageServer) -> Iterator[Page]:
    with open_page(browser, server.url, "-", viewport=WIDE) as page:
        yield page


def pieces_of(text: str, rng: random.Random) -> list[str]:
    pieces = []
    while text:
        length = rng.choice((1, 2, 3, 7, 40))
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def test_a_text_that_gbodyends_like_one_rendered_at_once(page: Page) -> None:
    rng = random.Random(7)
    documents = []
    for _ in range(12):
        # Two lists, or two indented blocks, in sequence are one: then the blocks are not separate.
        text = REFERENCE + "".join(rng.sample(BLOCKS, 5))
        documents.append({"text": text, "pieces": pieces_of(text, rng)})
    unended = "Text\n\n```js\nlet a;\n\n  let b"
    documents.append({"text": unended, "pieces": pieces_of(unended, rng)})
    different = page.evaluate(COMPARE, documents)
    assert not different, "\n----\n".join(different[0])


def test_a_speed_needs_several_tokens_and_some_time(page: Page) -> None:
    texts: Any = page.evaluate(
        """async () => {
          const { speedText } = await import('/ui/chat/message.js');
          const text = (tokens, seconds) =>
            speedText({ tokens, about: false, gaps: tokens - 1, seconds, first: 0.5 });
          return [text(21, 2), text(8, 0.001), text(1, 0)];
        }"""
    )
    assert texts == [
        "21 tokens, 10.0 tokens/s, first after 500 ms",
        "8 tokens, first after 500 ms",
        "1 token, first after 500 ms",
    ]


def test_long_lists_tables_and_paragraphs_keep_all_of_their_text(page: Page) -> None:
    rows = 600
    shown: Any = page.evaluate(
        """async rows => {
          const { Blocks } = await import('/ui/chat/blocks.js');
          const show = async text => {
            const box = document.createElement('div');
            const blocks = new Blocks(box);
            for (let at = 0; at < text.length; at += 999) blocks.append(text.slice(at, at + 999));
            await blocks.finish();
            return box;
          };
          const lines = line => Array.from({ length: rows }, (_, at) => line(at + 1)).join('\\n');
          const list = await show(lines(at => `${at}. item **${at}** of the list`));
          const body = lines(at => `| ${at} | the row ${at} |`);
          const table = await show('| n | text |\\n|--:|--|\\n' + body);
          const words = 'word '.repeat(20000).trim();
          const paragraph = await show(words);
          const numbers = [...list.querySelectorAll('ol')].flatMap(
            ol => [...ol.children].map((_, at) => ol.start + at));
          return {
            numbers, lists: list.querySelectorAll('ol').length,
            bold: [...list.querySelectorAll('strong')].map(each => +each.textContent),
            cells: [...table.querySelectorAll('td:first-child')].map(each => +each.textContent),
            stray: table.querySelectorAll('p').length,
            tables: table.querySelectorAll('table').length,
            words: paragraph.textContent.split(/\\s+/).filter(Boolean).length === 20000,
          };
        }""",
        rows,
    )
    numbers = list(range(1, rows + 1))
    assert shown["numbers"] == shown["bold"] == shown["cells"] == numbers
    assert (shown["stray"], shown["words"]) == (0, True)
    assert shown["lists"] > 1
    assert shown["tables"] > 1


def test_hostile_replies_run_and_load_nothing(page: Page, server: PageServer) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: asked.append(f"dialog: {dialog.message}"))
    server.set(f"<think>{HOSTILE}</think>\n\n{HOSTILE}", chunk=7)
    ask(page, HOSTILE)
    page.locator(".thought summary").click()
    expect(page.locator(".thought table")).to_be_visible()
    expect(page.locator("math")).not_to_have_count(0)
    found = page.locator("#conversation").evaluate(INSPECT)
    assert found["hacked"] is None
    forbidden = {"script", "img", "iframe", "style", "form", "input", "svg", "link", "object"}
    assert not forbidden & set(found["elements"])
    assert not [name for name in found["attributes"] if name.startswith("on") or name == "style"]
    # Links to other sites remain; the user may follow them.
    assert "https://fine.example/" in found["links"]
    assert all(link.startswith("https://") for link in found["links"]), found["links"]
    assert all(url.startswith((server.url, "data:")) for url in asked), asked
    assert not any("data:" in url for url in asked)
    # What was written is shown, as text.
    expect(page.locator(".message.assistant > .text")).to_contain_text("<script>window.hacked")
    link = page.locator(".message.assistant > .text a[href]").first
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    assert link.get_attribute("target") == "_blank"


def test_replies_of_10000_tokens_stream_and_scroll_without_long_tasks(
    browser: Browser, page: Page, server: PageServer, tmp_path: Path
) -> None:
    code = "```python\n" + "".join(f"value_{n} = f({n})  # a line\n" for n in range(1000)) + "```\n"
    prose = "".join(
        f"## Part {n}\n\nText with **bold** and `code`.\n\n- a\n- b\n\n" for n in range(120)
    )
    text = prose + code + "| a | b |\n|--|--|\n" + "| 1 | text |\n" * 400
    # Four bytes in each chunk, each chunk being an event of its own.
    server.set(text, chunk=4)
    assert len(text) >= 40_000, len(text)
    trace = tmp_path / "trace.json"
    page.locator("#prompt").fill("Write.")
    browser.start_tracing(page=page, path=trace, categories=["toplevel", "devtools.timeline"])
    page.keyboard.press("Enter")
    # Playwright's own polling would be in the trace, as tasks of the page.
    page.evaluate(ENDED)
    assert page.evaluate(AT_END)
    page.evaluate(SCROLL)
    browser.stop_tracing()
    assert longest_task_ms(trace) < 100
    shown = page.locator(".message.assistant > .text")
    expect(shown).to_contain_text("value_999 = f(999)")
    assert shown.locator("h2").count() == 120


def test_the_log_follows_a_reply_until_the_user_scrolls_away(
    page: Page, server: PageServer
) -> None:
    server.set("A line of the reply.\n\n" * 1000, step_seconds=0.01)
    page.locator("#prompt").fill("Write.")
    page.keyboard.press("Enter")
    log = page.locator("#conversation")
    expect(log.locator("p").nth(40)).to_be_attached()
    assert page.evaluate(AT_END)
    log.hover()
    page.mouse.wheel(0, -300)
    expect(log).not_to_have_class("follows")
    count = log.locator("p").count()
    expect(log.locator("p").nth(count + 20)).to_be_attached()
    expect(log).not_to_have_class("follows")
    # On a busy machine, the reply may grow between the wheel and the look at the position.
    for _ in range(100):
        page.mouse.wheel(0, 100_000)
        page.wait_for_timeout(100)
        if log.get_attribute("class") == "follows":
            break
    expect(log).to_have_class("follows")
    assert page.evaluate(AT_END)
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_be_visible()


def longest_task_ms(trace: Path) -> float:
    """The longest task of the page's main thread, in CPU time.

    The browser's own measure of long tasks, PerformanceObserver's, is the time that has passed,
    which on a busy machine is mostly that of other processes.
    """
    events = json.loads(trace.read_text())["traceEvents"]
    threads = Counter(
        (event["pid"], event["tid"]) for event in events if event["name"] == "FireAnimationFrame"
    )
    ((main, frames),) = threads.most_common(1)
    assert frames > 100, "the trace has no streaming"
    tasks = [
        event["tdur"] / 1000
        for event in events
        if event["name"].endswith("RunTask") and (event["pid"], event["tid"]) == main
        if "tdur" in event
    ]
    assert len(tasks) > frames
    return max(tasks)
