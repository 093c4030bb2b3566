"""A replica: a Ray actor that runs a server as its child and passes requests to it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator

from chairlift.api.cluster.child_server import ChildServer
from chairlift.api.cluster.config import ModelConfig
from chairlift.api.cluster.forwarding import ForwardedRequest, ReplicaLost, ReplyHead

logger = logging.getLogger("ray.serve")

# A server that restarts its engine is not healthy for so long at most; then Ray replaces it.
_RESTART_SECONDS = 300.0


class EngineReplica:
    """A deployment's class: one replica of one model.

    Args:
        model: the model.
        server_arguments: the arguments of ``chairlift serve`` that all models share.
    """

    # Ray awaits it, and sends requests only then.
    async def __init__(  # type: ignore[misc]
        self, model: ModelConfig, server_arguments: list[str]
    ) -> None:
        arguments = [*model.serve_arguments(), *server_arguments]
        self._server = ChildServer(arguments, model.stop_seconds)
        await self._server.start(model.start_seconds)
        self._healthy_at = time.monotonic()
        self._watch = asyncio.create_task(self._end_with_server())

    async def forward(self, request: ForwardedRequest) -> AsyncGenerator[ReplyHead | bytes, None]:
        """Passes a request to the server, as ``Backend.forward``."""
        async for piece in self._server.forward(request):
            yield piece

    async def check_health(self) -> None:
        """Ray calls this regularly and replaces the replica if it fails several times.

        Raises:
            ReplicaLost: the server has not been able to serve for too long.
        """
        if await self._server.is_healthy():
            self._healthy_at = time.monotonic()
        elif time.monotonic() - self._healthy_at > _RESTART_SECONDS:
            raise ReplicaLost(f"the server could not serve for {_RESTART_SECONDS:g} s")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The server's load, for ``autoscaling.LoadPolicy``."""
        return await self._server.gauges()

    async def __del__(self) -> None:
        """Ray calls this when the replica stops, after its requests have ended."""
        # The constructor may have failed before it had a server.
        if (server := getattr(self, "_server", None)) is not None:
            await server.stop()

    async def _end_with_server(self) -> None:
        """Ends this actor with its server: routers then leave it out at once, and Ray replaces it.

        Failing health checks would say the same only after several periods.
        """
        if await self._server.ended():
            logger.critical("%s", await self._server.epitaph())
            os._exit(1)
