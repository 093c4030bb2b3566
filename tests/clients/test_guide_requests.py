"""The requests in JSON that the guides show for programs that are not installed."""

from __future__ import annotations

import json
import re
import urllib.request

import pytest
from support.api.server import PATIENCE, Server
from support.guides import SECTIONS, blocks

# Where the requests go.
PATHS = {
    "Open WebUI": "/v1/chat/completions",
    "Continue": "/v1/chat/completions",
    "aider": "/v1/chat/completions",
    "Agents that speak Responses": "/v1/responses",
    "Agents that speak Messages": "/v1/messages",
}


def test_every_request_has_a_path() -> None:
    assert {name for name, text in SECTIONS.items() if blocks(text, "json")} == PATHS.keys()


@pytest.mark.system
@pytest.mark.parametrize("name", PATHS)
def test_a_request_is_answered(name: str, server: Server) -> None:
    (body,) = blocks(SECTIONS[name], "json")
    assert f"`{PATHS[name]}`" in SECTIONS[name]
    request = urllib.request.Request(
        server.url + PATHS[name], body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        text = response.read().decode()
    events = [json.loads(data) for data in re.findall(r"^data: (\{.*)$", text, re.MULTILINE)]
    assert len(events) > 1
    assert not any(event.get("error") or event.get("type") == "error" for event in events)
