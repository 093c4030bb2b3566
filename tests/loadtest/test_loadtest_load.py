"""The load: ramps, durations, sweeps, and clients that disconnect or read slowly."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from support.api.api_server import ids, running, until
from support.api.fake_engine import FakeEngine, Scripted, model_info
from support.fake_server import SMALL, FakeServer, bench, serving

from chairlift.engine.messages import Submit
from chairlift.loadtest import cli
from chairlift.loadtest.bench import crosscheck
from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.crosscheck import compare
from chairlift.loadtest.bench.metrics import Reply, compute_metrics
from chairlift.loadtest.bench.server_metrics import parse_scrape
from chairlift.loadtest.data.arrivals import Ramp
from chairlift.loadtest.data.workload import WorkloadRequest
from chairlift.loadtest.servers.ports import free_port


@pytest.mark.parametrize(
    ("ramp", "gaps"),
    [
        (Ramp("linear", 1.0, 4.0), [1, 1 / 2, 1 / 3, 1 / 4]),
        (Ramp("exponential", 1.0, 8.0), [1, 1 / 2, 1 / 4, 1 / 8]),
    ],
)
def test_a_ramp_climbs_from_one_request_to_the_next(ramp: Ramp, gaps: list[float]) -> None:
    offsets = ramp.offsets(4, math.inf, np.random.default_rng(0))
    assert offsets == pytest.approx(np.cumsum(gaps).tolist())
    drawn = ramp.offsets(4000, 1.0, np.random.default_rng(0))
    assert drawn == sorted(drawn)
    even = ramp.offsets(4000, math.inf, np.random.default_rng(0))
    assert drawn[-1] == pytest.approx(even[-1])
    assert drawn[2000] == pytest.approx(even[2000], rel=0.1)
    # The number of requests that fit a time: the inverse of the offsets.
    assert ramp.count(even[-1]) == pytest.approx(4000, rel=0.001)


def test_a_duration_at_a_rate_is_a_number_of_requests() -> None:
    with serving(FakeServer()) as fake:
        assert bench(fake, *SMALL, "--duration", "0.2", "--request-rate", "100") == cli.EXIT_OK
        assert len(fake.bodies) == 20
        assert len({body["prompt"] for body in fake.bodies}) == 20
        ramp = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "50")
        assert bench(fake, *SMALL, "--duration", "0.2", *ramp, "--ramp-up-end-rps", "200") == 0
        # The mean of 1 / rate over the ramp gives 108 requests a second.
        assert len(fake.bodies) == 20 + 22


def test_a_duration_without_a_rate_keeps_all_clients_busy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        *("--duration", "0.5", "--max-concurrency", "2", "--verify", "--num-prompts", "3"),
        *("--save-result", "--save-detailed", "--result-filename", str(tmp_path / "r.json")),
    )
    with serving(FakeServer(token_seconds=0.002)) as fake:
        assert bench(fake, *SMALL, *flags) == cli.EXIT_OK
    result = json.loads((tmp_path / "r.json").read_text())
    sent = result["num_prompts"]
    assert sent == result["completed"] == result["verify_compared"]
    assert (fake.peak, len(fake.bodies)) == (2, 2 * sent)
    # Three prompts in turn, then from the first again.
    prompts = [body["prompt"] for body in fake.bodies[:sent]]
    assert sent > 3
    assert sorted(set(prompts[:5])) == sorted(set(prompts))
    assert result["generated_texts"][0] == result["generated_texts"][3]
    assert 0.5 <= result["duration"] < 5
    assert f"bench, 0.5 s: {sent} requests in " in capsys.readouterr().err


def test_cancelled_requests_are_counted_separately(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        *("--num-prompts", "10", "--random-input-len", "8", "--random-output-len", "30"),
        *("--cancel-rate", "0.4", "--verify", "--max-concurrency", "2"),
        *("--save-result", "--save-detailed", "--result-filename", str(tmp_path / "r.json")),
    )
    with serving(FakeServer(token_seconds=0.002)) as fake:
        assert bench(fake, *flags) == cli.EXIT_OK
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"], result["cancelled"]) == (6, 0, 4)
    assert result["total_output_tokens"] == 6 * 30
    assert sorted(result["output_lens"]) == [0] * 4 + [30] * 6
    cancelled = [
        len(itls) + 1
        for itls, n in zip(result["itls"], result["output_lens"], strict=True)
        if not n
    ]
    assert all(1 <= tokens < 30 for tokens in cancelled)
    # Cancelled requests have no reply to compare.
    assert result["verify_compared"] == 6
    printed = capsys.readouterr()
    assert "Cancelled requests:                      4" in printed.out
    assert ", 4 cancelled" in printed.err


async def test_the_server_sees_that_a_client_disconnected() -> None:
    with serving(FakeServer(token_seconds=0.01)) as fake:
        async with OpenAIClient(fake.base_url) as client:
            reply = await client.complete(WorkloadRequest("a b", 2, 5000, cancel_after=3))
            assert (reply.cancelled, reply.ok, reply.error) == (True, False, "")
            assert (len(reply.chunk_times), reply.output_tokens) == (3, 0)
            assert reply.text == " a b a"
            await until(lambda: fake.running == 0)


async def test_a_client_disconnects_at_a_token_although_chunks_have_several() -> None:
    def script(request: Submit, index: int) -> Scripted:
        return Scripted(ids("word " * 40), finish="length", chunk=4)

    engine = FakeEngine(model_info(), script, step_seconds=0.01)
    async with running(engine) as server, OpenAIClient(server.url) as client:
        reply = await client.complete(WorkloadRequest("Hi", 2, 200, cancel_after=6))
        assert reply.cancelled
        assert (len(reply.chunk_times), reply.received_tokens) == (2, 8)
        await until(lambda: bool(engine.closed))


async def test_a_slow_reader_keeps_to_its_bytes_per_second() -> None:
    # 8 MB: more than the sockets' buffers hold, so that the server must wait for the reader.
    endless = WorkloadRequest("x" * 20_000, 1, 400)
    with serving(FakeServer()) as fake:
        async with OpenAIClient(fake.base_url) as client:
            slow = asyncio.create_task(
                client.complete(WorkloadRequest("x" * 20_000, 1, 400, bytes_per_s=100_000.0))
            )
            assert (await client.complete(endless)).ok
            await asyncio.sleep(0.3)
            assert fake.running == 1
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)

            # An event has some 70 bytes: 50 of them take more than half a second.
            started = time.perf_counter()
            reply = await client.complete(WorkloadRequest("word", 1, 50, bytes_per_s=5000.0))
            assert time.perf_counter() - started > 0.5
            assert (reply.ok, reply.slow, reply.output_tokens) == (True, True, 50)


def test_slow_readers_count_in_throughput_but_not_in_latencies() -> None:
    quick = Reply(10, start=0.0, end=1.0, chunk_times=[0.5, 1.0], usage_tokens=2)
    slow = Reply(10, start=0.0, end=9.0, chunk_times=[8.0, 9.0], usage_tokens=2, slow=True)
    cancelled = Reply(10, start=0.0, end=9.0, chunk_times=[8.0, 9.0], cancelled=True)
    metrics = compute_metrics([quick, slow, cancelled], 10.0, {"ttft": 9e9}, [99])
    assert (metrics.completed, metrics.failed, metrics.cancelled, metrics.slow) == (2, 0, 1, 1)
    assert (metrics.total_input_tokens, metrics.total_output_tokens) == (20, 4)
    assert metrics.latencies["ttft"].percentiles[99] == pytest.approx(500)
    assert metrics.latencies["itl"].mean == pytest.approx(500)
    assert metrics.request_goodput == pytest.approx(0.1)


def test_a_sweep_runs_each_value_with_new_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--save-result", "--result-filename", str(tmp_path / "r.json"))
    with serving(FakeServer(token_seconds=0.001)) as fake:
        assert bench(fake, *SMALL, "--sweep", "max-concurrency=1,3", *flags) == cli.EXIT_OK
        assert len({body["prompt"] for body in fake.bodies}) == 12
        second = {body["prompt"] for body in fake.bodies[6:]}
        # The second run of a sweep has the second seed.
        assert bench(fake, *SMALL, "--max-concurrency", "3", "--seed", "1") == cli.EXIT_OK
        assert {body["prompt"] for body in fake.bodies[12:]} == second
    results = [json.loads((tmp_path / f"r-{n}.json").read_text()) for n in (1, 3)]
    assert [result["max_concurrency"] for result in results] == [1, 3]
    printed = capsys.readouterr()
    assert "bench: run 2 of 2: 3 at once" in printed.err
    table = printed.out[printed.out.index(" Sweep ") :].splitlines()
    assert [line.split()[:3] for line in table[2:4]] == [["1", "at", "once"], ["3", "at", "once"]]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--sweep", "seed=1,2"), "--sweep seed=1,2: give request-rate=A,B,..."),
        (("--sweep", "max-concurrency=1,two"), "--sweep max-concurrency=1,two"),
        (("--sweep", "request-rate=4,4"), "two or more different values"),
        (("--sweep", "request-rate=0,4"), "--request-rate must be greater than 0"),
        (("--sweep", "request-rate=1,2", "--request-rate", "3"), "leave that flag out"),
        (("--seed", "-1"), "--seed must not be negative"),
        (("--duration", "5"), "--duration needs --request-rate"),
        (("--duration", "0", "--request-rate", "1"), "--duration must be greater than 0"),
        (("--request-rate", "1e-320"), "--request-rate must be between 1e-09 and 1e+09"),
        (("--request-rate", "1e300"), "--request-rate must be between 1e-09 and 1e+09"),
        (("--burstiness", "1e-300"), "--burstiness must be between 0.001 and 1e+09"),
        (("--burstiness", "1e308"), "--burstiness must be between 0.001 and 1e+09"),
        (("--num-prompts", "9" * 20), "--num-prompts must be at most 2147483647"),
        (("--duration", "1e308", "--request-rate", "1e9"), "more than 10,000,000 requests"),
        (("--duration", "1e12", "--request-rate", "1e3"), "more than 10,000,000 requests"),
        (
            (
                *("--duration", "1e9", "--ramp-up-strategy", "linear"),
                *("--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2"),
            ),
            "more than 10,000,000 requests",
        ),
        (("--temperature", "nan"), "--temperature must be a number"),
        (("--slow-reader-bytes-per-s", "inf"), "--slow-reader-bytes-per-s must be greater"),
        (("--ramp-up-strategy", "linear"), "go together"),
        (
            ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "0", "--ramp-up-end-rps", "2"),
            "--ramp-up-start-rps must be greater than 0",
        ),
        (
            ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "2", "--ramp-up-end-rps", "2"),
            "must be below",
        ),
        (("--cancel-rate", "1.5"), "--cancel-rate is a part of 1"),
        (("--slow-reader-rate", "nan"), "--slow-reader-rate is a part of 1"),
        (("--slow-reader-bytes-per-s", "0"), "--slow-reader-bytes-per-s must be greater"),
        (("--prefix-repetition-num-prefixes", "0"), "--prefix-repetition-num-prefixes must be"),
        (("--dataset-name", "sharegpt"), "sharegpt needs --dataset-path"),
        (("--dataset-path", "x"), "goes with --dataset-name sharegpt, custom, trace"),
        (
            ("--dataset-name", "trace", "--dataset-path", "x", "--request-rate", "1"),
            "a trace says when requests arrive",
        ),
        (("--html", "/proc/none/report.html"), "--html"),
    ],
)
def test_wrong_loads_are_refused_in_one_line(
    flags: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeServer(base_url=f"http://127.0.0.1:{free_port()}")
    assert bench(fake, "--model", "m", *flags) == cli.EXIT_USAGE
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1


def _scrape(stop: int, abort: int, prompt: int, generated: int) -> str:
    return (
        "# TYPE vllm:request_success counter\n"
        f'vllm:request_success_total{{finished_reason="stop"}} {stop}\n'
        f'vllm:request_success_total{{finished_reason="abort"}} {abort}\n'
        "# TYPE vllm:request_prompt_tokens histogram\n"
        f"vllm:request_prompt_tokens_sum {prompt}\n"
        "# TYPE vllm:generation_tokens counter\n"
        f"vllm:generation_tokens_total {generated}\n"
    )


def test_complete_replies_are_compared_exactly_and_cancelled_ones_within_bounds() -> None:
    requests = [WorkloadRequest("a", 9, 20)] * 4
    complete = Reply(10, chunk_times=[0.1] * 20, usage_tokens=20)
    cancelled = Reply(9, chunk_times=[0.1] * 6, cancelled=True)
    failed = Reply(9, chunk_times=[0.1] * 2, error="it broke off")
    before = parse_scrape(_scrape(5, 5, 500, 500))

    def verdicts(replies: list[Reply], after: str, prompts: dict[int, int | None]) -> list[str]:
        checks = compare(before, parse_scrape(after), requests[: len(replies)], replies, prompts)
        return [f"{check.expected}: {check.server:.0f}, {check.holds}" for check in checks]

    exact = verdicts([complete, complete], _scrape(7, 5, 520, 539), {})
    assert exact == ["2: 2, True", "2: 2, True", "20: 20, True", "40: 39, False"]
    bounded = verdicts([complete, cancelled], _scrape(6, 6, 520, 527), {1: 10})
    assert bounded == [
        "at least 1, at most 2: 1, True",
        "2: 2, True",
        "20: 20, True",
        "at least 26, at most 40: 27, True",
    ]
    # It is unknown whether the failed request reached the engine, and without /tokenize how long
    # its prompt was.
    unsure = verdicts([complete, failed], _scrape(6, 5, 510, 520), {1: 10})
    assert unsure == [
        "at least 1, at most 2: 1, True",
        "at least 1, at most 2: 1, True",
        "at least 10, at most 20: 10, True",
        "at least 22, at most 40: 20, False",
    ]
    assert verdicts([cancelled], _scrape(5, 6, 400, 510), {0: None})[2] == "at least 0: -100, False"


def test_clients_that_are_refused_do_not_flood_the_server() -> None:
    flags = ("--duration", "0.5", "--max-concurrency", "2", *SMALL)
    with serving(FakeServer(fail=lambda prompt: True)) as fake:
        assert bench(fake, *flags) == cli.EXIT_FAILED
    assert 2 <= len(fake.bodies) <= 2 * 6


def test_disagreement_is_printed_and_is_an_error_only_with_check_metrics(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crosscheck, "_SETTLE_SECONDS", 0.2)
    # The server's counters never change.
    with serving(FakeServer(metrics=_scrape(1, 1, 10, 10))) as fake:
        assert bench(fake, *SMALL) == cli.EXIT_OK
        assert bench(fake, *SMALL, "--check-metrics") == cli.EXIT_FAILED
        elsewhere = ("--metrics-url", f"{fake.base_url}/nowhere")
        assert bench(fake, *SMALL, *elsewhere) == cli.EXIT_OK
        assert bench(fake, *SMALL, *elsewhere, "--check-metrics") == cli.EXIT_FAILED
        fake.metrics = "vllm:request_success_total 1\n"
        assert bench(fake, *SMALL, "--check-metrics") == cli.EXIT_FAILED
    printed = capsys.readouterr()
    assert printed.out.count("Client and server DISAGREE") == 2
    assert "generated tokens: 0 by the server, 30 by the clients  <- differs" in printed.out
    assert "Not compared with the server's metrics: GET " in printed.err
    assert "/nowhere: HTTP 404" in printed.err
    assert "has no vllm:request_prompt_tokens_sum, vllm:generation_tokens_total" in printed.err


def test_a_sweep_that_fails_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServer(metrics=_scrape(1, 1, 10, 10))

    def die(prompt: str) -> bool:
        if len(fake.bodies) > 6:  # in the second of three runs
            fake.metrics = ""
        return False

    fake.fail = die
    sweep = ("--sweep", "max-concurrency=1,2,3", "--check-metrics")
    with serving(fake), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(crosscheck, "_SETTLE_SECONDS", 0.0)
        assert bench(fake, *SMALL, *sweep) == cli.EXIT_FAILED
    table = capsys.readouterr().out.partition(" Sweep ")[2]
    assert "2 at once" in table
    assert "3 at once" not in table


def test_results_are_saved_if_the_metrics_are_gone_after_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeServer(metrics=_scrape(1, 1, 10, 10))

    def die(prompt: str) -> bool:
        fake.metrics = ""
        return False

    fake.fail = die
    report = tmp_path / "report.html"
    flags = ("--save-result", "--result-dir", str(tmp_path), "--html", str(report))
    with serving(fake):
        assert bench(fake, *SMALL, *flags, "--check-metrics") == cli.EXIT_FAILED
    assert "Not compared with the server's metrics: GET " in capsys.readouterr().err
    (saved,) = tmp_path.glob("*.json")
    assert json.loads(saved.read_text())["completed"] == 6
    assert "not compared" in report.read_text()
