"""Adapters' files: both formats give mlx-lm's logits, and bad files a line that says why."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.tuner.utils import load_adapters
from support.engine.adapters import matrices, write, write_mlx, write_peft
from support.engine.bench import Bench
from support.engine.reference import solo_logprobs
from support.tiny import TinyKind, tiny_model

from chairlift.api.schemas.schemas import MAX_SALT_CHARS
from chairlift.engine.lora.adapters import AdapterLimits
from chairlift.engine.messages import AdapterFailed, AdapterLoaded, LoadAdapter

PROMPT = [5, 6, 7, 200, 30, 31]
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def bench() -> Bench:
    """An engine that no test leaves an adapter in."""
    return Bench(tiny_model("llama", seed=1))


def _load(bench: Bench, folder: Path) -> AdapterLoaded | AdapterFailed:
    return bench.core.load_adapter(LoadAdapter("x", str(folder)))


def _refused(bench: Bench, folder: Path) -> str:
    """The one line about an adapter that cannot be loaded; nothing is lost."""
    failed = _load(bench, folder)
    assert isinstance(failed, AdapterFailed), failed
    assert failed.message == " ".join(failed.message.split())
    assert not len(bench.core.adapters)
    return failed.message


def _pairs(model: Any = None, seed: int = 4, **options: Any) -> Any:
    return matrices(model or tiny_model("llama", seed=1), seed, **options)


def _config(change: Change) -> Callable[[Path], object]:
    """Changes an adapter's configuration."""

    def changed(folder: Path) -> None:
        path = folder / "adapter_config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    return changed


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", mx.float32), ("qwen2", mx.float16), ("gemma3", mx.bfloat16)]
)
def test_both_formats_give_the_logprobs_of_mlx_lm(
    kind: TinyKind, dtype: mx.Dtype, tmp_path: Path
) -> None:
    model = tiny_model(kind, seed=1)
    pairs = {n: (a.astype(dtype), b.astype(dtype)) for n, (a, b) in _pairs(model).items()}
    mlx = write_mlx(tmp_path / "mlx", pairs, scale=0.7)
    peft = write_peft(tmp_path / "peft", pairs, alpha=0.7 * 4)
    rslora = write_peft(tmp_path / "rslora", pairs, alpha=0.7 * math.sqrt(4), use_rslora=True)
    expected = solo_logprobs(load_adapters(tiny_model(kind, seed=1), str(mlx)), PROMPT)
    plain = solo_logprobs(model, PROMPT)
    bench = Bench(model)
    for folder in (mlx, peft, rslora):
        assert isinstance(loaded := _load(bench, folder), AdapterLoaded), loaded
        assert loaded.rank == 4
        reading = {"adapter": "x", "prompt_logprobs": 0}
        bench.submit(folder.name, PROMPT, 1, reading=reading)
        bench.drain()
        bench.core.unload_adapter("x")
        (output,) = bench.outputs[folder.name, 0]
        assert output.prompt_logprobs is not None
        got = mx.array(memoryview(output.prompt_logprobs.chosen).cast("f").tolist())
        after = mx.array(PROMPT[1:])[:, None]
        chosen = mx.take_along_axis(expected, after, 1)[:, 0]
        assert mx.allclose(got, chosen, atol=1e-4)
        assert not mx.allclose(got, mx.take_along_axis(plain, after, 1)[:, 0], atol=0.1)


def test_an_adapter_of_some_blocks_and_layers_changes_only_those(tmp_path: Path) -> None:
    model = tiny_model("llama", seed=1)
    pairs = _pairs(model, suffixes=("v_proj",), is_changed=lambda name: ".1." in name)
    assert len(pairs) == 1
    bench = Bench(model)
    folder = write_mlx(tmp_path, pairs)
    assert isinstance(_load(bench, folder), AdapterLoaded)
    changed = [name for name, layer in model.named_modules() if hasattr(layer, "low_rank")]
    assert changed == list(pairs)


def _without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _truncated(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (_without("adapter_config.json"), "no such file"),
    "no weights": (_without("adapter_model.safetensors"), "no such file"),
    "truncated": (_truncated, "damaged or truncated"),
    "not JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "not JSON"),
    "deep JSON": (lambda f: (f / "adapter_config.json").write_text("[" * 9**5), "not JSON"),
    "a list": (lambda f: (f / "adapter_config.json").write_text("[1]"), "not a JSON object"),
    "dora": (_config(lambda c: c.update(use_dora=True)), "use_dora"),
    "qalora": (_config(lambda c: c.update(use_qalora=True)), "use_qalora"),
    "bias": (_config(lambda c: c.update(bias="lora_only")), "bias"),
    "modules": (_config(lambda c: c.update(modules_to_save=["lm_head"])), "modules_to_save"),
    "pattern": (_config(lambda c: c.update(rank_pattern={"q": 2})), "rank_pattern"),
    "fan in": (_config(lambda c: c.update(fan_in_fan_out=True)), "fan_in_fan_out"),
    "pissa": (_config(lambda c: c.update(init_lora_weights="pissa_niter_4")), "base model"),
    "a later field": (_config(lambda c: c.update(use_new_math=1)), "use_new_math"),
    "another kind": (_config(lambda c: c.update(peft_type="IA3")), "IA3"),
    "no rank": (_config(lambda c: c.pop("r")), "r is None"),
    "a wrong rank": (_config(lambda c: c.update(r=5)), "need 128 x 5"),
    "a large rank": (_config(lambda c: c.update(r=4096)), "--max-lora-rank"),
    "a rank of true": (_config(lambda c: c.update(r=True)), "r is True"),
    "infinite": (_config(lambda c: c.update(lora_alpha=math.inf)), "lora_alpha"),
    "not a number": (_config(lambda c: c.update(lora_alpha=math.nan)), "lora_alpha"),
    "a text": (_config(lambda c: c.update(lora_alpha="16")), "lora_alpha"),
    "huge": (_config(lambda c: c.update(lora_alpha=10**400)), "lora_alpha"),
    **{
        f"rslora {value!r}": (_config(lambda c, v=value: c.update(use_rslora=v)), "use_rslora")
        for value in ("false", "true", "", 0, 1, [], None)
    },
    "mlx config": (_config(lambda c: c.pop("peft_type")), "lora_parameters"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_by_its_fault(name: str, bench: Bench, tmp_path: Path) -> None:
    folder = write_peft(tmp_path, _pairs())
    damage, expected = BAD_FILES[name]
    damage(folder)
    assert expected in _refused(bench, folder)


def _tensors(folder: Path) -> dict[str, mx.array]:
    tensors = mx.load(str(folder / "adapter_model.safetensors"))
    assert isinstance(tensors, dict)
    return dict(tensors)


def _renamed(old: str, new: str) -> Change:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
_B = _A.replace("lora_A", "lora_B")
BAD_TENSORS: dict[str, tuple[Change, str]] = {
    "no layer": (_renamed(_A, _A.replace("q_proj", "x_proj")), "no linear layer"),
    "no block": (_renamed(_A, _A.replace("layers.0", "layers.9")), "no linear layer"),
    "the embedding": (_renamed(_A, _A.replace("layers.0.self_attn.q_proj", "embed_tokens")), "no"),
    "dora": (_renamed(_A, _A.replace("lora_A.weight", "lora_magnitude_vector")), "not supported"),
    "half a pair": (lambda t: t.pop(_B), "no matrix B"),
    "other inputs": (lambda t: t.update({_A: mx.zeros((4, 32))}), "32 x 4"),
    "other outputs": (lambda t: t.update({_B: mx.zeros((65, 4))}), "4 x 65"),
    "a vector": (lambda t: t.update({_A: mx.zeros((64,))}), "no matrix"),
    "integers": (lambda t: t.update({_A: mx.zeros((4, 64), mx.int32)}), "I32"),
    "infinite": (lambda t: t.update({_A: mx.full((4, 64), math.inf)}), "not finite"),
    "not a number": (lambda t: t.update({_B: mx.full((64, 4), math.nan)}), "not finite"),
    "overflowing": (lambda t: t.update({_A: mx.full((4, 64), 3e38)}), "invalid numbers"),
    "a long name": (_renamed(_A, "x\n" * 999), "not supported"),
    "nothing": (lambda t: t.clear(), "no matrices"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors_are_refused_by_their_fault(name: str, bench: Bench, tmp_path: Path) -> None:
    folder = write_peft(tmp_path, _pairs())
    change, expected = BAD_TENSORS[name]
    tensors = _tensors(folder)
    change(tensors)
    config = json.loads((folder / "adapter_config.json").read_text())
    write(folder, "adapter_model.safetensors", tensors, config)
    assert expected in _refused(bench, folder)
    bench.submit(name, PROMPT, 3)
    bench.drain()
    assert len(bench.tokens(name)) == 3


@pytest.mark.parametrize("shape", [[1 << 40, 0], [1] * 200, [], [0, 64]])
def test_impossible_shapes_are_refused_by_their_file(
    shape: list[int], bench: Bench, tmp_path: Path
) -> None:
    folder = write_peft(tmp_path, _pairs())
    data = bytes(4 * math.prod(shape))
    header = {_A: {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}}
    text = json.dumps(header).encode()
    path = folder / "adapter_model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert _refused(bench, folder).startswith(f"{path}: ")


def test_mlx_lms_dora_is_refused(bench: Bench, tmp_path: Path) -> None:
    folder = write_mlx(tmp_path, _pairs(), fine_tune_type="dora")
    assert "'dora' is not supported" in _refused(bench, folder)


def test_damaged_bytes_never_crash(bench: Bench, tmp_path: Path) -> None:
    folder = write_peft(tmp_path, _pairs(suffixes=("v_proj",)))
    path = folder / "adapter_model.safetensors"
    whole, random_ = path.read_bytes(), random.Random(3)
    for _ in range(40):
        data = bytearray(whole[: random_.choice([len(whole), random_.randrange(len(whole))])])
        for _ in range(random_.randrange(4)):
            # The header has the names, types, shapes and offsets.
            data[random_.randrange(min(len(data), 700))] = random_.randrange(256) if data else 0
        path.write_bytes(data)
        if isinstance(_load(bench, folder), AdapterLoaded):
            bench.core.unload_adapter("x")
    path.write_bytes(whole)
    assert isinstance(_load(bench, folder), AdapterLoaded)
    bench.core.unload_adapter("x")


def test_changed_files_are_noticed_when_an_engine_loads_them_again(
    bench: Bench, tmp_path: Path
) -> None:
    folder = write_peft(tmp_path, _pairs())
    first = _load(bench, folder)
    assert isinstance(first, AdapterLoaded)
    bench.core.unload_adapter("x")
    again = LoadAdapter("x", str(folder), first.digest)
    assert bench.core.load_adapter(again) == first
    bench.core.unload_adapter("x")
    write_peft(folder, _pairs(seed=5))
    failed = bench.core.load_adapter(again)
    assert isinstance(failed, AdapterFailed)
    assert "have changed" in failed.message


def test_no_more_adapters_than_allowed(bench: Bench, tmp_path: Path) -> None:
    folder = write_peft(tmp_path, _pairs())
    limit = AdapterLimits().max_loras
    for number in range(limit):
        loaded = bench.core.load_adapter(LoadAdapter(str(number), str(folder)))
        assert isinstance(loaded, AdapterLoaded)
    failed = _load(bench, folder)
    for number in range(limit):
        bench.core.unload_adapter(str(number))
    assert isinstance(failed, AdapterFailed)
    assert "--max-loras" in failed.message


def test_no_client_can_name_the_prefixes_of_an_adapter(bench: Bench, tmp_path: Path) -> None:
    loaded = _load(bench, write_peft(tmp_path, _pairs()))
    assert isinstance(loaded, AdapterLoaded)
    adapters = bench.core.adapters
    salts = ["", "a", " a", "a ", loaded.digest, "x" * MAX_SALT_CHARS]
    own = [adapters.salt("x", salt) for salt in salts]
    bench.core.unload_adapter("x")
    assert len({*own, *salts}) == len(own) + len(salts)
    assert min(map(len, own)) > MAX_SALT_CHARS
