"""The examples in docs/guides/apis.md run unchanged, except for address and model name."""

from __future__ import annotations

import asyncio
import re

import pytest
from support.api.api_server import ending, running
from support.api.fake_engine import FakeEngine, model_info
from support.paths import ROOT

PAGE = ROOT / "docs" / "guides" / "apis.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


async def test_the_examples_of_the_api_guide_run(capsys: pytest.CaptureFixture[str]) -> None:
    async with running(FakeEngine(model_info(), ending("Zermatt"))) as server:
        for example in EXAMPLES:
            code = example.replace("http://127.0.0.1:8000", server.url)
            code = code.replace("SmolLM2-135M-Instruct", "org/tiny")
            # close() ends the client's connections before the event loop ends.
            await asyncio.to_thread(exec, f"{code}\nclient.close()\n", {})
    assert capsys.readouterr().out == "Zermatt\n" * 7
