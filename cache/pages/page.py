"""The size of a page, the number of pages of some tokens, and the sizes of steps."""

from __future__ import annotations

import functools

from chairlift.cache.capacity import rounded_up

# Tokens of a page. Attention looks up one table entry for this many tokens, and half a page of each
# sequence is unused on average.
PAGE_TOKENS = 64
# The smallest bound of the columns that a token sees.
MIN_COLUMNS = 1024


def page_count(tokens: int) -> int:
    """Pages that hold the first ``tokens`` tokens of a sequence."""
    return -(-tokens // PAGE_TOKENS)


@functools.cache
def step_size(tokens: int) -> int:
    """The number of tokens that a step of ``tokens`` tokens is computed with; the rest is padding.

    At most seven more, or less than a quarter: there are only four sizes from each power of two to
    the next. So compiled steps, kernel launches and freed buffers of one step serve others.
    """
    return tokens if tokens <= 8 else rounded_up(tokens, _distance(tokens - 1))


def step_size_below(tokens: int) -> int:
    """The largest size of a step without padding that has at most ``tokens`` tokens."""
    return tokens if tokens <= 8 else tokens // _distance(tokens) * _distance(tokens)


def seen_window(wanted: int | None, kept: int | None) -> int | None:
    """The tokens that a layer's mask lets each token see; None: all.

    Args:
        wanted: the window of the mask that the model wants.
        kept: the window whose pages the layer keeps.

    Raises:
        ValueError: the mask is wider than that window. A trial of a few tokens would not show it.
    """
    if wanted is not None and kept is not None and wanted > kept:
        raise ValueError(f"a mask of {wanted} tokens over the pages of a window of {kept}")
    return kept if wanted is None else wanted


def doubled(least: int, needed: int) -> int:
    """The smallest of ``least``, twice that, four times and so on that is at least ``needed``."""
    size = least
    while size < needed:
        size *= 2
    return size


def column_bounds(tokens: int) -> list[int]:
    """All values of ``column_bound`` for sequences of up to ``tokens`` tokens."""
    bounds = [MIN_COLUMNS]
    while bounds[-1] < tokens:
        bounds.append(2 * bounds[-1])
    return bounds


def column_bound(tokens: int) -> int:
    """An upper bound of ``tokens``, with few different values: it decides what a step launches."""
    return doubled(MIN_COLUMNS, tokens)


def _distance(tokens: int) -> int:
    """From the last size up to ``tokens`` to the next."""
    return max(8, 1 << tokens.bit_length() - 3)
