"""The child process of a replica, Ray's messages, and the application that is deployed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest

from chairlift.api.cluster.reasons import failure_reason

# A "server" that runs until a signal ends it.
_CHILD = """
import runpy, time
import chairlift.api.cli.main as commands
commands.main = lambda arguments: time.sleep(300)
print("started", flush=True)
runpy.run_module("chairlift.api.cli.serve_child", run_name="__main__")
"""
_BUILD = """
import json, sys
from chairlift.api.cluster import app
built = app(json.loads(sys.argv[1]))
print(json.dumps([
    [name, each._deployment_config.num_replicas, each._replica_config.placement_group_bundles,
     each._deployment_config.request_router_config.is_default_request_router()]
    for name, each in sorted(
        (node._bound_deployment.name, node._bound_deployment)
        for node in [built, *built._bound_deployment.init_args[1].values()]
    )
]))
"""


def test_child_ends_with_its_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"started\n"
        assert child.poll() is None
        # What the kernel does when the parent ends.
        child.stdin.close()
        assert child.wait(60) == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")
def test_application() -> None:
    """One deployment for each model, and a bundle of two GPUs for two ranks."""
    config = {
        "models": [
            {"model": "org/a", "replicas": 3, "routing": "load"},
            {"model": "b", "tensor_parallel_size": 2, "autoscaling": {"max_replicas": 2}},
        ]
    }
    built = subprocess.run(
        [sys.executable, "-c", _BUILD, json.dumps(config)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    assert json.loads(built.stdout) == [
        ["Ingress", 1, None, True],
        ["b-1", 1, [{"CPU": 1.0, "GPU": 2.0}], False],
        ["org-a-0", 3, None, True],
    ]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (
            [
                "Deploying app failed.",
                "The deployment failed to start 3 times in a row. Error:\n"
                "ray.exceptions.RayTaskError(RuntimeError): ray::ServeReplica (pid=1)\n"
                "RuntimeError: Traceback (most recent call last):\n"
                '  File "replica.py", line 32, in __init__\n'
                "chairlift.api.cluster.forwarding.ReplicaLost: the server ended with exit code 1",
            ],
            "the server ended with exit code 1",
        ),
        (["It failed:\nTraceback\nModuleNotFoundError: no yaml\n"], "ModuleNotFoundError: no yaml"),
        (["It is\n  too busy."], "It is too busy."),
    ],
)
def test_reason_without_the_traceback(messages: list[str], reason: str) -> None:
    assert failure_reason(messages) == reason
