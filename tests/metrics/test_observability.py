"""A real server as its operator sees it: metrics, dashboard and alerts in Prometheus, logs."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import openai
import pytest
import yaml
from openai import AsyncOpenAI
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from support.api.api_server import until
from support.api.server import Server, serving
from support.paths import ROOT
from support.prometheus import Prometheus, promtool, scraping
from support.tiny import tiny_model_dir

from chairlift.loadtest.servers.ports import free_port
from chairlift.metrics.table import ENGINE, MODEL, SERVER

ALERTS = ROOT / "metrics" / "alerts.yml"
DASHBOARD = json.loads((ROOT / "metrics" / "grafana.json").read_text())
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]

pytestmark = pytest.mark.system

TTFT = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
ITL = ".001 .002 .005 .01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
LAT = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
TOKENS = "1 2 5 10 20 50 100 200 500 1000 2000 4096"  # of the tiny model's context
ITERATION = "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384"


class Promise(NamedTuple):
    """A metric family that dashboards of others may rely on.

    Attributes:
        kind: its Prometheus type.
        labels: names beside the common ones, separated by spaces.
        buckets: bounds of a histogram.
        values: values that the last label has to have.
    """

    kind: str
    labels: str = ""
    buckets: str = ""
    values: str = ""


# vLLM's metrics under vLLM's names, then our own.
PROMISED = {
    "vllm:num_requests_running": Promise("gauge"),
    "vllm:num_requests_waiting": Promise("gauge"),
    "vllm:kv_cache_usage_perc": Promise("gauge"),
    "vllm:prefix_cache_queries": Promise("counter"),
    "vllm:prefix_cache_hits": Promise("counter"),
    "vllm:num_preemptions": Promise("counter"),
    "vllm:prompt_tokens": Promise("counter"),
    "vllm:generation_tokens": Promise("counter"),
    "vllm:prompt_tokens_cached": Promise("counter"),
    "vllm:spec_decode_num_drafts": Promise("counter"),
    "vllm:spec_decode_num_draft_tokens": Promise("counter"),
    "vllm:spec_decode_num_accepted_tokens": Promise("counter"),
    "vllm:spec_decode_num_accepted_tokens_per_pos": Promise(
        "counter", "position", values="0 1 2 3 4 5 6 7"
    ),
    "vllm:request_success": Promise("counter", "finished_reason", values="stop length abort error"),
    "vllm:request_prompt_tokens": Promise("histogram", buckets=TOKENS),
    "vllm:request_generation_tokens": Promise("histogram", buckets=TOKENS),
    "vllm:request_max_num_generation_tokens": Promise("histogram", buckets=TOKENS),
    "vllm:request_params_max_tokens": Promise("histogram", buckets=TOKENS),
    "vllm:iteration_tokens_total": Promise("histogram", buckets=ITERATION),
    "vllm:request_params_n": Promise("histogram", buckets="1 2 5 10 20"),
    "vllm:time_to_first_token_seconds": Promise("histogram", buckets=TTFT),
    "vllm:inter_token_latency_seconds": Promise("histogram", buckets=ITL),
    "vllm:request_time_per_output_token_seconds": Promise("histogram", buckets=ITL),
    "vllm:e2e_request_latency_seconds": Promise("histogram", buckets=LAT),
    "vllm:request_queue_time_seconds": Promise("histogram", buckets=LAT),
    "vllm:request_inference_time_seconds": Promise("histogram", buckets=LAT),
    "vllm:request_prefill_time_seconds": Promise("histogram", buckets=LAT),
    "vllm:request_decode_time_seconds": Promise("histogram", buckets=LAT),
    "vllm:cache_config_info": Promise(
        "gauge", "dtype kv_bits kv_limit_bytes kv_bytes_per_token max_context max_rows"
    ),
    "chairlift_step_duration_seconds": Promise("histogram", "phase"),
    "chairlift_batch_rows": Promise("histogram"),
    "chairlift_batch_padding_ratio": Promise("histogram"),
    "chairlift_kv_bytes": Promise("gauge", "state", values="reserved used prefix"),
    "chairlift_memory_bytes": Promise("gauge", "kind", values="active peak cache"),
    "chairlift_engine_restarts": Promise("counter", "reason"),
    "chairlift_requests_rejected": Promise("counter", "reason"),
    "chairlift_client_disconnects": Promise("counter"),
    "chairlift_event_loop_lag_seconds": Promise("histogram"),
    "chairlift_worker_jobs": Promise("counter", "outcome", values="done refused ended queue_full"),
    "chairlift_http_requests": Promise("counter", "route method status"),
    "chairlift_http_request_duration_seconds": Promise("histogram", "route"),
    "chairlift_canary_rows_checked": Promise("counter"),
    "chairlift_canary_rows_diverged": Promise("counter"),
    "chairlift_build_info": Promise("gauge", "version architecture dtype device"),
}


class Run(NamedTuple):
    """A server that has handled every kind of request that its metrics count."""

    server: Server
    log: Path
    model: str
    traces: list[bytes]

    def scrape(self) -> str:
        """The text that a Prometheus 2 scrapes."""
        accepted = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
        request = urllib.request.Request(f"{self.server.url}/metrics", headers={"Accept": accepted})
        with urllib.request.urlopen(request, timeout=180) as reply:
            text: str = reply.read().decode()
        return text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    model = tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")
    folder = tmp_path_factory.mktemp("server")
    flags = ("--max-rows", "2", "--max-queue", "1", "--canary-interval", "0.5")
    seen = ("--log-format", "json", "--otlp-endpoint")
    with collecting() as (endpoint, traces), pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with serving(folder, str(model), *flags, *seen, endpoint) as server:
            (log,) = folder.glob("*.log")
            run = Run(server, log, model.name, traces)
            asyncio.run(use(run))
            yield run


@contextmanager
def collecting() -> Iterator[tuple[str, list[bytes]]]:
    """Yields an OTLP collector's address and the list of bodies that it receives."""
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()


async def use(run: Run) -> None:
    """Requests plain and streamed replies, shares a prefix, disconnects, and provokes refusals."""
    async with run.server.client() as client:
        lenient = client.with_options(_extra_kwargs={"_strict_response_validation": False})
        for _ in range(2):
            await complete(client, run.model, "The river runs on. " * 8, 12)
        await client.chat.completions.create(
            model=run.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=4
        )
        with pytest.raises(openai.BadRequestError):
            await complete(client, run.model, "x", -1)
        endless = [
            await lenient.completions.create(
                model=run.model,
                prompt="y",
                max_tokens=3000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for _ in range(3)
        ]
        with pytest.raises(openai.RateLimitError):
            await complete(client, run.model, "z", 2)
        for stream in endless:
            await stream.close()


async def complete(client: AsyncOpenAI, model: str, prompt: str, tokens: int) -> None:
    await client.completions.create(model=model, prompt=prompt, max_tokens=tokens)


# Metric names


def test_all_promised_metrics_have_their_types_labels_and_buckets(run: Run) -> None:
    families = {family.name: family for family in text_string_to_metric_families(run.scrape())}
    assert {metric.name for metric in (*SERVER, *MODEL, *ENGINE)} <= families.keys()
    for name, promise in PROMISED.items():
        family = families[name]
        assert family.type == promise.kind, name
        common = {"model_name", "engine"} if name.startswith("vllm:") else set()
        assert labels_of(family) == {*common, *promise.labels.split()}, name
        assert {float(bound) for bound in promise.buckets.split()} <= buckets_of(family), name
        if promise.buckets:
            assert len(buckets_of(family)) == len(promise.buckets.split()) + 1, name
        last = (promise.labels.split() or [""])[-1]
        values = {sample.labels.get(last) for sample in family.samples}
        assert set(promise.values.split()) <= values, name


def labels_of(family: Family) -> set[str]:
    return {label for sample in family.samples for label in sample.labels} - {"le"}


def buckets_of(family: Family) -> set[float]:
    return {float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels}


def test_promtool_objects_only_to_vllms_names(run: Run) -> None:
    checked = promtool("check", "metrics", text=run.scrape())
    names = {m.name + ("_total" if m.kind == "counter" else "") for m in MODEL}
    assert set(checked.stderr.splitlines()) | set(checked.stdout.splitlines()) == {
        *(f"{name} metric names should not contain ':'" for name in names),
        # vLLM gives this histogram a counter's name.
        'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix',
    }


# Dashboard and alerts


@pytest.fixture(scope="module")
def prometheus(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    target = run.server.url.removeprefix("http://")
    with scraping(tmp_path_factory.mktemp("prometheus"), free_port(), target, ALERTS) as server:
        # Rates need two scrapes with every kind of request between them.
        server.wait_for("up == 1")
        asyncio.run(use(run))
        asyncio.run(use_until_checked(run))
        generated = run.server.metrics().total("vllm:generation_tokens_total")
        server.wait_for(f"vllm:generation_tokens_total >= {generated}")
        server.wait_for("count_over_time(up[1m]) > 2")
        yield server


async def use_until_checked(run: Run) -> None:
    """Sends short requests, with pauses in which the canary can replay one."""
    async with run.server.client() as client:
        while not run.server.metrics().total("chairlift_canary_rows_checked_total"):
            await complete(client, run.model, "w", 4)
            await asyncio.sleep(0.6)


def panels() -> list[tuple[str, str]]:
    return [
        (panel["title"], target["expr"])
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    ]


def filled_in(expression: str) -> str:
    """The expression with its variables replaced, as Grafana does."""
    variables = {"__rate_interval": "1m", "job": "chairlift", "instance": ".+", "model": ".+"}
    return re.sub(r"\$(\w+)", lambda match: variables[match[1]], expression)


def test_every_panel_shows_numbers(prometheus: Prometheus) -> None:
    shown = {panel: prometheus.values(filled_in(panel[1])) for panel in panels()}
    assert len(shown) > 50
    empty = [panel for panel, values in shown.items() if all(map(math.isnan, values))]
    # The model of this test takes no images: the quantiles are of no values.
    assert {title for title, _ in empty} == {"Encoding of an image"}
    assert all(shown[panel] for panel in empty)


def test_the_dashboards_variables_have_values(prometheus: Prometheus, run: Run) -> None:
    values = {}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert match is not None
            series = {"match[]": filled_in(match[1])}
            values[variable["name"]] = prometheus.get(f"label/{match[2]}/values", **series)
    target = run.server.url.removeprefix("http://")
    assert values == {"job": ["chairlift"], "instance": [target], "model": [run.model]}


def test_every_alert_has_data_and_none_fires(prometheus: Prometheus) -> None:
    (group,) = prometheus.get("rules", type="alert")["groups"]
    states = {state["name"]: state for state in group["rules"]}
    for rule in RULES:
        state = states[rule["alert"]]
        assert (state["health"], state.get("lastError")) == ("ok", None)
        assert state["state"] != "firing"
        # The condition need not hold, but both sides must have values.
        compared = re.sub(r" (>|==) ", r" \1 bool ", rule["expr"])
        assert compared != rule["expr"]
        # No reply had these codes; take the codes of the refusals instead.
        compared = compared.replace("500|502|504", "400|429")
        assert prometheus.values(compared), rule["alert"]


# Logs and traces


async def test_traces_reach_a_collector(run: Run) -> None:
    await until(lambda: b"decode" in b"".join(run.traces))
    assert f"text_completion {run.model}".encode() in b"".join(run.traces)


def test_both_processes_log_json_without_prompts_and_replies(run: Run) -> None:
    lines = [json.loads(line) for line in run.log.read_text().splitlines()]
    assert {line["process"] for line in lines} == {"api", "engine"}
    answered = [line for line in lines if line["message"] == "answered"]
    assert {line["status"] for line in answered} == {200, 400, 429, 499}
    assert all(line["request_id"] for line in answered)
    assert "river" not in run.log.read_text()
