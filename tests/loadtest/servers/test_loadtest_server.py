"""The installed command ``chairlift bench``, against a real server with a tiny model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.page.page_check import check_page
from support.tiny import tiny_model_dir

from chairlift.loadtest.servers.child import ChildServer, ServerSpec
from chairlift.loadtest.servers.ports import free_port

pytestmark = pytest.mark.system

CHAIRLIFT = str(Path(sys.executable).parent / "chairlift")
PATIENCE = 120.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    model = tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")
    command = [CHAIRLIFT, "serve", str(model), "--port", str(port), "--max-rows", "4"]
    with ChildServer(ServerSpec("tiny", command, port), PATIENCE):
        yield f"http://127.0.0.1:{port}"


def bench(url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [CHAIRLIFT, "bench", "--base-url", url, "--check-metrics", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_a_sweep_with_clients_that_misbehave_agrees_with_the_server(
    url: str, tmp_path: Path
) -> None:
    page = tmp_path / "out" / "report.html"
    done = bench(
        url,
        *("--num-prompts", "20", "--random-input-len", "40", "--random-output-len", "30"),
        *("--random-range-ratio", "0.5", "--sweep", "max-concurrency=2,8", "--num-warmups", "1"),
        *("--cancel-rate", "0.3", "--slow-reader-rate", "0.1"),
        *("--slow-reader-bytes-per-s", "20000", "--html", str(page)),
        *("--save-result", "--save-detailed", "--result-filename", str(tmp_path / "r.json")),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Client and server agree:") == 2
    assert "requests ended: 20 by the server, 20 by the clients" in done.stdout
    assert "DISAGREE" not in done.stdout
    assert "bench: 20/20 requests in " in done.stderr
    for value in (2, 8):
        result = json.loads((tmp_path / f"r-{value}.json").read_text())
        assert result["metrics_agree"] is True
        assert (result["failed"], result["num_prompts"]) == (0, 20)
        # A cancellation may come too late, since several tokens can arrive together.
        assert 0 < result["cancelled"] <= 6
        assert result["completed"] + result["cancelled"] == 20
    checked = check_page(page.read_text())
    assert checked.charts[:2] == ["TTFT against throughput", "ITL against throughput"]
    assert (
        checked.charts[2:]
        == [*("Distribution of TTFT", "Distribution of ITL", "Rows and queue", "Requests")] * 2
    )
    assert "in the queue by the server" in checked.text


def test_without_misbehaving_clients_all_numbers_are_exact(url: str, tmp_path: Path) -> None:
    texts = [{"from": "human", "value": f"{word} " * 4} for word in ("sea", "ski", "sun")]
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([{"conversations": [text, text]} for text in texts]))
    done = bench(
        url,
        *("--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "6"),
        *("--endpoint", "/v1/chat/completions", "--request-rate", "30", "--temperature", "0"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The model may end its replies anywhere; all figures are exact and equal.
    assert "Client and server agree:" in done.stdout
    assert "requests completed: 6 by the server, 6 by the clients" in done.stdout
    assert "at least" not in done.stdout


def test_the_prompts_of_cancelled_chats_are_counted(url: str) -> None:
    done = bench(
        url,
        *("--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "64"),
        *("--prefix-repetition-suffix-len", "16", "--prefix-repetition-num-prefixes", "2"),
        *("--prefix-repetition-output-len", "8", "--duration", "1", "--max-concurrency", "3"),
        *("--num-prompts", "50", "--endpoint", "/v1/chat/completions", "--cancel-rate", "0.5"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bench, 1 s: " in done.stderr
    assert re.search(r"Cancelled requests: +[1-9]", done.stdout)
    # Cancelled chats report no usage, but bench counts their tokens: an exact number, not a bound.
    assert re.search(r"prompt tokens: (\d+) by the server, \1 by the clients", done.stdout)
