"""Calls the layers that mix tokens part by part, in steps that pack the tokens of all sequences.

Only calls with a ``SplitLayer`` as the cache change; see ``cache.packed.split``. The embedding, the
MLPs, the experts and the output layer see all tokens of the step at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache as memoized
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import CacheList

from chairlift.cache.packed.split import PackedMask, Places, SplitLayer, Within
from chairlift.cache.packed.step import PackedLayer

_CACHE = "cache"


def install(model: Any) -> None:
    """Changes the outermost layers that take a cache within each decoder layer of a model."""
    for layer in getattr(model, "layers", ()):
        for mixer in _outermost(layer) or [layer]:
            own: Any = type(mixer)
            if _takes_cache(mixer) and not hasattr(own, "is_divided"):
                mixer.__class__ = _divided(own)


def _outermost(layer: Any) -> list[Any]:
    """The layers within a layer that take a cache, without those within these."""
    found: list[Any] = []
    children: Any = layer.children()
    flat: Any = tree_flatten(children, is_leaf=lambda each: isinstance(each, Module))
    for _, child in flat:
        if isinstance(child, Module):
            found += [child] if _takes_cache(child) else _outermost(child)
    return found


def _takes_cache(layer: Any) -> bool:
    return callable(layer) and _CACHE in arguments(layer)


def arguments(layer: Any) -> list[str]:
    """The names of the arguments of a layer's calls."""
    return _arguments(type(layer))


def _arguments(base: Any) -> list[str]:
    """The names of the arguments of a class's calls."""
    call: Any = getattr(base, "original_class", base).__call__
    return [*inspect.signature(call).parameters][1:]


@memoized
def _divided(base: Any) -> type:
    """A subclass whose calls are divided if the cache says so."""
    original, names = base.__call__, _arguments(base)
    index = names.index(_CACHE)

    def call(layer: Any, *args: Any, **named: Any) -> Any:
        cache = named.get(_CACHE, args[index] if len(args) > index else None)
        split = _split_of(cache)
        if split is None:
            return original(layer, *args, **named)
        given = {**dict(zip(names, args, strict=False)), **named}
        first = next(value for value in given.values() if isinstance(value, mx.array))
        return _by_part(_Call(partial(original, layer), given, first.shape[:2]), cache, split)

    source = getattr(base, "original_class", base)
    own = {"__call__": call, "original_class": source, "is_divided": True}
    return type(base.__name__, (base,), own)


def _split_of(cache: Any) -> SplitLayer | PackedLayer | None:
    """The cache, or the one in a list of caches, that demands a call for each part."""
    if isinstance(cache, CacheList):
        found = [split for each in cache.caches if (split := _split_of(each))]
        if len({type(split) for split in found}) > 1:
            raise TypeError("the call of a layer with pages and a state cannot be repeated")
        return found[0] if found else None
    splits = isinstance(cache, SplitLayer | PackedLayer) and cache.splits
    return cache if splits else None


class _Call(NamedTuple):
    """A layer's call, of the step or of a part of it.

    Attributes:
        layer: computes ``[rows, length, ...]`` from arrays of such a form.
        shape: rows and length.
    """

    layer: Callable[..., Any]
    given: Mapping[str, Any]
    shape: tuple[int, ...]

    def changed(
        self, shape: tuple[int, ...], array: Callable[[mx.array], mx.array], number: int = 0
    ) -> _Call:
        """The call with other tokens: ``array`` takes them from each array of the call's form.

        An array with a number for each row gets those of the rows' first tokens.

        Args:
            number: which of the masks of a packed step applies.
        """

        def own(value: Any) -> Any:
            if isinstance(value, PackedMask):
                return value.masks[number]
            if isinstance(value, mx.array) and value.shape[:2] == self.shape:
                return array(value)
            if isinstance(value, mx.array) and value.shape == self.shape[:1]:
                return array(mx.broadcast_to(value[:, None], self.shape))[:, 0]
            return value

        return _Call(self.layer, {name: own(x) for name, x in self.given.items()}, shape)

    def result(self, cache: Any) -> Any:
        """Calls the layer."""
        return self.layer(**{**self.given, _CACHE: cache})


def _by_part(step: _Call, cache: Any, split: SplitLayer | PackedLayer) -> Any:
    """Calls a layer once for each part, and joins the results, ``[tokens, 1, ...]``."""
    within = split.within()
    results: list[Any] = []
    launches = isinstance(split, SplitLayer) and split.launches
    if launches:
        mx.async_eval([value for value in step.given.values() if isinstance(value, mx.array)])
    for number, part in enumerate(split.parts):
        places = part.places
        own = step.changed((places.rows, places.length), places.taken, number)
        with nullcontext() if places.is_all(step.shape[0]) else within(places.tokens):
            result = own.result(_cache_of(cache, number))
        if part.called is not None:
            part.called(partial(_repeat, own, places, within))
        results.append(tree_map(places.restored, result))
        if launches:
            mx.async_eval(results[-1], part.cache.state)
    return tree_map(split.joint.joined, results[0], *results[1:])


def _cache_of(cache: Any, number: int) -> Any:
    """One part's cache, or its list of caches."""
    if isinstance(cache, CacheList):
        return CacheList(*(_cache_of(each, number) for each in cache.caches))
    return cache.parts[number].cache


def _repeat(
    call: _Call, places: Places, within: Within, cache: Any, rows: Sequence[int], length: int
) -> None:
    """See ``Again``."""
    chosen = mx.array(list(rows))
    again = call.changed((len(rows), length), lambda array: array[chosen, :length])
    with within(places.tokens.reshape(places.rows, places.length)[rows, :length].reshape(-1)):
        again.result(cache)
