"""The banner after loading: few lines of text, or fields of one JSON object."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.fake_engine import model_info

from chairlift.api.http.version import VERSION
from chairlift.api.server.banner import banner_fields, banner_lines
from chairlift.api.server.start_progress import StartProgress
from chairlift.api.service import Service
from chairlift.api.settings import ServerSettings
from chairlift.engine.logs.setup import BANNER, LOG_FORMATS, log_handler
from chairlift.engine.messages import Loading

ADDRESS = "http://127.0.0.1:8000"


@given(
    sizes=st.tuples(*[st.integers(0, 2**50)] * 3),
    advice=st.lists(st.text(min_size=1), max_size=4),
    page=st.booleans(),
    bits=st.sampled_from([None, 4, 8]),
)
def test_the_banner_is_short_and_has_the_addresses(
    sizes: tuple[int, int, int], advice: list[str], page: bool, bits: int | None
) -> None:
    weights, kv, prefix = sizes
    info = model_info(
        weight_bytes=weights, kv_limit_bytes=kv, prefix_bytes=prefix, advice=tuple(advice)
    )
    lines = banner_lines("org/tiny", info, ADDRESS, page)
    assert len(lines) == 4 + page + bool(advice) <= 6
    assert f"Chairlift {VERSION} serves org/tiny (llama, " in lines[0]
    assert lines[0].endswith("float32) on cpu")
    assert "context 2048 tokens, 8 rows, KV cache " in lines[1]
    assert lines[1].endswith("prefix cache off") == (prefix == 0)
    assert any(line.endswith(f"{ADDRESS}/v1") for line in lines)
    assert any(line.endswith(f" {ADDRESS}/") for line in lines) == page
    if advice:
        assert advice[0] in lines[-1]
        assert lines[-1].endswith(" more: chairlift doctor)") == (len(advice) > 1)


@pytest.mark.parametrize("log_format", LOG_FORMATS)
def test_a_log_has_the_lines_or_the_fields(log_format: Any) -> None:
    about = ("org/tiny", model_info(advice=("cores: end something",)), ADDRESS, True)
    written = io.StringIO()
    logger = logging.Logger("chairlift.api.server.serve")
    logger.addHandler(log_handler(log_format, "api", written))
    logger.info("ready", extra={BANNER: banner_lines(*about), **banner_fields(*about)})
    lines = written.getvalue().splitlines()
    if log_format == "text":
        assert lines == banner_lines(*about)
        return
    (line,) = lines
    fields = json.loads(line)
    assert BANNER not in fields
    assert fields["message"] == "ready"
    assert (fields["model"], fields["max_rows"], fields["kv_bytes"]) == ("org/tiny", 8, 1 << 20)
    assert (fields["api"], fields["page"]) == (f"{ADDRESS}/v1", f"{ADDRESS}/")
    assert fields["advice"] == ["cores: end something"]


def test_loading_is_few_lines_and_the_health_reply(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    service = Service(ServerSettings())
    show = StartProgress(service)
    for done in range(0, 10_001, 10):
        show(Loading("loading weights", done * 1_000_000, 10_000_000_000))
        assert service.progress == f"loading weights: {done} of 10000 MB"
    show(Loading("first step"))
    show.close()
    assert service.progress == "first step"
    assert len(caplog.messages) == 3
    assert caplog.messages[-1] == "first step"
