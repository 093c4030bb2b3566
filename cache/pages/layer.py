"""Model calls over pages: the layers that a model sees in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import add
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from chairlift.cache.packed.split import SplitLayer
from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.pages.buffers import LayerPages
from chairlift.cache.pages.dense import DenseLayer, DenseRows, DenseStep
from chairlift.cache.pages.kernels import KeysValues, Scoring
from chairlift.cache.pages.latent import LatentLayer
from chairlift.cache.pages.memory import PagedMemory
from chairlift.cache.pages.page import seen_window
from chairlift.cache.pages.page_table import PageLists
from chairlift.cache.pages.step import KindStep, StepNumbers, StepTokens, step_numbers
from chairlift.cache.pages.step_parts import Division, PagedAttention, StepParts, StepRows
from chairlift.cache.pages.upload import HostBuffers, Numbers, uploaded


class PagedMask(NamedTuple):
    """The mask of a layer; a model only passes it on.

    Attributes:
        window: tokens that a query sees, its own included; None: all.
        step: the step that it was made in.
    """

    window: int | None
    step: PagedStep


class PagedLayer:
    """One layer in one step, behind mlx-lm's cache protocol.

    Attributes:
        offset: ``[tokens]`` int32, the position of each token.
        max_size: the window in tokens, None for full attention.
    """

    def __init__(self, step: PagedStep, pages: LayerPages, buffers: KeysValues | None) -> None:
        self._step = step
        self._kind = step.kinds[pages.pool.window]
        self._pages = pages
        self._buffers = buffers
        self._new: KeysValues | None = None
        self.offset = step.tokens.arrays.offset
        self.max_size = pages.pool.window

    def make_mask(
        self, n: int, window_size: int | None = None, return_array: bool = False
    ) -> PagedMask:
        """The mask for one new token a row.

        Raises:
            ValueError: the model wants an array, or more new tokens. What it would add to an array
                may depend on the request, as with images, so a trial would not show it. Or see
                ``seen_window``.
        """
        if n != 1 or return_array:
            raise ValueError(f"there is no mask of {n} tokens a row, or as an array, over pages")
        return PagedMask(seen_window(window_size, self.max_size), self._step)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Takes the keys and values of the step's tokens, and returns them unchanged.

        Args:
            keys, values: ``[tokens, key heads, 1, dim]``; attention writes them to the pages.
        """
        self._new = KeysValues(keys, values)
        self._step.layers_by_keys[id(keys)] = self
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The result of this step's ``update_and_fetch``, for a layer that shares this one's KV."""
        if self._new is None:
            raise ValueError("nothing has been written in this step")
        return self._new

    def attend(self, queries: mx.array, scoring: Scoring) -> mx.array:
        """Attention of the step's tokens; see ``kernels.PageKernels.attend``.

        A further layer that shares these keys and values writes the same again.
        """
        new = KeysValues(*self.keys_and_values())
        pages = self._pages
        buffers = self._buffers or pages.buffers_for(new)
        if not self._step.traced:
            # This makes one graph per layer, the same for all layers. MLX keeps the graphs that it
            # has built, and a new one takes milliseconds. The call does not wait.
            mx.async_eval(queries, *new)
        mixed = pages.kernels.attend(queries, new, buffers, self._kind, scoring, pages.quantization)
        self._step.memory.effects = [mixed]
        return mixed


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The arrays of one step.

    Attributes:
        memory: the pages.
        numbers: what the arrays were made of.
        tokens: the step's tokens.
        kinds: the arrays of each kind, by its window.
        more: the further arrays that were uploaded with the step.
        parts: the parts of layers that are called part by part; None if there are none.
        attention: how attention layers read the pages.
        traced: the step is being compiled.
        layers_by_keys: the layers that have taken keys in this step, by the ``id`` of these.
        writes: arrays that are ready once tokens are written; logits may not depend on them.
    """

    memory: PagedMemory
    numbers: StepNumbers
    tokens: StepTokens
    kinds: Mapping[int | None, KindStep]
    more: Sequence[mx.array] = ()
    parts: StepParts | None = None
    attention: PagedAttention = PagedAttention.KERNEL
    traced: bool = False
    layers_by_keys: dict[int, PagedLayer] = field(default_factory=dict)
    writes: list[mx.array] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context of the model call, after which no layer refers to the call's arrays."""
        try:
            yield
        finally:
            # NOTE: layers refer to the step; Python would keep the arrays until it finds the cycle.
            self.layers_by_keys.clear()
            self.memory.effects += self.writes
            self.writes.clear()

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        cache: Any,
        scoring: Scoring,
    ) -> mx.array:
        """Attention to the keys of a layer, which some models reuse in later layers.

        Args:
            keys: the keys that a layer's ``update_and_fetch`` has returned.
            cache: the layer's cache; None if it uses another layer's keys.

        Raises:
            ValueError: these keys are in no cache.
        """
        layer = self.layers_by_keys.get(id(keys), cache)
        if not isinstance(layer, PagedLayer):
            raise ValueError("attention to keys that are in no cache")
        return layer.attend(queries, scoring)

    def layers(
        self,
        buffers: Sequence[KeysValues] | None = None,
        recurrent: Sequence[SplitLayer] | None = None,
    ) -> Sequence[Any]:
        """The layers to call the model with, in the nesting that it expects.

        Args:
            buffers, recurrent: replace those of the layers, in a step that is being compiled.
        """
        if recurrent is None:
            recurrent = self.parts.layers() if self.parts else []
        pages = self.memory.layers
        own = zip(pages, [None] * len(pages) if buffers is None else buffers, strict=True)
        attention: Sequence[Any]
        if self.parts is not None and self.attention is PagedAttention.DENSE:
            attention = self._dense_layers(self.parts, own)
        else:
            attention = [self._layer(layer, new) for layer, new in own]
        return self.memory.view(self.memory.arranged(attention, recurrent))

    def _layer(self, pages: LayerPages, buffers: KeysValues | None) -> PagedLayer | LatentLayer:
        if self.attention is PagedAttention.LATENT:
            kind = self.kinds[pages.pool.window]
            return LatentLayer(self.memory, kind, self.traced, pages, buffers)
        return PagedLayer(self, pages, buffers)

    def _dense_layers(
        self, parts: StepParts, layers: Iterable[tuple[LayerPages, KeysValues | None]]
    ) -> list[DenseLayer]:
        rows = {
            window: [
                DenseRows.of(group.places, kind, window, group.columns)
                for group in parts.dense_groups
            ]
            for window, kind in self.kinds.items()
        }
        step = DenseStep(
            *(self.tokens.arrays.offset, self.writes, self.traced, self.memory.grouped_masks),
            joint=parts.dense_joint,
            within=parts.division.within,
        )
        return [DenseLayer(step, rows[layer.pool.window], layer, new) for layer, new in layers]


@contextmanager
def paged_step(
    bands: Sequence[PagedBatch],
    chunks: Sequence[tuple[PagedBatch, int]],
    padding: int = 0,
    min_columns: int = 0,
    drafted: Sequence[Sequence[int]] | None = None,
    tail: int = 0,
    row_limit: int = 0,
    alone: bool = False,
    more: Sequence[Sequence[int]] = (),
    prompts: int = 0,
    division: Division | None = None,
    upload: Callable[[Sequence[Numbers], HostBuffers], Sequence[mx.array]] = uploaded,
) -> Iterator[PagedStep]:
    """A context of one model call in which rows take a token each, and prompts take chunks.

    The model is called with tokens ``[tokens, 1]``: those of the rows, batch by batch, then those
    of the chunks. All batches have the same memory. Unused tokens write to page 0 or nowhere, and
    their results mean nothing.

    Args:
        chunks: prompts of one row each, and the number of their new tokens.
        padding: unused tokens behind those of the rows.
        min_columns: see ``step_numbers``.
        drafted: for each of ``bands``, the tokens that each row takes. Call ``advance`` with those
            that it keeps; until then the rows' offsets stay as they are. None: each row takes one.
        tail: unused tokens behind those of the chunks.
        row_limit: see ``StepSizes``.
        alone: see ``step_numbers``.
        more: further numbers that the call needs on the device.
        prompts: how many of ``bands``, the last ones, are prompts; their rows take no token back.
        division: which layers are called part by part; None: recurrent ones.
        upload: copies ``StepNumbers.parts`` to the device.

    Raises:
        OutOfPages: there are too few pages.
    """
    counts = [[1] * len(band) for band in bands] if drafted is None else drafted
    rows = list(zip(bands, counts, strict=True))
    batches = [*rows, *((batch, [new]) for batch, new in chunks)]
    memory = batches[0][0].memory
    memory.effects = []
    for batch, new in batches:
        batch.grow(new)
    numbers = step_numbers(
        [*_places(rows), *[(0, 1)] * padding],
        [(batch.offsets[0], new) for batch, new in chunks],
        _page_lists(memory, bands, [batch for batch, _ in chunks], padding),
        *(tail, row_limit, min_columns, alone),
        [np.array(numbers, np.int32) for numbers in more],
        dict.fromkeys(memory.forms, memory.kernels.tile_table),
    )
    kinds, uploads = numbers.on_device(upload(numbers.parts, memory.host))
    tokens = next(iter(kinds.values())).tokens
    parts: StepParts | None = None
    division = division or Division()
    if memory.forms_of_states or division.dense:
        decoding = len(bands) - prompts
        step_rows = _step_rows(batches[:decoding], batches[decoding:], padding)
        parts = StepParts(step_rows, tokens.sizes, division)
    step = PagedStep(memory, numbers, tokens, kinds, uploads, parts, division.attention)
    with step.running():
        yield step
    if parts is not None:
        parts.commit()
    memory.forms |= dict.fromkeys(tokens.tiles)
    for batch, new in batches if drafted is None else batches[len(bands) :]:
        batch.advance(new)


def _places(bands: Sequence[tuple[PagedBatch, Sequence[int]]]) -> list[tuple[int, int]]:
    """The offset and the number of new tokens of each row."""
    return [place for band, counts in bands for place in zip(band.offsets, counts, strict=True)]


def _page_lists(
    memory: PagedMemory, bands: Sequence[PagedBatch], chunks: Sequence[PagedBatch], padding: int
) -> dict[int | None, PageLists]:
    """The pages of a step's rows and chunks in each pool, whose pending copies are dispatched."""
    lists = {}
    for window, pool in memory.pools.items():
        pool.copies.dispatch()
        rows, prompts = ([each.rows[window].lists for each in part] for part in (bands, chunks))
        lists[window] = PageLists.joined([*rows, PageLists.empty(padding), *prompts])
    return lists


def _step_rows(
    bands: Sequence[tuple[PagedBatch, Sequence[int]]],
    prompts: Sequence[tuple[PagedBatch, Sequence[int]]],
    padding: int,
) -> list[StepRows]:
    """The rows of a step, in the order of their tokens.

    If they are of one band, unused tokens behind them are further rows of the same call.
    """
    rows = [
        StepRows(batch.row_states, counts, [*map(add, batch.offsets, counts)], prompt)
        for prompt, batches in ((False, bands), (True, prompts))
        for batch, counts in batches
    ]
    if len(rows) > 1 or prompts:
        return rows
    unused = [1] * padding
    return [StepRows(r.states, [*r.counts, *unused], [*r.columns, *unused]) for r in rows]
