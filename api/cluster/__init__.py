"""Chairlift on many machines with Ray Serve: ``pip install 'chairlift[ray]'``.

An ingress passes every request of Chairlift's APIs to a replica of the model that it names. A
replica is a complete ``chairlift serve`` in a child process of a Ray actor. Discovery, restarts,
scaling and dashboards are Ray's.

NOTE: only ``deployments``, ``router`` and ``deploy`` import Ray, which takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: dict[str, Any]) -> Application:
    """Builds the Serve application: ``import_path: chairlift.api.cluster:app``.

    Args:
        args: the fields of ``ClusterConfig``.

    Raises:
        ClusterConfigError: a field is unknown or invalid. The message is one line.
    """
    from chairlift.api.cluster.config import parse
    from chairlift.api.cluster.deployments import application

    return application(parse(args))
