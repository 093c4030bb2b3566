"""``chairlift bench`` against a small fake server: its flags, sockets, clock and report are real.

Data sets, loads and the HTML report are tested in files of their own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fake_server import SMALL, FakeServer, bench, serving

from chairlift.loadtest import cli
from chairlift.loadtest.bench.metrics import Reply
from chairlift.loadtest.bench.verify import Difference, Verification, verification_report
from chairlift.loadtest.servers.ports import free_port


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
    assert len(fake.bodies) == 7  # one of them is the warm-up
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


def test_bench_sends_chats_and_does_not_count_the_role_as_a_token(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("form", ["two words", "one word", "environment", "elsewhere"])
def test_the_report_has_the_command_without_keys(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, page = "sk-very-secret", tmp_path / "report.html"
    flags = {"two words": ["--api-key", key], "one word": [f"--api-key={key}"]}.get(form, [])
    if not flags:
        monkeypatch.setenv("CHAIRLIFT_API_KEY", f"{key},second-secret")
    if form == "elsewhere":
        flags = ["--label", f"with {key}", "--metrics-url", "http://me:second-secret@host/m?k=1"]
    with serving(FakeServer()) as fake:
        assert bench(fake, *SMALL, *flags, "--html", str(page), "--goodput", "ttft:9") in (0, 1)
    html = page.read_text()
    assert f"chairlift bench --base-url {fake.base_url} " in html
    assert " --num-prompts 6 --random-input-len 8 " in html
    assert "--goodput ttft:9" in html
    assert ("--api-key ***" in html or "--api-key '***'" in html) == ("word" in form)
    assert "secret" not in html
    assert "server 9.8.7" in html


def test_verify_passes_if_replies_do_not_depend_on_the_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
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
        # Each prompt runs beside others to its end, but perhaps the last.
        assert bench(fake, *SMALL, "--verify", *flags) == cli.EXIT_FAILED
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["verify_compared"] == 6
    assert 0 < result["verify_differing"] <= 6
    out = capsys.readouterr().out
    assert f"Replies that differ from their solo run: {result['verify_differing']} of 6" in out
    assert "crowd" in out


def test_the_verification_report_shows_the_first_difference() -> None:
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
        (("--api-key", "a\nb"), "--api-key has a character"),
        (("--model", "\udcff"), "--model has a character"),
        (("--label", "a\0b"), "--label has a character"),
        (("--base-url", "http://me:word@127.0.0.1:1", "--api-key", "k"), "--base-url has a user"),
        (("--base-url", "http://127.0.0.1:1?key=1"), "--base-url must have the form"),
        (("--base-url", "http://127.0.0.1:1/#part"), "--base-url must have the form"),
        (("--save-result", "--result-dir", "/dev/null/none"), "--save-result: "),
        (("--save-result", "--result-filename", "/"), "--save-result: "),
        (("--html", "/dev/null/none/r.html"), "--html: "),
    ],
)
def test_wrong_flags_are_refused_in_one_line(
    flags: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # With --model, bench does not ask the server, which does not exist.
    fake = FakeServer(base_url=f"http://127.0.0.1:{free_port()}")
    assert bench(fake, "--model", "m", *flags) == cli.EXIT_USAGE
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1


def test_an_absent_server_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServer(base_url=f"http://127.0.0.1:{free_port()}")
    assert bench(fake) == cli.EXIT_FAILED
    assert "cannot reach" in capsys.readouterr().err
