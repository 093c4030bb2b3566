"""Prompts with images as the engine gets them, and as mlx-vlm's own path makes them."""

from __future__ import annotations

import io
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
from PIL import Image
from support.vision.processors import PROCESSORS
from support.vision.vision_dir import picture, vision_dir

from chairlift.engine.messages import ImagePrompt, ImageSource
from chairlift.engine.model.vision.loading import load_vision_model
from chairlift.engine.model.vision.model import VisionModel
from chairlift.engine.model.vision.processors.loading import load_processor
from chairlift.engine.model.vision.processors.processing import processing_of
from chairlift.engine.model.vision.processors.processor import Processor, prepare


class TinyPrompts:
    """Prompts of a tiny model; images have numbers, and equal numbers are the same image.

    Args:
        folder: in which the model's folder is written.
        weights: without them, there is no ``model``.
    """

    def __init__(self, folder: Path, model_type: str, *, weights: bool = True) -> None:
        self.model_type = model_type
        self.files = PROCESSORS[model_type]
        self.path = vision_dir(folder, model_type, weights=weights)
        self.processor = processor_of(self.path, model_type)

    @cached_property
    def model(self) -> VisionModel:
        return load_vision_model(self.path, self.model_type)

    def text(self, images: int) -> str:
        marks = [self.files.mark.replace("{}", str(number + 1)) for number in range(images)]
        # mlx-vlm's PaliGemma takes an image at the beginning of its prompt only.
        before = "" if self.model_type == "paligemma" else "Look: "
        return before + "".join(f"{mark} and " for mark in marks) + "what?"

    def pictures(self, numbers: list[int]) -> list[bytes]:
        sizes = self.files.sizes
        # Nothing compresses random pixels, and trying takes long.
        return [
            picture(number, *sizes[number % len(sizes)], compress_level=0) for number in numbers
        ]

    def prepared(self, numbers: list[int], text: str | None = None) -> ImagePrompt:
        text = self.text(len(numbers)) if text is None else text
        sources = [ImageSource(each, "image/png", "auto") for each in self.pictures(numbers)]
        return prepare(self.processor, text, sources)

    def inputs(self, text: str, pictures: list[bytes]) -> dict[str, Any]:
        """What mlx-vlm's ``get_input_embeddings`` takes."""
        from mlx_vlm.utils import prepare_inputs

        processor = self.processor._processor
        images = [Image.open(io.BytesIO(each)).convert("RGB") for each in pictures]
        if self.model_type == "llava":
            # mlx-vlm's call of this processor fails with this version of transformers.
            inputs = dict(processor(text=[text], images=images))
            return {name: mx.array(value) for name, value in inputs.items()}
        inputs = prepare_inputs(
            processor,
            images=images,
            prompts=text,
            image_token_index=self.processor._image_id,
            **processing_of(self.model_type).settings,
        )
        if self.model_type == "deepseek_vl_v2":
            # mlx-vlm's code reads beyond this array.
            crops, pixels = inputs["images_spatial_crop"], inputs["pixel_values"]
            more = pixels.shape[1] - crops.shape[1]
            inputs["images_spatial_crop"] = mx.pad(crops, [(0, 0), (0, more), (0, 0)])
        return inputs

    def assert_embeddings_are_those_of_mlx_vlm(self, text: str, pictures: list[bytes]) -> None:
        """Compares the tokens of a text and the embeddings of all its images."""
        sources = [ImageSource(each, "image/png", "auto") for each in pictures]
        tokens, images = prepare(self.processor, text, sources)
        inputs = self.inputs(text, pictures)
        mask = inputs.pop("attention_mask", None)
        ids = mx.array(inputs.pop("input_ids")).reshape(1, -1)
        embedded = self.model.model.get_input_embeddings(
            ids, inputs.pop("pixel_values", None), mask=mask, **inputs
        )
        assert embedded.inputs_embeds.shape[1] == len(tokens)
        ours, theirs = tokens, ids[0].tolist()
        if len(theirs) != len(tokens) or min(theirs) < 0:  # images have other tokens of theirs
            places = {place for image in images for place in image.places}
            ours = [token for place, token in enumerate(tokens) if place not in places]
            image_id = self.processor._image_id
            theirs = [token for token in theirs if token >= 0 and token != image_id]
        assert ours == theirs
        first = 0
        for image in images:
            at = mx.array(image.places)
            expected = [embedded.inputs_embeds[0, at]]
            expected += _added(embedded.deepstack_visual_embeds, at, first)
            if embedded.pos_hw is not None:
                expected.append(embedded.pos_hw[0, at])
            own = self.model.embeddings(image, tokens[image.span])
            assert mx.allclose(mx.concatenate(expected, axis=-1), own, atol=1e-4).item()
            first += len(image.places)


def processor_of(path: Path, model_type: str) -> Processor:
    """The processor of a tiny model in a folder."""
    processor = load_processor(str(path), model_type, trust_remote_code=False)
    for name, value in PROCESSORS[model_type].attributes.items():
        setattr(processor._processor, name, value)
    return processor


def _added(embeds: Any, places: mx.array, first: int) -> list[mx.array]:
    """What layers add to the tokens at these places, of which ``first`` images' tokens precede."""
    if embeds is None:
        return []
    embeds = getattr(embeds, "embeddings", embeds)
    if isinstance(embeds, list):
        return [each[first : first + places.size] for each in embeds]
    if embeds.ndim == 4:
        return [embeds[0, places, number] for number in range(embeds.shape[2])]
    return [each[places] for each in embeds]
