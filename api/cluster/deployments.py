"""The Serve application: a deployment for the ingress and one for each model."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from chairlift.api.admission.accounts import Accounts
from chairlift.api.admission.keys import (
    KEY_VARIABLE,
    NO_LIMITS,
    given_keys,
    read_keys,
)
from chairlift.api.cluster.config import Autoscaling, ClusterConfig, ModelConfig
from chairlift.api.cluster.forwarding import ForwardedRequest, ReplicaLost, ReplyHead
from chairlift.api.cluster.ingress import Ingress
from chairlift.api.cluster.replica import EngineReplica
from chairlift.api.errors import NotReady
from chairlift.engine.errors import QueueFull

INGRESS = "Ingress"
_LOAD_POLICY = "chairlift.api.cluster.autoscaling:LoadPolicy"
_PREFIX_ROUTER = "chairlift.api.cluster.router.PrefixRouter"
# A replica whose queue is longer than the shortest by more than this fraction of the requests that
# it takes gets no request for the sake of its prefixes.
_IMBALANCE = 1 / 16
# The retry of a request for which no replica had room; nobody knows how long that lasts.
_RETRY_SECONDS = 1.0


def application(config: ClusterConfig) -> Application:
    """The application of a configuration."""
    backends = {
        model.served_name: _engine(model, index, config)
        for index, model in enumerate(config.models)
    }
    ingress = serve.deployment(
        name=INGRESS,
        num_replicas=config.ingress.replicas,
        max_ongoing_requests=config.ingress.max_ongoing_requests,
        ray_actor_options={"num_cpus": config.ingress.num_cpus},
        graceful_shutdown_timeout_s=max(model.stop_seconds for model in config.models),
    )(serve.ingress()(_Ingress))
    return ingress.bind(config, backends)


class _Ingress:
    """The ingress's deployment class."""

    def __init__(self, config: ClusterConfig, handles: Mapping[str, DeploymentHandle[Any]]) -> None:
        self._config = config
        self._handles = handles

    def __serve_build_asgi_app__(self) -> Ingress:
        config = self._config
        in_environment = os.environ.get(KEY_VARIABLE, "")
        given = given_keys([key for key in in_environment.split(",") if key], NO_LIMITS)
        keys = read_keys(config.api_key_file, NO_LIMITS, given)
        backends = {name: _HandleBackend(handle) for name, handle in self._handles.items()}
        return Ingress(backends, Accounts(keys, NO_LIMITS), config.max_body_bytes)


class _HandleBackend:
    """The replicas of one model, behind a handle of its deployment."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._forward = handle.options(method_name="forward", stream=True)

    async def forward(self, request: ForwardedRequest) -> AsyncGenerator[ReplyHead | bytes, None]:
        """Passes a request to a replica, as ``Backend.forward``."""
        response = self._forward.remote(request)
        assert isinstance(response, DeploymentResponseGenerator)
        try:
            async for piece in response:
                yield piece
        except BackPressureError as error:
            raise QueueFull(str(error), _RETRY_SECONDS) from error
        except DeploymentUnavailableError as error:
            raise NotReady("the model's replicas cannot start") from error
        except TaskCancelledError as error:
            # Serve cancels what a client has left; nobody waits for another attempt.
            raise asyncio.CancelledError from error
        except (RayError, ReplicaLost) as error:
            if _is_loss(error):
                raise ReplicaLost(str(error).strip().splitlines()[-1]) from error
            raise
        finally:
            # Aborts the request in the replica unless it is complete.
            response.cancel()


def _is_loss(error: BaseException) -> bool:
    """Whether the replica was lost; any other error is a bug of its code."""
    if isinstance(error, RayTaskError):
        return isinstance(error.cause, RayActorError | ReplicaLost)
    return True


def _engine(model: ModelConfig, index: int, config: ClusterConfig) -> Application:
    options: dict[str, Any] = {
        "name": _deployment_name(model.served_name, index),
        "max_ongoing_requests": model.max_ongoing_requests,
        "max_queued_requests": model.max_queued_requests,
        "graceful_shutdown_timeout_s": model.stop_seconds,
        "ray_actor_options": {
            "num_cpus": model.num_cpus,
            "num_gpus": model.reserved_gpus,
            "resources": dict(model.resources),
        },
    }
    if model.tensor_parallel_size > 1:
        # All devices of a replica in one bundle, and so on one machine and visible to its server.
        devices = {"CPU": model.num_cpus, "GPU": model.reserved_gpus, **model.resources}
        options["placement_group_bundles"] = [{k: v for k, v in devices.items() if v}]
        options["placement_group_strategy"] = "STRICT_PACK"
    if model.autoscaling is None:
        options["num_replicas"] = model.replicas or 1
    else:
        options["autoscaling_config"] = _autoscaling(model.autoscaling)
    if model.routing == "prefix":
        router: dict[str, Any] = {
            "request_router_class": _PREFIX_ROUTER,
            "request_router_kwargs": {
                "imbalanced_threshold": max(1.0, model.max_ongoing_requests * _IMBALANCE),
                "do_eviction": True,
            },
        }
        options["request_router_config"] = RequestRouterConfig(**router)
    return serve.deployment(**options)(EngineReplica).bind(model, config.server_arguments())


def _autoscaling(wanted: Autoscaling) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=wanted.min_replicas,
        max_replicas=wanted.max_replicas,
        target_ongoing_requests=wanted.target_ongoing_requests,
        upscale_delay_s=wanted.upscale_delay_s,
        downscale_delay_s=wanted.downscale_delay_s,
        look_back_period_s=wanted.look_back_period_s,
        policy=AutoscalingPolicy(
            policy_function=_LOAD_POLICY,
            policy_kwargs={"target_kv_usage": wanted.target_kv_usage},
        ),
    )


def _deployment_name(served_name: str, index: int) -> str:
    """A name for Ray's dashboard; Ray reserves some characters, and two names may become equal."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', served_name)}-{index}"
