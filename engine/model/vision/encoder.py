"""Computes the embeddings of images, a few modules at a time beside the steps, and keeps them."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from chairlift.engine.messages import PromptImage
from chairlift.engine.model.vision.model import VisionModel
from chairlift.engine.model.vision.prompt_images import PromptImages
from chairlift.engine.model.vision.stages import Stage

# Seconds that the encoder may take between two steps without rows: as long as a step of them.
IDLE_SECONDS = 0.1
# Memory for the embeddings of images: those of about 100 images, 1,000 tokens each, of 2,560
# numbers in 16 bits.
IMAGE_BYTES = 512 << 20


@dataclass(slots=True)
class _Waiting:
    """A request whose images are not all encoded yet; ``missing`` by digest."""

    prompt: Sequence[int]
    missing: dict[bytes, PromptImage]


@dataclass(slots=True)
class _Begun:
    """An image that is being encoded.

    Attributes:
        digest: of the image.
        stages: what is left to compute.
        seconds: the time that it took until now.
        longest: the seconds of its longest stage.
    """

    digest: bytes
    stages: deque[Stage]
    seconds: float = 0.0
    longest: float = 0.0


@dataclass(slots=True)
class EncoderCounts:
    """The encoder's work since the last step, for the metrics.

    Attributes:
        queries: images of new requests.
        hits: those of them that need no encoding.
        encoded: the seconds that each other image took.
    """

    queries: int = 0
    hits: int = 0
    encoded: list[float] = field(default_factory=list)


class ImageEncoder:
    """The images of all unfinished requests.

    The images of a request are encoded while it waits in the queue. An image that a chunk needs and
    that is not kept, for instance after a preemption, is encoded with the chunk.

    Args:
        model: computes the embeddings; None for a model that does not see.
        budget: bytes of embeddings that are kept, those of waiting requests included. A request
            whose images need more waits until no other request needs them.
    """

    def __init__(self, model: VisionModel | None, budget: int) -> None:
        self._model = model
        self._budget = budget
        self._requests: dict[str, PromptImages] = {}
        self._waiting: dict[str, _Waiting] = {}
        # The digests that a request needs, from its encoding until its prompt is computed.
        self._needed: dict[str, frozenset[bytes]] = {}
        self._kept: OrderedDict[bytes, mx.array] = OrderedDict()
        self._ready: set[str] = set()
        self._failed: dict[str, Exception] = {}
        # The image of which some modules are computed.
        self._begun: _Begun | None = None
        # The seconds that a stage took last for each number of its output, by its name.
        self._took: dict[str, float] = {}
        self._counts = EncoderCounts()

    @property
    def nbytes(self) -> int:
        """Bytes of the embeddings that are kept."""
        return sum(embeddings.nbytes for embeddings in self._kept.values())

    def begin(self, request_id: str, prompt: Sequence[int], images: Sequence[PromptImage]) -> None:
        """Registers a request's images.

        Without images, a prompt is registered only if the model has to know which of its tokens see
        those behind them, or where it ends.

        Raises:
            ValueError: the model does not see, or an image does not fit it.
        """
        if self._model is None:
            if images:
                raise ValueError("this model takes no images")
            return
        uncut = self._model.together.runs(prompt, images)
        placed = images or self._model.windows_replies
        if placed or uncut:
            shifts = self._model.shifts(prompt, images) if placed else None
            self._requests[request_id] = PromptImages(
                *(prompt, images, shifts, self.embeddings, uncut)
            )

    def await_images(
        self, request_id: str, prompt: Sequence[int], images: Sequence[PromptImage], computed: int
    ) -> None:
        """Queues a request's images, except those in its first ``computed`` tokens."""
        needed = {image.digest: image for image in images if image.places[-1] >= computed}
        missing = {digest: each for digest, each in needed.items() if digest not in self._kept}
        self._counts.queries += len(images)
        self._counts.hits += len(images) - len(missing)
        self._needed[request_id] = frozenset(needed)
        if missing:
            self._waiting[request_id] = _Waiting(prompt, missing)

    def images_of(self, request_id: str) -> PromptImages | None:
        """The images that ``begin`` has registered of a request; None if there are none."""
        return self._requests.get(request_id)

    def __len__(self) -> int:
        """The number of unfinished requests that ``begin`` has registered."""
        return len(self._requests)

    def is_awaited(self, request_id: str) -> bool:
        """Whether a request waits for the encoder, or for ``take_done``."""
        return any(request_id in each for each in (self._waiting, self._ready, self._failed))

    @property
    def has_work(self) -> bool:
        """Whether ``encode`` would encode an image."""
        return self._next() is not None

    @property
    def has_news(self) -> bool:
        """Whether ``take_done`` would return something."""
        return bool(self._ready or self._failed)

    def take_counts(self) -> EncoderCounts:
        """The work since the last call."""
        counts, self._counts = self._counts, EncoderCounts()
        return counts

    def take_done(self) -> tuple[set[str], dict[str, Exception]]:
        """The requests that need not wait any longer, and the errors of those that failed."""
        done, self._ready = self._ready, set()
        failed, self._failed = self._failed, {}
        return done, failed

    def encode(self, seconds: float) -> float:
        """Encodes waiting images, module by module, for ``seconds`` and at least one module.

        An image that is not complete then is continued by the next call.

        Returns:
            The seconds that it took.
        """
        start = time.monotonic()
        end = start + seconds
        while (found := self._next()) is not None:
            request_id, image = found
            try:
                complete = self._continue(image, self._waiting[request_id].prompt[image.span], end)
            except Exception as error:  # a model file may raise anything
                self._begun = None
                same = [n for n, each in self._waiting.items() if image.digest in each.missing]
                for name in same:
                    del self._waiting[name]
                    self._failed[name] = error
                complete = True
            if not complete:
                break
            for waiting in self._waiting.values():
                waiting.missing.pop(image.digest, None)
            self._ready |= {name for name, each in self._waiting.items() if not each.missing}
            self._waiting = {n: each for n, each in self._waiting.items() if each.missing}
            if time.monotonic() > end:
                break
        return time.monotonic() - start

    def _continue(self, image: PromptImage, own: Sequence[int], end: float) -> bool:
        """Computes modules of an image until the time ``end``; whether it is complete then."""
        assert self._model is not None
        start = time.monotonic()
        if image.digest in self._kept:
            return True
        if self._begun is None or self._begun.digest != image.digest:
            self._begun = _Begun(image.digest, deque(self._model.stages(image, own)))
        begun = self._begun
        last = start
        while begun.stages:
            name, output = begun.stages.popleft()
            try:
                mx.eval(output)
            except RuntimeError:
                # In a function that mlx-vlm compiles, a module's output is no array by itself. If
                # it is another error, the embeddings have it, too.
                if not begun.stages:
                    raise
            now = time.monotonic()
            took, last = now - last, now
            self._took[name] = took / max(1, output.size)
            begun.longest = max(begun.longest, took)
            if begun.stages and now + self._expected(begun) > end:
                begun.seconds += time.monotonic() - start
                return False
        self._begun = None
        self._keep(image, output, begun.seconds + time.monotonic() - start)
        return True

    def _expected(self, begun: _Begun) -> float:
        """The seconds of the next stage, by what such a one took last, or what any took at most."""
        name, output = begun.stages[0]
        took = self._took.get(name)
        return begun.longest if took is None else took * output.size

    def _keep(self, image: PromptImage, embeddings: mx.array, seconds: float) -> None:
        self._counts.encoded.append(seconds)
        self._kept[image.digest] = embeddings
        self._trim()

    def embeddings(self, image: PromptImage, own: Sequence[int]) -> mx.array:
        """An image's embeddings, ``[places, hidden size]``; kept ones, or else computed now.

        Args:
            own: the tokens of its span of the prompt.

        Raises:
            ValueError: the model makes another number of embeddings than the image has places.
        """
        if (kept := self._kept.get(image.digest)) is not None:
            self._kept.move_to_end(image.digest)
            return kept
        assert self._model is not None
        start = time.monotonic()
        embeddings = self._model.embeddings(image, own)
        mx.eval(embeddings)
        self._keep(image, embeddings, time.monotonic() - start)
        return embeddings

    def computed(self, request_id: str) -> None:
        """A request's prompt is computed: its embeddings may be dropped."""
        self._needed.pop(request_id, None)
        self._trim()

    def drop(self, request_id: str) -> None:
        """Forgets a request that has ended."""
        self._requests.pop(request_id, None)
        self._waiting.pop(request_id, None)
        self._needed.pop(request_id, None)
        self._ready.discard(request_id)
        self._failed.pop(request_id, None)
        waiting = self._waiting.values()
        if self._begun and not any(self._begun.digest in each.missing for each in waiting):
            self._begun = None
        self._trim()

    def _next(self) -> tuple[str, PromptImage] | None:
        """The next image, and the first request that waits for it; None if memory is full."""
        for request_id, waiting in self._waiting.items():
            others = self._needed.keys() - self._waiting.keys()
            if self.nbytes >= self._budget and others:
                return None
            return request_id, next(iter(waiting.missing.values()))
        return None

    def _trim(self) -> None:
        """Drops embeddings beyond the budget that no request needs, the oldest first."""
        excess = self.nbytes - self._budget
        if excess <= 0:
            return
        needed = frozenset[bytes]().union(*self._needed.values())
        for digest in [digest for digest in self._kept if digest not in needed]:
            excess -= self._kept.pop(digest).nbytes
            if excess <= 0:
                return
