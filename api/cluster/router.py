"""Chooses a replica by the prompts that each has computed: Ray's own prefix-aware router."""

from __future__ import annotations

from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    # NOTE: the public name, in ray.serve.llm, needs the extra ``llm`` and so vLLM.
    PrefixCacheAffinityRouter,
)
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica


class PrefixRouter(PrefixCacheAffinityRouter):
    """Ray's router, which leaves out replicas that it does not know, or not any more.

    All ingress replicas share one tree of prompts. It may name a replica that this router has not
    heard of yet or that has just gone, and Ray's class then fails with a KeyError.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Any:  # Ray's annotation is a list of replicas, its value a list of ranked lists.
        try:
            return await super().choose_replicas(candidate_replicas, pending_request)
        except KeyError:
            return [candidate_replicas]
