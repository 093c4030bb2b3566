"""The pages of all layers of a model, which all sequences share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import mlx.core as mx

from chairlift.cache.pages.buffers import LayerPages
from chairlift.cache.pages.kernels import PageKernels
from chairlift.cache.pages.pool import PagePool
from chairlift.cache.pages.states import StateForms
from chairlift.cache.pages.upload import HostBuffers
from chairlift.cache.quantized import Quantization
from chairlift.cache.snapshot import LayerKind

T = TypeVar("T")


class PagedMemory:
    """The pools and buffers of one model.

    Args:
        kinds: each layer's kind; none of them chunked.
        pages: the number of pages of each kind, by its window.
        kernels: read and write the pages.
        view: turns the list of layers into the nesting that the model expects.
        quantization: how pages keep keys and values; None: in the model's type.
        grouped_masks: see ``BatchCache``.

    Attributes:
        kinds: each layer's kind.
        pools: the pages of each kind, by its window.
        layers: the buffers of each attention layer.
        forms_of_states: the forms of the states of all recurrent layers.
        kernels: read and write the pages.
        host: the host's memory for the numbers of steps.
        effects: arrays of the last step that writes depend on; evaluate them with the step.
    """

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        pages: Mapping[int | None, int],
        kernels: PageKernels,
        view: Callable[[Sequence[Any]], Sequence[Any]] = list,
        quantization: Quantization | None = None,
        grouped_masks: bool = False,
    ) -> None:
        self.grouped_masks = grouped_masks
        self.kinds = tuple(kinds)
        attention = [kind for kind in kinds if not kind.recurrent]
        self.pools = {
            window: PagePool(window, pages[window])
            for window in dict.fromkeys(kind.window for kind in attention)
        }
        self.layers = tuple(
            LayerPages(self.pools[kind.window], kernels, quantization) for kind in attention
        )
        self.forms_of_states = StateForms([kind.slots for kind in kinds if kind.recurrent])
        self.kernels = kernels
        self.host = HostBuffers(kernels.place)
        # The forms of layers whose tiles steps with chunks need, as far as they are known.
        self.forms: dict[Hashable, None] = {}
        self.view = view
        self.effects: list[mx.array] = []

    def page_bytes(self, window: int | None) -> int:
        """Bytes of one page of a kind, in all its layers."""
        pool = self.pools[window]
        return sum(layer.page_bytes for layer in self.layers if layer.pool is pool)

    def arranged(self, attention: Iterable[T], states: Iterable[T]) -> list[T]:
        """Something for each layer, in the order of ``kinds``, from that of both sorts."""
        own = {False: iter(attention), True: iter(states)}
        return [next(own[kind.recurrent]) for kind in self.kinds]

    def on_shortage(self, reclaim: Callable[[], bool]) -> None:
        """Sets the function that drops a cached prefix when no page is free."""
        for pool in self.pools.values():
            pool.reclaim = reclaim


def can_page(kinds: Sequence[LayerKind]) -> bool:
    """Whether layers cache keys and values, of full attention or of a sliding window.

    Others may have recurrent states.
    """
    chunked = any(kind.chunked for kind in kinds)
    return not chunked and not all(kind.recurrent for kind in kinds)
