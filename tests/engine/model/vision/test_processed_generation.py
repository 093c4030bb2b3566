"""An engine generates the tokens of mlx-vlm from what the processors make."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine.bench import Bench
from support.vision.processors import PROCESSORS
from support.vision.prompts import TinyPrompts
from support.vision.vision_dir import picture

from chairlift.engine.messages import ImageSource
from chairlift.engine.model import attention
from chairlift.engine.model.vision.families import Family, family_of
from chairlift.engine.model.vision.processors.processing import Processing, processing_of
from chairlift.engine.model.vision.processors.processor import prepare

# Types that are called, or whose processors are, in a way of their own. PaliGemma is compared
# elsewhere: mlx-vlm's ``generate_step`` leaves out the mask by which its tokens see each other.
TYPES = [
    name
    for name in PROCESSORS
    if (family_of(name), processing_of(name)) != (Family(), Processing()) and name != "paligemma"
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", TYPES)
def test_an_engine_generates_the_tokens_of_mlx_vlm(tmp_path: Path, model_type: str) -> None:
    from mlx_vlm.generate.ar import generate_step
    from mlx_vlm.utils import load_model

    tiny = TinyPrompts(tmp_path, model_type)
    theirs = load_model(tiny.path)
    attention.install(tiny.model)
    bench, expected = Bench(tiny.model, tokens=1024, bands=2), []
    several = [3, 1, 0][-len(tiny.files.sizes) :]  # no size twice: of some types, images are large
    for numbers in ([0], several if processing_of(model_type).most is None else [3]):
        text = tiny.text(len(numbers))
        tokens, images = tiny.prepared(numbers)
        bench.submit(str(len(expected)), tokens, 4, reading={"images": images})
        inputs = tiny.inputs(text, tiny.pictures(numbers))
        ids, pixels = inputs.pop("input_ids"), inputs.pop("pixel_values", None)
        mask = inputs.pop("attention_mask", None)
        # With a size, mlx-vlm's Zaya fails.
        settings = {"max_tokens": 4, "temperature": 0.0, "prefill_step_size": None}
        steps = generate_step(ids, theirs, pixels, mask, **settings, **inputs)
        expected.append([int(token) for token, _ in steps])
    bench.drain()
    assert [bench.tokens(str(number)) for number in range(len(expected))] == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "height"), [("gemma4_unified", 4), ("kimi_vl", 60), ("lfm2_vl", 4)]
)
def test_an_image_that_only_the_processor_takes_is_an_error_of_the_client(
    tmp_path: Path, model_type: str, height: int
) -> None:
    """mlx-vlm's models of these types fail for some very long images."""
    tiny = TinyPrompts(tmp_path, model_type)
    bench = Bench(tiny.model, tokens=1024)
    long = ImageSource(picture(1, 600, height), None, "auto")
    tokens, images = prepare(tiny.processor, tiny.text(1), [long])
    bench.submit("long", tokens, 4, reading={"images": images})
    tokens, images = tiny.prepared([0])
    bench.submit("good", tokens, 4, reading={"images": images})
    bench.drain()
    (last,) = bench.outputs["long", 0]
    assert (last.finish, last.client_error) == ("error", True)
    assert str(last.error).startswith("messages: the model cannot take an image: ")
    assert len(bench.tokens("good")) == 4
