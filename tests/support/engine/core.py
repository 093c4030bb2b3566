"""An engine core built around a model of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chairlift.cache.pages.kernels import PageKernels
from chairlift.cache.quantized import Storage
from chairlift.cache.store.store import PrefixStore
from chairlift.cache.swap.swap import Swap
from chairlift.engine.core.core import IMAGE_BYTES, EngineCore
from chairlift.engine.core.prepared_model import prepare_model
from chairlift.engine.device.dispatch import Dispatcher
from chairlift.engine.grammar.compiler import Compiler
from chairlift.engine.messages import Submit
from chairlift.engine.speculation.proposal import Proposer, proposers
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.sequence import Sequence


def build_core(
    model: Any,
    vocabulary: int,
    limits: Limits,
    eager: bool = False,
    prefix_bytes: int = 0,
    quantization: Storage | None = None,
    store: PrefixStore | None = None,
    swap: Swap[Sequence] | None = None,
    kernels: PageKernels | None = None,
    compiler: Compiler | None = None,
    propose: Callable[[Submit], list[Proposer]] = proposers,
    prefix_drafts: bool = False,
    draft_model: Any = None,
    image_bytes: int = IMAGE_BYTES,
    dispatcher: Dispatcher | None = None,
) -> EngineCore:
    """Prepares a model and builds a core; see ``prepare_model`` and ``EngineCore``."""
    prepared = prepare_model(model, vocabulary, limits.chunk_multiple, eager, quantization, kernels)
    drafter = None if draft_model is None else prepare_model(draft_model, vocabulary, eager=eager)
    return EngineCore(
        *(prepared, limits, prefix_bytes, store, swap, compiler),
        propose=propose,
        prefix_drafts=prefix_drafts,
        draft_model=drafter,
        image_bytes=image_bytes,
        dispatcher=dispatcher,
    )
