"""The loaded adapters of a model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from chairlift.engine.device import memory
from chairlift.engine.errors import AdapterError
from chairlift.engine.lora.files import AdapterFiles, Shape, read_adapter
from chairlift.engine.lora.folded import folded_factors
from chairlift.engine.lora.layers import AdaptedLayers
from chairlift.engine.lora.low_rank import Factors, LowRankError, dimensions
from chairlift.engine.model.lora_routing import Routing, Slot

log = logging.getLogger(__name__)

# Reading takes the file, its numbers in float32, and their copies in layers and fused products.
_COPIES = 8
# Longer than any salt of a client, so that no client can name an adapter's prefixes.
_SALT_CHARS = 1024


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """The limits for adapters.

    Attributes:
        max_loras: the maximum number of loaded adapters.
        max_rank: the maximum rank of each.
    """

    max_loras: int = 8
    max_rank: int = 64


DEFAULT_LIMITS = AdapterLimits()


class Adapters:
    """The adapters of one model, by key. Not thread-safe; call it between two steps.

    Args:
        model: the language model, with the device's faster layers.
        routing: gets the adapter of each token of a model call.
        trial: computes a few tokens with the adapter of a slot, and returns their logits.
        on_host: compute the products for few tokens in NumPy; the model has to be eager.
    """

    def __init__(
        self,
        model: Any,
        routing: Routing,
        trial: Callable[[Slot], mx.array],
        limits: AdapterLimits,
        on_host: bool = False,
    ) -> None:
        self._layers = AdaptedLayers(model, routing, on_host)
        self._folded = folded_factors(model, self._layers.targets)
        self._trial = trial
        self._limits = limits
        # In the order of their slots; the matrices have the types of their layers.
        self._loaded: dict[str, AdapterFiles] = {}
        self._slots: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._loaded)

    def slot(self, key: str) -> Slot:
        """The slot of a loaded adapter, which the next load or unload may change; "" has none."""
        return self._slots[key] if key else None

    def check(self, key: str) -> None:
        """Raises ValueError if ``key`` is neither "" nor that of a loaded adapter."""
        if key and key not in self._loaded:
            raise ValueError("the adapter is not loaded")

    def salt(self, key: str, salt: str) -> str:
        """A salt that separates the prefixes of this adapter's weights from all others."""
        return f"adapter {self._loaded[key].digest} ".ljust(_SALT_CHARS) + salt if key else salt

    def load(self, key: str, folder: Path, digest: str = "") -> AdapterFiles:
        """Loads an adapter; all others keep their weights.

        Args:
            key: its name among the loaded ones.
            folder: contains its files.
            digest: the required digest of its files; "" accepts any.

        Raises:
            AdapterError: it cannot be loaded. Nothing has changed.
        """
        if key in self._loaded:
            raise AdapterError(f"the adapter {key} is loaded already")
        if len(self) >= self._limits.max_loras:
            raise AdapterError(f"{len(self)} adapters are loaded, and --max-loras allows no more")
        shapes = {
            name: Shape(*dimensions(layer), self._folded.get(name))
            for name, layer in self._layers.targets.items()
        }
        room = memory.free_memory() // _COPIES
        files = read_adapter(folder, shapes, self._limits.max_rank, room)
        if digest and files.digest != digest:
            raise AdapterError(f"{folder}: its files have changed since it was loaded")
        try:
            self._layers.adapt(files.factors)
            self._loaded[key] = files._replace(
                factors={name: self._cast(name, *both) for name, both in files.factors.items()}
            )
            self._fill()
            self._try(key, folder)
        except Exception:  # of any type, like a lack of memory
            self.unload(key)
            raise
        log.info("adapter %s: %d layers, rank %d", key, len(files.factors), files.rank)
        return files

    def unload(self, key: str) -> None:
        """Removes an adapter that no row uses; ignores unknown keys."""
        if self._loaded.pop(key, None) is not None:
            self._fill()

    def _cast(self, name: str, a: mx.array, b: mx.array) -> Factors:
        dtype = self._layers[name].dtype
        factors = Factors(mx.contiguous(a.astype(dtype)), mx.contiguous(b.astype(dtype)))
        mx.eval(factors)
        return factors

    def _fill(self) -> None:
        """Gives each layer the matrices of all loaded adapters."""
        self._slots = {key: slot for slot, key in enumerate(self._loaded)}
        for low_rank in self._layers:
            low_rank.factors = {
                slot: files.factors[low_rank.name]
                for slot, files in enumerate(self._loaded.values())
                if low_rank.name in files.factors
            }
        self._layers.fill(len(self))

    def _try(self, key: str, folder: Path) -> None:
        """Computes a few tokens with a loaded adapter, which must use all layers that it changes.

        Raises:
            AdapterError: a layer is not computed as other linear layers are.
        """
        changed = [self._layers[name] for name in self._loaded[key].factors]
        for low_rank in changed:
            low_rank.seen = False
        try:
            logits = self._trial(self.slot(key))
            # Not infinity: models rule out tokens by it.
            valid = not mx.isnan(logits).any().item()
        except LowRankError as error:
            raise AdapterError(f"{folder}: this layer cannot have adapters: {error}") from error
        except Exception as error:
            raise AdapterError(f"{folder}: a step fails: {str(error).splitlines()[0]}") from error
        for low_rank in changed:
            # Models keep some layers that they do not compute; their matrices B are zero.
            trained = self._loaded[key].factors[low_rank.name].b.any().item()
            if trained and not low_rank.seen:
                raise AdapterError(f"{folder}: the model's {low_rank.name} cannot have adapters")
        if not valid:
            raise AdapterError(f"{folder}: it makes the model's logits invalid numbers")
