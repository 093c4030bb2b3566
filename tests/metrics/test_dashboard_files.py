"""The files of the dashboard and the alerts, without a running server."""

from __future__ import annotations

import json
import re

import yaml
from prometheus_client import generate_latest
from support.paths import ROOT
from support.prometheus import promtool

from chairlift.api.observe.tracing import OPERATIONS
from chairlift.api.server.routes import ROUTES
from chairlift.metrics.recorder import Recorder
from chairlift.metrics.table import ENGINE, MODEL

ALERTS = ROOT / "metrics" / "alerts.yml"
DASHBOARD = json.loads((ROOT / "metrics" / "grafana.json").read_text())
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def test_the_alert_rules_are_valid_and_each_fires_when_it_should() -> None:
    checked = promtool("check", "rules", ALERTS)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    cases = ROOT / "tests" / "metrics" / "alerts_test.yml"
    tested = promtool("test", "rules", cases)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    fired, quiet = set(), set()
    for case in yaml.safe_load(cases.read_text())["tests"]:
        for expected in case["alert_rule_test"]:
            (fired if expected.get("exp_alerts") else quiet).add(expected["alertname"])
    assert fired == quiet == {rule["alert"] for rule in RULES}


def test_shares_of_requests_are_of_all_routes_that_generate() -> None:
    patterns = [
        pattern for rule in RULES for pattern in re.findall(r'route=~"([^"]*)"', rule["expr"])
    ]
    assert len(patterns) == 2
    for pattern in patterns:
        # Prometheus' matches are of the entire label, too.
        found = {route.path for route in ROUTES if re.fullmatch(pattern, route.path)}
        assert found == OPERATIONS.keys()


def test_a_server_can_be_chosen_before_it_has_loaded_a_model() -> None:
    recorder = Recorder("1.2")
    recorder.serve_models(["m"], None)
    exposed = generate_latest(recorder.registry).decode()
    queries = {each["name"]: each.get("definition") for each in DASHBOARD["templating"]["list"]}
    for name in ("job", "instance"):
        (metric,) = re.findall(r"label_values\((\w+)", queries[name])
        assert f"\n{metric}{{" in exposed


def test_lines_of_several_models_have_different_names() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            if panel["type"] == "timeseries" and "sum" not in target["expr"]:
                assert {"{{instance}}", "{{model_name}}"} <= set(target["legendFormat"].split())


def test_every_panel_of_a_model_or_its_engine_shows_the_chosen_models() -> None:
    # A server of one model has no label model_name in its engine's metrics: it counts as empty.
    labels = {metric.name: 'model_name=~"$model"' for metric in MODEL}
    labels |= {metric.name: 'model_name=~"$model|"' for metric in ENGINE}
    seen = set()
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            for name, selector in re.findall(r"([\w:]+)\{([^}]*)\}", target["expr"]):
                known = re.sub("_(bucket|sum|count|total)$", "", name)
                known = name if name in labels else known
                assert labels.get(known, 'job="$job"') in selector.split(", "), target["expr"]
                seen.add(known)
    assert len(seen & {metric.name for metric in ENGINE}) > 10


def test_no_panels_share_an_id_or_overlap() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
