"""The configuration of a cluster's application: its models, their flags and their replicas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from chairlift.api.settings import ServerSettings

_MAX_BODY_BYTES = ServerSettings().max_body_bytes

# The flags of ``chairlift serve`` that the cluster sets, or that only make sense for one server.
_RESERVED: Mapping[str, str] = {
    "model": "the field model names it",
    "served-model-name": "the field name names it",
    "host": "replicas listen on the loopback address",
    "port": "replicas pick a free port",
    "api-key": "the field api_key_file names the keys of all models",
    "api-key-file": "the field api_key_file names the keys of all models",
    "max-body-bytes": "the field max_body_bytes limits the bodies for all models",
    "drain-timeout": "the field drain_seconds limits it",
    "tensor-parallel-size": "the field tensor_parallel_size sets it",
    "config": "give the flags here",
    "print-config": "a replica serves",
    "ssl-certfile": "Ray's proxy terminates TLS",
    "ssl-keyfile": "Ray's proxy terminates TLS",
    "metrics-port": "replicas serve /metrics on their own port",
    "metrics-host": "replicas serve /metrics on their own port",
    "no-ui": "replicas never serve the page",
}
# The seconds that a server may take after its drain: to write prefixes (docs/guides/operations.md),
# and a little more for its processes to end.
AFTER_DRAIN_SECONDS = 20.0
_FLAG = re.compile(r"[a-z][a-z0-9-]*")

FlagValue = bool | int | float | str | list[str]
Fraction = Annotated[float, Field(gt=0, le=1)]


class ClusterConfigError(Exception):
    """The configuration is invalid. The message is one line that names the field."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Autoscaling(_Strict):
    """The conditions under which a deployment gets more or fewer replicas.

    Attributes:
        min_replicas: at least 1, so that a request never waits for a model to load.
        max_replicas: the most replicas.
        target_ongoing_requests: the requests that one replica should have, running or waiting.
        target_kv_usage: the fraction of its KV memory that a replica should use.
        upscale_delay_s: how long more replicas must be wanted before they start.
        downscale_delay_s: how long fewer replicas must be wanted before some stop.
        look_back_period_s: the time over which the measurements are averaged.
    """

    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt
    target_ongoing_requests: PositiveFloat = 16.0
    target_kv_usage: Fraction = 0.9
    upscale_delay_s: Annotated[float, Field(ge=0)] = 30.0
    downscale_delay_s: Annotated[float, Field(ge=0)] = 600.0
    look_back_period_s: PositiveFloat = 30.0

    @pydantic.model_validator(mode="after")
    def _check_order(self) -> Autoscaling:
        if self.max_replicas < self.min_replicas:
            raise ValueError("max_replicas must not be below min_replicas")
        return self


class ModelConfig(_Strict):
    """One model: a deployment of its own.

    Attributes:
        model: what ``chairlift serve`` gets: a hub id, a folder or a GGUF file.
        name: the model's name in the API (default: ``model``).
        flags: flags of ``chairlift serve`` without their dashes; true stands for a flag without a
            value, and a list repeats the flag.
        replicas: the number of replicas without autoscaling.
        tensor_parallel_size: the devices of one replica, all of one machine.
        num_cpus, num_gpus, resources: what Ray reserves for one replica; ``num_gpus`` defaults to
            ``tensor_parallel_size`` above 1, else to 0.
        routing: "prefix" prefers the replica that computed the longest prefix of the prompt; "load"
            prefers the one with fewer requests.
        max_ongoing_requests: the requests that one replica takes; further ones wait in the ingress.
        max_queued_requests: the requests that wait in an ingress replica; further ones get 429.
        start_seconds: the time for downloading and loading the model.
        drain_seconds: the time that running requests get when a replica stops.
    """

    model: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    flags: dict[str, FlagValue] = {}
    replicas: PositiveInt | None = None
    autoscaling: Autoscaling | None = None
    tensor_parallel_size: PositiveInt = 1
    num_cpus: PositiveFloat = 1.0
    num_gpus: Annotated[float, Field(ge=0)] | None = None
    resources: dict[str, PositiveFloat] = {}
    routing: Literal["prefix", "load"] = "prefix"
    max_ongoing_requests: PositiveInt = 256
    max_queued_requests: PositiveInt = 1024
    start_seconds: PositiveFloat = 3600.0
    drain_seconds: PositiveFloat = 300.0

    @pydantic.field_validator("flags")
    @classmethod
    def _check_flags(cls, flags: dict[str, FlagValue]) -> dict[str, FlagValue]:
        for flag, value in flags.items():
            if not _FLAG.fullmatch(flag):
                raise ValueError(f"{flag!r} is no flag; write it like max-context, without dashes")
            if flag in _RESERVED:
                raise ValueError(f"{flag} cannot be set here: {_RESERVED[flag]}")
            if value is False:
                raise ValueError(f"{flag}: leave the flag out instead of setting it to false")
        return flags

    @pydantic.field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        if name is not None and not (name.isprintable() and name.strip() == name):
            raise ValueError(f"{name!r} cannot name a model")
        return name

    @pydantic.model_validator(mode="after")
    def _check_replicas(self) -> ModelConfig:
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError("replicas and autoscaling exclude each other; give one")
        return self

    @property
    def served_name(self) -> str:
        """The model's name in the API."""
        return self.model if self.name is None else self.name

    @property
    def stop_seconds(self) -> float:
        """The time after which a replica that has not stopped is killed."""
        return self.drain_seconds + AFTER_DRAIN_SECONDS

    @property
    def reserved_gpus(self) -> float:
        """The GPUs that Ray reserves for one replica."""
        if self.num_gpus is not None:
            return self.num_gpus
        return float(self.tensor_parallel_size) if self.tensor_parallel_size > 1 else 0.0

    def serve_arguments(self) -> list[str]:
        """The arguments of ``chairlift serve`` that this model's flags stand for."""
        arguments = [self.model, "--served-model-name", self.served_name, "--no-ui"]
        arguments += ["--drain-timeout", f"{self.drain_seconds:g}"]
        if self.tensor_parallel_size > 1:
            arguments += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        for flag, value in self.flags.items():
            if value is True:
                arguments.append(f"--{flag}")
            else:
                # One argument each, so that a value may begin with a dash.
                values = value if isinstance(value, list) else [value]
                arguments += [f"--{flag}={each}" for each in values]
        return arguments


class Ingress(_Strict):
    """The replicas that speak the APIs and pass requests on."""

    replicas: PositiveInt = 1
    num_cpus: PositiveFloat = 1.0
    max_ongoing_requests: PositiveInt = 4096


class ClusterConfig(_Strict):
    """The arguments of ``chairlift.api.cluster:app``.

    Attributes:
        models: the first one answers requests that name no model.
        api_key_file: the file of keys, as for ``chairlift serve --api-key-file``; it must exist at
            this path on every machine.
        max_body_bytes: the maximum size of a request body.
    """

    models: Annotated[list[ModelConfig], Field(min_length=1)]
    ingress: Ingress = Ingress()
    api_key_file: Path | None = None
    max_body_bytes: PositiveInt = _MAX_BODY_BYTES

    @pydantic.model_validator(mode="after")
    def _check_names(self) -> ClusterConfig:
        names = [model.served_name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two models are named {name!r}; give one another name")
        return self

    def server_arguments(self) -> list[str]:
        """The arguments of ``chairlift serve`` that all models share."""
        arguments = ["--max-body-bytes", str(self.max_body_bytes)]
        if self.api_key_file is not None:
            arguments += ["--api-key-file", str(self.api_key_file)]
        return arguments


def parse(values: object) -> ClusterConfig:
    """Validates the values of a configuration.

    Raises:
        ClusterConfigError: a field is unknown or invalid. The message is one line.
    """
    try:
        return ClusterConfig.model_validate(values)
    except pydantic.ValidationError as error:
        raise ClusterConfigError(_one_line(error)) from None


def _one_line(error: pydantic.ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "there is no such field"
    elif first["type"] in ("model_type", "dict_type"):
        message = "must be a mapping, with lines like 'name: value'"
    return f"{place}: {message}" if place else message
