"""The numbers of a step's model call, and the sizes that decide its shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager

import mlx.core as mx

from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.pages.layer import PagedStep
from chairlift.cache.pages.page import doubled
from chairlift.engine.model.chunk import Chunk, PackedTokens

# A step with chunks has the shape of one with this many tokens of rows, or with twice as many, and
# so on.
ROWS = 64
# The tokens of a step are computed one by one, so that each reads its columns by itself, if it has
# at most this many prompt tokens, which see at most this many columns. Attention of chunks reads
# columns once, and takes the host a third longer to launch.
FEW_TOKENS, FEW_COLUMNS = 64, 1 << 16


# The tokens of rows: on the device, or known to the host.
RowTokens = mx.array | list[int]


@contextmanager
def fed_step(
    step_with: Callable[..., AbstractContextManager[PagedStep]],
    tokens: RowTokens,
    more: Seq[list[int]],
) -> Iterator[tuple[PagedStep, mx.array, mx.array]]:
    """A context of a step, with its tokens ``[tokens, 1]`` and the positions of logits.

    The host uploads all of its numbers together.

    Args:
        step_with: ``paged_step``, which lacks only ``more``.
        tokens: those of the rows.
        more: the tokens behind those of the rows, and the positions.
    """
    fed, positions = more
    known = tokens if isinstance(tokens, list) else []
    sampled = None if isinstance(tokens, list) else tokens
    with step_with(more=[known + fed, positions]) as step:
        own, places = step.more
        if sampled is not None:
            own = mx.concatenate([sampled, own]) if fed else sampled
        yield step, own[:, None], places


def padded_positions(packed: PackedTokens, size: int) -> list[int]:
    """``packed.positions``, with zeros behind them: ``size`` numbers."""
    return packed.positions + [0] * (size - len(packed.positions))


def are_few(rows: Seq[PagedBatch], counts: Seq[Seq[int]] | None, chunks: Seq[Chunk]) -> bool:
    """Whether a step's tokens are computed one by one."""
    if any(chunk.scored or chunk.pooled for chunk in chunks):
        return False
    several = [(chunk.cache.offsets[0], len(chunk.tokens)) for chunk in chunks]
    if sum(new for _, new in several) > FEW_TOKENS:
        return False
    for batch, own in zip(rows, counts, strict=True) if counts is not None else ():
        several += [(old, new) for old, new in zip(batch.offsets, own, strict=True) if new > 1]
    return sum(new * (old + new) for old, new in several) <= FEW_COLUMNS


def have_images(chunks: Seq[Chunk]) -> bool:
    """Whether any token of these chunks is an image's."""
    return any(
        chunk.images is not None
        and chunk.images.has_places(chunk.cache.offsets[0], len(chunk.tokens))
        for chunk in chunks
    )


def rows_bound(rows: int, tokens: int) -> int:
    """The ``StepTokens.row_limit`` of a step with chunks."""
    return min(tokens, doubled(ROWS, rows))
