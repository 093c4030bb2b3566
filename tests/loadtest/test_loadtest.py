"""The load test: its parser, its arithmetic, and the whole of it against a small fake server.

The fake stands in for the server alone; flags, sockets, clock and report are the real ones. Data
sets, loads and the HTML report have files of their own.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_server import SMALL, FakeServer, bench, serving
from support.paths import TESTS

from chairlift.api.http.event_parser import SSEParser
from chairlift.loadtest import cli, compare, scenarios
from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.metrics import Reply, compute_metrics
from chairlift.loadtest.bench.verify import Difference, Verification, verification_report
from chairlift.loadtest.comparison import Comparison, ServerResult, comparison_report
from chairlift.loadtest.data.arrivals import arrival_offsets
from chairlift.loadtest.data.workload import WorkloadRequest, draw_lengths, random_requests
from chairlift.loadtest.errors import ServerError
from chairlift.loadtest.scenarios import measure_long_prompt
from chairlift.loadtest.servers import peers, procfs
from chairlift.loadtest.servers.child import ChildServer, ServerSpec, free_port

# ---------------------------------------------------------------------------------------------
# The stream parser


@settings(deadline=None)
@given(
    events=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1), max_size=6
    ),
    newline=st.sampled_from(["\n", "\r\n"]),
    data=st.data(),
)
def test_sse_is_the_same_however_it_is_cut(
    events: list[str], newline: str, data: st.DataObject
) -> None:
    stream = "".join(
        f": keep-alive{newline}{newline}event: chunk{newline}data: {event}{newline}{newline}"
        for event in events
    ).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parser = SSEParser()
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    found = [event for part in parts for event in parser.feed(part)]
    assert found == [event.encode() for event in events]


def test_sse_joins_data_lines_and_keeps_what_is_incomplete() -> None:
    parser = SSEParser()
    assert parser.feed(b"data: one\ndata:two\n") == []
    assert parser.feed(b"\ndata: thr") == [b"one\ntwo"]
    assert parser.feed(b"ee\n\n") == [b"three"]


# ---------------------------------------------------------------------------------------------
# Arithmetic, on numbers computed by hand


def _reply(start: float, chunks: list[float], **fields: Any) -> Reply:
    return Reply(10, start=start, end=chunks[-1], chunk_times=chunks, **fields)


def test_metrics_follow_vllms_definitions() -> None:
    replies = [
        # TTFT 1, E2EL 3, four tokens in three chunks: TPOT 2/3, ITLs 0.5 and 1.5.
        _reply(0.0, [1.0, 1.5, 3.0], usage_tokens=4),
        # One token: no TPOT, no ITL. TTFT = E2EL = 0.25.
        _reply(2.0, [2.25], usage_tokens=1),
        # No usage: its chunks are its tokens. TTFT 0.5, E2EL 0.75, TPOT = ITL = 0.25.
        _reply(2.5, [3.0, 3.25]),
        Reply(10, start=0.0, end=9.0, error="refused"),
    ]
    metrics = compute_metrics(replies, 5.0, {}, [50, 99])
    assert (metrics.completed, metrics.failed) == (3, 1)
    assert (metrics.total_input_tokens, metrics.total_output_tokens) == (30, 7)
    assert metrics.request_throughput == pytest.approx(3 / 5)
    assert metrics.output_throughput == pytest.approx(7 / 5)
    assert metrics.total_token_throughput == pytest.approx(37 / 5)
    assert metrics.request_goodput is None
    ttft, tpot, itl, e2el = (metrics.latencies[n] for n in ("ttft", "tpot", "itl", "e2el"))
    assert ttft.mean == pytest.approx(1000 * (1 + 0.25 + 0.5) / 3)
    assert ttft.median == pytest.approx(500)
    assert tpot.mean == pytest.approx(1000 * (2 / 3 + 0.25) / 2)
    assert itl.mean == pytest.approx(1000 * (0.5 + 1.5 + 0.25) / 3)
    assert itl.median == pytest.approx(500)
    assert itl.std == pytest.approx(1000 * float(np.std([0.5, 1.5, 0.25])))
    assert e2el.percentiles[50] == pytest.approx(750)
    # Second 3 has the chunks at 3.0, 3.0 and 3.25; at 2.5 the second reply has ended at 2.25.
    assert metrics.max_output_tokens_per_s == 3
    assert metrics.max_concurrent_requests == 2


def test_metrics_of_a_run_where_all_failed_are_zero() -> None:
    metrics = compute_metrics([Reply(10, error="refused")], 1.0, {"ttft": 100.0}, [99])
    assert (metrics.completed, metrics.failed, metrics.total_output_tokens) == (0, 1, 0)
    assert metrics.latencies["ttft"].percentiles[99] == 0
    assert (metrics.request_goodput, metrics.max_concurrent_requests) == (0, 0)


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ({"ttft": 1000.0}, 2),
        ({"ttft": 999.0}, 1),
        ({"tpot": 100.0}, 1),  # a reply of one token cannot miss it
        ({"ttft": 1000.0, "e2el": 3000.0}, 2),
        ({"ttft": 100.0, "e2el": 3000.0}, 0),
    ],
)
def test_goodput_counts_requests_that_meet_every_objective(
    objectives: dict[str, float], good: int
) -> None:
    replies = [
        _reply(0.0, [1.0, 3.0], usage_tokens=2),
        _reply(0.0, [0.25], usage_tokens=1),
        Reply(10, error="refused"),
    ]
    metrics = compute_metrics(replies, 2.0, objectives, [99])
    assert metrics.request_goodput == pytest.approx(good / 2)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
def test_arrivals_keep_the_rate_and_have_the_burstiness(burstiness: float) -> None:
    offsets = arrival_offsets(4000, 8.0, burstiness, np.random.default_rng(1))
    assert offsets == arrival_offsets(4000, 8.0, burstiness, np.random.default_rng(1))
    assert offsets == sorted(offsets)
    assert offsets[-1] == pytest.approx(4000 / 8.0)
    gaps = np.diff(offsets)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.15, abs=1e-9)


def test_infinite_rate_sends_all_at_once() -> None:
    assert arrival_offsets(3, math.inf, 1.0, np.random.default_rng(0)) == [0.0] * 3


def test_range_ratio_is_uniform_over_both_ends() -> None:
    lengths = draw_lengths(10, 0.2, 2000, np.random.default_rng(0))
    assert set(lengths) == {8, 9, 10, 11, 12}
    assert draw_lengths(7, 0.0, 3, np.random.default_rng(0)) == [7, 7, 7]
    assert min(draw_lengths(1, 0.9, 100, np.random.default_rng(0))) == 1


async def test_random_prompts_have_the_tokens_asked_for_and_repeat_with_the_seed() -> None:
    async def count(text: str) -> int:
        # Long words are two tokens, and one token goes before everything, as a BOS does.
        return 1 + sum(1 + (len(word) > 5) for word in text.split())

    async def cannot_count(text: str) -> None:
        return None

    lens = [5, 50, 200]
    built = [await random_requests(lens, lens, np.random.default_rng(3), count) for _ in "ab"]
    assert built[0] == built[1]
    assert [await count(request.prompt) for request in built[0]] == pytest.approx(lens, abs=1)
    assert len({request.prompt.split()[0] for request in built[0]}) > 1
    by_words = await random_requests(lens, lens, np.random.default_rng(3), cannot_count)
    assert [len(request.prompt.split()) for request in by_words] == lens


# ---------------------------------------------------------------------------------------------
# The whole of it, against a fake server on a real socket


def test_bench_prints_and_saves_what_vllm_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    flags = (
        *("--max-concurrency", "2", "--num-warmups", "1", "--request-rate", "200"),
        *("--goodput", "ttft:5000", "tpot:5000", "--metric-percentiles", "50,99.9"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--label", "fake", "--temperature", "0.5"),
        *("--save-result", "--save-detailed", "--result-dir", str(tmp_path / "results")),
    )
    with serving(FakeServer(token_seconds=0.001)) as fake:
        assert bench(fake, *SMALL, *flags) == cli.EXIT_OK
    assert fake.peak == 2
    assert len(fake.bodies) == 7  # one of them the warm-up
    for body in fake.bodies:
        assert body["model"] == "folder/fake-model"
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert (body["temperature"], body["ignore_eos"], body["max_tokens"]) == (0.5, True, 5)
        assert len(body["prompt"].split()) == 8
    assert {headers["Authorization"] for headers in fake.headers} == {"Bearer secret"}

    printed = capsys.readouterr()
    assert " Serving Benchmark Result ".center(50, "=") in printed.out
    for label in (
        *("Successful requests:", "Failed requests:", "Maximum request concurrency:"),
        *("Request rate configured (RPS):", "Benchmark duration (s):", "Total input tokens:"),
        *("Total generated tokens:", "Request throughput (req/s):", "Request goodput (req/s):"),
        *("Output token throughput (tok/s):", "Peak output token throughput (tok/s):"),
        *("Peak concurrent requests:", "Total token throughput (tok/s):", "Mean TTFT (ms):"),
        *("Time per Output Token (excl. 1st token)", "Median TPOT (ms):", "P50 ITL (ms):"),
        *("P99.9 E2EL (ms):",),
    ):
        assert label in printed.out
    assert "bench: 6/6 requests" in printed.err

    (saved,) = (tmp_path / "results").iterdir()
    assert saved.name.startswith("fake-200.0qps-concurrency2-fake-model-")
    result = json.loads(saved.read_text())
    scalars = {
        *("date", "backend", "endpoint_type", "label", "model_id", "num_prompts", "request_rate"),
        *("burstiness", "max_concurrency", "duration", "completed", "failed"),
        *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
        *("output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
        *("max_concurrent_requests",),
    }
    latencies = {
        f"{kind}_{name}_ms"
        for kind in ("mean", "median", "std", "p50", "p99.9")
        for name in ("ttft", "tpot", "itl", "e2el")
    }
    detailed = {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"}
    assert scalars | latencies | detailed | {"start_times"} <= result.keys()
    assert result["backend"] == result["endpoint_type"] == "openai"
    assert (result["completed"], result["failed"], result["max_concurrency"]) == (6, 0, 2)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (48, 30)
    assert result["output_lens"] == [5] * 6
    assert [len(itls) for itls in result["itls"]] == [4] * 6
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])


def test_bench_sends_chats_and_does_not_take_the_role_for_a_token(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a b c", "output_tokens": 3}\n\n{"prompt": "d e"}\n')
    with serving(FakeServer()) as fake:
        code = bench(
            fake,
            *("--endpoint", "/v1/chat/completions", "--num-prompts", "3", "--model", "named"),
            *("--dataset-name", "custom", "--dataset-path", str(prompts), "--disable-tqdm"),
            *("--save-result", "--save-detailed", "--result-filename", str(tmp_path / "r.json")),
        )
    assert code == cli.EXIT_OK
    assert sorted(body["max_completion_tokens"] for body in fake.bodies) == [3, 3, 256]
    assert all("ignore_eos" not in body and "temperature" not in body for body in fake.bodies)
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["backend"] == "openai-chat"
    assert result["request_rate"] == "inf"
    assert result["output_lens"] == [3, 256, 3]
    assert [len(itls) + 1 for itls in result["itls"]] == [3, 256, 3]
    assert result["generated_texts"][0] == " a b c"


def test_bench_counts_failures_and_shows_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    refused: list[str] = []

    def fail(prompt: str) -> bool:
        refused.append(prompt)
        return len(refused) == 2

    with serving(FakeServer(fail=fail)) as fake:
        assert bench(fake, *SMALL, "--disable-tqdm") == cli.EXIT_FAILED
    out = capsys.readouterr().out
    assert "1 of 6 requests failed; the first: HTTP 429 Too Many Requests: no room for you" in out
    with serving(FakeServer(break_off=lambda prompt: True)) as fake:
        assert bench(fake, *SMALL, "--disable-tqdm") == cli.EXIT_FAILED
    assert "6 of 6 requests failed; the first: error event: the engine" in capsys.readouterr().out


def test_verify_passes_when_the_batch_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeServer(token_seconds=0.002)) as fake:
        assert bench(fake, *SMALL, "--verify") == cli.EXIT_OK
    assert len(fake.bodies) == 12
    assert all(body["temperature"] == 0 for body in fake.bodies)
    assert "Replies that differ from their solo run: 0 of 6" in capsys.readouterr().out


def test_verify_finds_replies_that_depend_on_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--save-result", "--result-filename", str(tmp_path / "r.json"))
    with serving(FakeServer(batch_dependent=True, token_seconds=0.005)) as fake:
        # Two prompts at a time, so that each runs among others to its end; the last may not.
        assert bench(fake, *SMALL, "--verify", *flags) == cli.EXIT_FAILED
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["verify_compared"] == 6
    assert 0 < result["verify_differing"] <= 6
    out = capsys.readouterr().out
    assert f"Replies that differ from their solo run: {result['verify_differing']} of 6" in out
    assert "crowd" in out


def test_verification_report_points_at_the_first_difference() -> None:
    long = "x" * 100
    under_load = Reply(1, text=f"{long}abc", chunk_times=[0.0])
    alone = Reply(1, text=f"{long}abd", chunk_times=[0.0])
    result = Verification(2, 0, [Difference(1, 102, under_load, alone)])
    lines = verification_report(result).splitlines()
    assert lines[0] == "Replies that differ from their solo run: 1 of 2"
    assert lines[1].strip() == "request 1, from character 102:"
    assert lines[2].endswith("…'xxxxxxxxxxxxxxxxxxabc'")
    assert not result.passed


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--verify", "--temperature", "0.7"), "contradicts --temperature"),
        (("--goodput", "speed:5"), "--goodput speed:5"),
        (("--goodput", "ttft"), "NAME:MILLISECONDS"),
        (("--percentile-metrics", "ttft,nothing"), "--percentile-metrics nothing"),
        (("--dataset-name", "custom"), "needs --dataset-path"),
        (("--dataset-name", "custom", "--dataset-path", "/nowhere"), "No such file"),
        (("--random-range-ratio", "1"), "--random-range-ratio"),
        (("--request-rate", "0"), "--request-rate"),
        (("--endpoint", "/v1/embeddings"), "--endpoint"),
        (("--max-concurrency", "0"), "--max-concurrency"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(
    flags: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # A model is named, so that nothing has to be asked of the server that is not there.
    fake = FakeServer(base_url=f"http://127.0.0.1:{free_port()}")
    assert bench(fake, "--model", "m", *flags) == cli.EXIT_USAGE
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1


def test_an_absent_server_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServer(base_url=f"http://127.0.0.1:{free_port()}")
    assert bench(fake) == cli.EXIT_FAILED
    assert "cannot reach" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------
# The comparison


async def test_long_prompt_finds_the_gap_it_makes() -> None:
    with serving(FakeServer(token_seconds=0.01, stall=("long", 0.3))) as fake:
        async with OpenAIClient(fake.base_url) as client:
            running = [WorkloadRequest(f"stream {n}", 2, 500) for n in range(3)]
            result = await measure_long_prompt(client, running, WorkloadRequest("long", 1, 4))
            assert result.streams == 3
            assert result.longest_gap > 0.25
            assert result.quiet_gap < result.longest_gap / 2
            # Streams that end too soon prove nothing.
            short = [WorkloadRequest("stream", 1, 4)] * 3
            with pytest.raises(ServerError, match="ended"):
                await measure_long_prompt(client, short, WorkloadRequest("long", 1, 4))


def _result(name: str, tokens_per_s: int, ttft: float) -> ServerResult:
    replies = [_reply(0.0, [ttft, 1.0], usage_tokens=tokens_per_s)]
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


def _assert_ends(pid: int) -> None:
    deadline = time.monotonic() + 5
    stat = Path(f"/proc/{pid}/stat")
    # A dead process whose new parent has not buried it yet shows as a zombie.
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


@pytest.mark.skipif(not procfs.available(), reason="reads /proc")
def test_child_server_is_watched_and_ended_with_all_it_started() -> None:
    port = free_port()
    # It answers 200 to anything, and has a child of its own that uses the processor.
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
    _assert_ends(pid)
    _assert_ends(spinner)


def test_child_server_that_cannot_start_says_so(capsys: pytest.CaptureFixture[str]) -> None:
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
    # Whether the promises hold is a matter of time, which a busy machine does not keep.
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
