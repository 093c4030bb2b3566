"""The comparison of servers, and the child servers that it starts and measures."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.fake_server import FakeServer, serving
from support.paths import TESTS

from chairlift.loadtest import compare, scenarios
from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.metrics import Reply, compute_metrics
from chairlift.loadtest.comparison import Comparison, ServerResult, comparison_report
from chairlift.loadtest.data.workload import WorkloadRequest
from chairlift.loadtest.errors import ServerError
from chairlift.loadtest.scenarios import LongPromptResult, measure_long_prompt
from chairlift.loadtest.servers import peers, procfs
from chairlift.loadtest.servers.child import ChildServer, ServerSpec
from chairlift.loadtest.servers.ports import free_port


async def test_long_prompt_measures_the_gap_that_it_causes() -> None:
    with serving(FakeServer(token_seconds=0.01, stall=("long", 0.3))) as fake:
        async with OpenAIClient(fake.base_url) as client:
            running = [WorkloadRequest(f"stream {n}", 2, 500) for n in range(3)]
            result = await measure_long_prompt(client, running, WorkloadRequest("long", 1, 4))
            assert result.streams == 3
            assert result.longest_gap > 0.25
            assert result.quiet_gap < result.longest_gap / 2
            # Streams that end too soon are an error: the long prompt delays none of them.
            short = [WorkloadRequest("stream", 1, 4)] * 3
            with pytest.raises(ServerError, match="ended"):
                await measure_long_prompt(client, short, WorkloadRequest("long", 1, 4))


def _result(name: str, tokens_per_s: int, ttft: float) -> ServerResult:
    replies = [Reply(10, end=1.0, chunk_times=[ttft, 1.0], usage_tokens=tokens_per_s)]
    return ServerResult(name, ("a note",), compute_metrics(replies, 1.0, {}, [50, 99]))


def test_comparison_checks_the_promises() -> None:
    ours, theirs = _result("ours", 150, 0.1), _result("mlx-lm", 100, 0.2)
    ours.idle_percent = 0.5
    comparison = Comparison([ours, theirs])
    assert comparison.holds
    report = comparison_report(comparison)
    assert "ours / mlx-lm: 1.50 x tokens/s, 0.50 x p50 TTFT" in report
    assert "BROKEN" not in report

    ours.idle_percent = 50.0
    slower = Comparison([ours, _result("mlx-lm", 149, 0.05)])
    assert [check.holds for check in slower.checks] == [True, True, False, False, False]
    assert comparison_report(slower).count("BROKEN") == 3


@pytest.mark.parametrize(
    ("median", "longest", "holds"),
    [
        *((0.8, 2.3, True), (0.4, 1.4, True), (0.4, 1.6, False)),
        # Most tokens arrived together with others.
        *((0.0, 1.4, True), (0.0, 1.6, False)),
    ],
)
def test_a_long_prompt_may_not_stop_streams_for_long(
    median: float, longest: float, holds: bool
) -> None:
    ours = _result("ours", 150, 0.1)
    ours.long_prompt = LongPromptResult(15, 4000, 6.0, 0.03, median, longest, 300)
    assert Comparison([ours]).holds == holds
    assert "4000-token prompt" in comparison_report(Comparison([ours]))


def _assert_process_ends(pid: int) -> None:
    deadline = time.monotonic() + 180
    stat = Path(f"/proc/{pid}/stat")
    # A dead process is a zombie until its new parent has waited for it.
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


@pytest.mark.skipif(not procfs.available(), reason="reads /proc")
def test_a_child_server_is_measured_and_ended_with_its_own_children() -> None:
    port = free_port()
    # The server answers 200 to anything; its child process uses the CPU.
    program = (
        "import subprocess, sys\n"
        "from http.server import BaseHTTPRequestHandler, HTTPServer\n"
        "class Handler(BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers(); self.wfile.write(pid)\n"
        "spinner = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "pid = str(spinner.pid).encode()\n"
        f"HTTPServer(('127.0.0.1', {port}), Handler).serve_forever()\n"
    )
    spec = ServerSpec("fake", [sys.executable, "-c", program], port)
    with ChildServer(spec, 20.0) as server:
        pid = server.pid
        (spinner,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        before = procfs.cpu_seconds(pid)
        while procfs.cpu_seconds(pid) < before + 0.1:
            pass
    _assert_process_ends(pid)
    _assert_process_ends(spinner)


@pytest.mark.skipif(not procfs.available(), reason="reads /proc")
def test_sigterm_ends_a_command_and_its_server() -> None:
    port = free_port()
    command = (
        "import asyncio, sys, uvloop\n"
        "from chairlift.loadtest.servers.child import ChildServer, ServerSpec, exit_on_sigterm\n"
        "program = ('from http.server import HTTPServer, SimpleHTTPRequestHandler as H;'\n"
        "           'H.do_GET = lambda h: (h.send_response(200), h.end_headers());'\n"
        f"           'HTTPServer((\"127.0.0.1\", {port}), H).serve_forever()')\n"
        "exit_on_sigterm()\n"
        f"spec = ServerSpec('fake', [sys.executable, '-c', program], {port})\n"
        # Printed in the loop: a signal that comes while it starts confuses uvloop.
        "async def work(pid):\n"
        "    print(pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "with ChildServer(spec, 20.0) as server:\n"
        "    uvloop.run(work(server.pid))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", command], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        pid = int(running.stdout.readline())
        running.terminate()
        assert running.wait(20) == 128 + signal.SIGTERM
    _assert_process_ends(pid)


def test_a_child_server_that_cannot_start_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    spec = ServerSpec("fake", [sys.executable, "-c", "print('broken'); exit(3)"], free_port())
    with pytest.raises(ServerError, match="ended with code 3"), ChildServer(spec, 20.0):
        pass
    assert "broken" in capsys.readouterr().err


def test_compare_measures_a_server_from_start_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    program = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "from aiohttp import web\n"
        "from support.fake_server import FakeServer\n"
        f"web.run_app(FakeServer(token_seconds=0.01).app(), host='127.0.0.1', port={port})\n"
    )
    spec = ServerSpec("ours", [sys.executable, "-c", program], port, notes=("a fake",))
    monkeypatch.setattr(peers, "ours", lambda model, extra: spec)
    monkeypatch.setattr(scenarios, "_SETTLE_SECONDS", 0.0)
    model, out = tmp_path / "model.gguf", tmp_path / "out.json"
    model.touch()
    flags = (
        *("--only", "ours,llama", "--gguf", str(model), "--streams", "3", "--requests", "4"),
        *("--prompt-tokens", "7", "--output-tokens", "5", "--long-prompt-tokens", "40"),
        *("--idle-seconds", "0.3", "--out", str(out)),
    )
    monkeypatch.setattr(sys, "argv", ["compare", *flags])
    # Some promises depend on timing, which a busy machine may not keep.
    assert compare.main() in (0, 1)

    figures = json.loads(out.read_text())["servers"]["ours"]
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (4, 0, 20)
    assert (figures["verify_compared"], figures["verify_differing"]) == (4, 0)
    assert figures["long_prompt"]["streams"] == 2
    assert figures["long_prompt"]["prompt_tokens"] == 40
    assert figures.get("idle_percent") is not None or not procfs.available()
    printed = capsys.readouterr().out
    assert "holds  ours: no request fails: 0 failed" in printed
    assert "no greedy reply differs from its solo run: 0 of 4 differ" in printed


def test_compare_module_has_its_flags() -> None:
    command = [sys.executable, "-m", "chairlift.loadtest.compare", "--only", "nobody"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "--only nobody" in result.stderr
