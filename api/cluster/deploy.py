"""Deploys an application to a running Ray cluster, and asks for its state."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Otherwise Ray asks users of the command line whether it may report how they use it.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve
from ray.serve.api import RunTarget, run_many
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from chairlift.api.cluster.config import ClusterConfig
from chairlift.api.cluster.deployments import application
from chairlift.api.cluster.reasons import failure_reason, one_line

_POLL_SECONDS = 1.0
_WORKING = (ApplicationStatus.NOT_STARTED, ApplicationStatus.DEPLOYING)


class ClusterError(Exception):
    """The cluster cannot be reached, or the application does not run. The message is one line."""


@dataclass(frozen=True, slots=True)
class Destination:
    """The place in Ray at which an application is deployed.

    Attributes:
        address: Ray's: "auto" for the cluster of this machine, HOST:PORT, or ray://HOST:PORT.
        name: the application's name.
        route_prefix: the path below which its routes are.
        host, port: the address of Ray's HTTP proxies, if none runs yet.
    """

    address: str
    name: str
    route_prefix: str
    host: str
    port: int


def deploy(config: ClusterConfig, destination: Destination, say: Callable[[str], None]) -> None:
    """Deploys an application and waits until it runs; ``say`` gets a line for each change.

    Raises:
        ClusterError: Ray cannot be reached, or the application does not start.
    """
    with _connection(destination.address):
        try:
            serve.start(http_options={"host": destination.host, "port": destination.port})
            target = RunTarget(application(config), destination.name, destination.route_prefix)
            run_many([target], wait_for_applications_running=False)
        except (RayServeException, ValueError) as error:
            raise ClusterError(one_line(str(error))) from error
        said: list[str] = []
        while (state := serve.status().applications.get(destination.name)) is not None:
            for line in _lines(state):
                if line not in said:
                    say(line)
            said = _lines(state)
            if state.status == ApplicationStatus.RUNNING:
                return
            if state.status not in _WORKING:
                messages = [state.message, *(each.message for each in state.deployments.values())]
                raise ClusterError(failure_reason(messages))
            time.sleep(_POLL_SECONDS)
        raise ClusterError(f"the application {destination.name!r} was deleted while it started")


def status(address: str) -> list[str]:
    """One line for each application and each of its deployments.

    Raises:
        ClusterError: Ray cannot be reached.
    """
    with _connection(address):
        lines = []
        for name, state in serve.status().applications.items():
            lines += [f"{name}: {state.status.value}", *(f"  {line}" for line in _lines(state))]
        return lines


def delete(address: str, name: str) -> None:
    """Deletes an application after its running requests have ended.

    Raises:
        ClusterError: Ray cannot be reached, or has no such application.
    """
    with _connection(address):
        if name not in serve.status().applications:
            raise ClusterError(f"there is no application {name!r}")
        serve.delete(name)


@contextmanager
def _connection(address: str) -> Iterator[None]:
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"no Ray at {address}: {one_line(str(error))}") from error
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def _lines(state: ApplicationStatusOverview) -> list[str]:
    lines = []
    for name, deployment in state.deployments.items():
        counts = {
            getattr(kind, "value", kind).lower(): number
            for kind, number in deployment.replica_states.items()
        }
        replicas = ", ".join(f"{number} {kind}" for kind, number in counts.items())
        lines.append(f"{name}: {deployment.status.value.lower()} ({replicas or 'no replica'})")
    return lines
