"""The page at /: its files, access to it, and the events that it shows."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.api.api_server import CHAT, Running, ending, engine_replying, running, until
from support.api.fake_engine import FakeEngine, step_stats

from chairlift.api.admission.keys import NO_LIMITS, ApiKey, KeyLimits, digest_of
from chairlift.api.cli.serve_flags.network_flags import add_arguments, network_settings
from chairlift.api.observe import live, page

UI = Path(page.__file__).resolve().parent / "ui"
SERVED = sorted(path.resolve() for path in page._PATHS.values())
FILES = [path for path in SERVED if path.parent.name != "vendor"]
KEY = "sk-alice-secret"
KEYS = (ApiKey("alice", digest_of(KEY), NO_LIMITS),)
BEARER = {"Authorization": f"Bearer {KEY}"}
SECRET = "the river runs on"


@asynccontextmanager
async def watching(server: Running, **headers: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Watches the server; gives its events as they arrive."""

    async def events() -> AsyncIterator[dict[str, Any]]:
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])

    async with server.http.get(server.url + page.EVENTS, headers=headers) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        yield events()


# The files


class Markup(HTMLParser):
    """Parses a page, and asserts rules that browsers do not enforce."""

    VOID = frozenset({"meta", "link", "input", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.labelled: set[str | None] = set()
        self.fields: set[str | None] = set()
        self.referred: set[str] = set()
        self.tags: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert len(given) == len(attrs), f"<{tag}> has an attribute twice"
        assert "style" not in given
        assert not any(name.startswith("on") for name in given), f"<{tag}> runs a script"
        self.tags[tag] += 1
        if "id" in given:
            self.ids[str(given["id"])] += 1
        if tag == "label":
            self.labelled.add(given["for"])
        if tag in ("input", "textarea", "select"):
            self.fields.add(given["id"])
        for name in ("aria-labelledby", "aria-describedby", "for"):
            self.referred.update((given.get(name) or "").split())
        if (given.get("href") or "").startswith("#"):
            self.referred.add(str(given["href"])[1:])
        if tag in ("section", "form", "nav"):
            assert given.keys() & {"aria-label", "aria-labelledby"}, f"<{tag}> has no name"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        assert self.open[-1:] not in (["script"], ["style"]) or not data.strip()


def test_the_page_is_well_formed_and_every_field_has_a_label() -> None:
    markup = Markup()
    markup.feed((UI / "index.html").read_text())
    markup.close()
    assert not markup.open
    assert markup.fields == markup.labelled != set()
    assert set(markup.ids.values()) == {1}
    assert markup.referred <= markup.ids.keys()
    assert markup.tags["main"] == markup.tags["header"] == markup.tags["h1"] == 1


def test_the_page_has_every_id_that_the_scripts_look_up() -> None:
    ids = set(re.findall(r'id="([^"]+)"', (UI / "index.html").read_text()))
    for script in (path for path in FILES if path.suffix == ".js"):
        named = re.findall(r'\b(?:element|put|fill|number)\("([^"]+)"', script.read_text())
        assert set(named) <= ids, script.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_loads_from_other_sites_or_inserts_markup(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|data:\w+/", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    folder = UI.parent if path.suffix == ".html" else path.parent
    for name in re.findall(r'(?:from |import\(|href=|src=)"([^"#]+)"', text):
        assert (folder / name).resolve() in SERVED, name


def test_the_page_has_light_and_dark_themes_and_respects_reduced_motion() -> None:
    style = (UI / "style.css").read_text()
    assert "prefers-color-scheme: dark" in style
    assert "prefers-reduced-motion: reduce" in style
    assert ":focus-visible" in style


# Access


async def test_the_page_is_served_with_a_strict_policy_and_without_a_key() -> None:
    async with running(engine_replying("Hello"), keys=KEYS) as server:
        for path, file in page._PATHS.items():
            async with server.http.get(server.url + path) as response:
                assert response.status == 200, path
                policy = response.headers["Content-Security-Policy"].split("; ")
                assert policy[0] == "default-src 'none'"
                assert "script-src 'self'" in policy
                assert "connect-src 'self'" in policy
                assert "frame-ancestors 'none'" in policy
                assert "unsafe" not in str(policy)
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert response.headers["Referrer-Policy"] == "no-referrer"
                body = await response.read()
                kind = response.content_type
            assert body == file.read_bytes()
            scripts = {"js": "text/javascript", "mjs": "text/javascript"}
            kinds = {**scripts, "html": "text/html", "css": "text/css", "svg": "image/svg+xml"}
            assert kind == kinds[file.suffix[1:]]
            # A browser that has the file gets no second copy.
            known = {"If-None-Match": response.headers["ETag"]}
            async with server.http.get(server.url + path, headers=known) as response:
                assert (response.status, await response.read()) == (304, b"")
            plain = {"Accept-Encoding": "identity"}
            async with server.http.get(server.url + path, headers=plain) as response:
                assert await response.read() == body
        for path in ("/ui/vendor/README.md", "/ui/vendor/", "/ui/chat"):
            assert (await server.http.get(server.url + path)).status == 401
        async with server.http.get(server.url + "/ui/../app.py") as response:
            assert response.status in (401, 404)


async def test_events_need_a_key_where_there_are_keys() -> None:
    async with running(engine_replying("Hello"), keys=KEYS) as server:
        assert (await server.get(page.EVENTS))[0] == 401
        async with watching(server, **BEARER) as events:
            assert (await anext(events))["status"] == "ok"


async def test_the_page_can_be_turned_off() -> None:
    async with running(engine_replying("Hello"), ui=False) as server:
        for path in (page.EVENTS, "/ui/main.js"):
            assert (await server.get(path))[0] == 404
        async with server.http.get(server.url) as response:
            assert await response.text() == "Ollama is running"
    async with running(engine_replying("Hello")) as server:
        assert (await server.http.get(server.url)).status == 200


def test_the_flag() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert network_settings(parser.parse_args([]), KeyLimits())["ui"]
    assert not network_settings(parser.parse_args(["--no-ui"]), KeyLimits())["ui"]


# Events


async def test_events_describe_the_engine() -> None:
    async with running(engine_replying("Hello")) as server, watching(server) as events:
        started = time.monotonic()
        first = await anext(events)
        assert first["model"]["name"] == "org/tiny"
        assert first["model"]["max_rows"] == 8
        assert (first["running"], first["riders"], first["ttft"], first["requests"]) == (
            0,
            [],
            None,
            [],
        )
        server.engine.on_step(step_stats([0.1] * 98 + [4.0] * 2))
        event = await anext(events)
        watched = time.monotonic() - started
    assert (event["running"], event["waiting"]) == (3, 2)
    assert event["ttft"]["p50"] == pytest.approx(0.3, rel=0.05)
    assert event["itl"]["p50"] == event["itl"]["p95"] == pytest.approx(0.1, rel=0.05)
    assert event["itl"]["p99"] == pytest.approx(4.0, rel=0.05)
    assert event["kv"] == {"used": 512, "reserved": 4096, "prefixes": 256, "limit": 1 << 20}
    assert event["prefixes"] == {"queried": 14, "hit": 4}
    # 101 generated and 10 prefilled tokens, watched for half a second or more.
    least = 1 / max(1.0, watched + 1)
    assert 101 * least <= event["generated_pace"] <= 202
    assert 10 * least <= event["prefilled_pace"] <= 20


async def test_events_list_requests_without_their_text() -> None:
    slow = engine_replying(SECRET * 6, step_seconds=0.01)
    async with running(slow) as server, watching(server) as events:
        await anext(events)
        body = {**CHAT, "messages": [{"role": "user", "content": SECRET}], "n": 2}
        headers = {"X-Request-Id": "words-of-a-client"}
        stream = asyncio.create_task(server.events("/v1/chat/completions", body))
        status, _ = await server.post("/v1/completions", {"prompt": SECRET, "n": -1}, **headers)
        assert status == 400
        seen = [await anext(events), await anext(events)]
        while len(seen[-1]["requests"]) < 2:
            seen.append(await anext(events))
        chunks = await stream
    completion = json.loads(chunks[0].removeprefix("data: "))["id"]
    riders = seen[0]["riders"]
    assert {rider["id"] for rider in riders} == {f"{completion[-8:]}-{index}" for index in (0, 1)}
    assert seen[1]["riders"][0]["tokens"] > riders[0]["tokens"] > 0
    done, refused = seen[-1]["requests"]
    assert seen[-1]["riders"] == []
    assert (done["id"], done["status"]) == (completion, 200)
    assert done["output_tokens"] == 2 * (len(SECRET) * 6 + 1)
    assert 0 < done["first_token"] < done["seconds"]
    assert (refused["id"], refused["status"], refused["output_tokens"]) == (None, 400, None)
    assert refused["ago"] > done["ago"]
    assert "river" not in json.dumps(seen)
    assert "words-of-a-client" not in json.dumps(seen)


async def test_events_say_why_the_server_is_unavailable() -> None:
    absent = FakeEngine(None, ending(""))
    async with running(absent) as server, watching(server) as events:
        server.service.progress = "loading the weights"
        await anext(events)
        event = await anext(events)
        assert (event["status"], event["reason"]) == ("unavailable", "loading the weights")
        assert event["model"] is None
    async with running(engine_replying("Hello")) as server, watching(server) as events:
        server.engine.unhealthy = "the engine is started anew"
        await anext(events)
        event = await anext(events)
        assert event["reason"] == "the engine is started anew"
        assert event["model"]["name"] == "org/tiny"
        server.engine.unhealthy = None
        server.service.drain.draining = True
        await anext(events)
        assert (await anext(events))["reason"].startswith("draining")


async def test_the_number_of_watchers_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_WATCHERS", 1)
    async with running(engine_replying("Hello")) as server:
        async with watching(server) as events:
            await anext(events)
            status, refused = await server.get(page.EVENTS)
            assert (status, refused["error"]["code"]) == (429, "too_many_watchers")
        await until(lambda: server.service.live._watchers == 0)
        async with watching(server) as events:
            await anext(events)


async def test_the_events_end_with_the_server() -> None:
    async with aiohttp.ClientSession() as client:
        async with running(engine_replying("Hello")) as server:
            response = await client.get(server.url + page.EVENTS)
            await response.content.readline()
        assert (await response.text()).endswith("data: [DONE]\n\n")
