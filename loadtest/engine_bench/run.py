"""Measures the engines that the flags name, and reports."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from chairlift.engine.config import EngineConfig
from chairlift.engine.core.acceleration import Acceleration, accelerate
from chairlift.engine.core.start import kv_storage
from chairlift.engine.cpu.thread_count import ThreadWatch, blas_threads
from chairlift.engine.device import memory
from chairlift.engine.device.profile import current
from chairlift.engine.model.adapters import adapt
from chairlift.engine.model.trials.probe import probe
from chairlift.engine.parallel.followers import Report, Stop
from chairlift.engine.parallel.rank_pipe import RankPipe
from chairlift.engine.parallel.ranks import ALONE, Group, Ranks
from chairlift.engine.process.follower import Follower
from chairlift.engine.process.rank_process import follow
from chairlift.engine.speculation.proposal import proposers
from chairlift.loadtest.engine_bench.engines import Engine, MeasuredModel, Ours, Peer
from chairlift.loadtest.engine_bench.flags import engine_parser
from chairlift.loadtest.engine_bench.load import Load
from chairlift.loadtest.engine_bench.measure import (
    Device,
    decode_step,
    mixed,
    steps_in_turn,
)
from chairlift.loadtest.engine_bench.ranks import Leader
from chairlift.loadtest.engine_bench.server import measure_server
from chairlift.loadtest.engine_bench.speculation import decode_rate, oracles
from chairlift.loadtest.errors import LoadTestError
from chairlift.loadtest.servers.child import exit_on_sigterm
from chairlift.loadtest.shapes import SHAPES, config_of, random_adapter, random_model

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def run(arguments: Sequence[str], leader: Leader | None) -> int:
    """Measures, prints a table, and writes the figures.

    Args:
        leader: the other ranks of the engine, if there are any.
    """
    options = _parser().parse_args(arguments)
    if options.server:
        return _run_server(options)
    for flag in ("adapters", "speculative"):
        if getattr(options, flag) and options.tensor_parallel_size > 1:
            print(f"engine_bench: --{flag} needs a --tensor-parallel-size of 1", file=sys.stderr)
            return 2
    ranks: Ranks = leader.join() if leader else ALONE
    with ThreadWatch(blas_threads(), ranks.threads(None)):
        try:
            _measure(options, _model(options, ranks), leader)
        except ValueError as error:
            print(f"engine_bench: {error}", file=sys.stderr)
            return 2
    return 0


def _run_server(options: argparse.Namespace) -> int:
    """Measures a server, prints the figures and writes them."""
    exit_on_sigterm()
    try:
        figures = measure_server(options, config_of(options.model), DTYPES[options.dtype])
    except (ValueError, LoadTestError) as error:
        print(f"engine_bench: {error}", file=sys.stderr)
        return 2
    _print(figures, "server")
    _write(options, {"server": figures})
    return 0


def follow_run(arguments: Sequence[str], pipe: RankPipe, ranks: Group, rank: int) -> None:
    """Makes the same engines as rank 0, and computes its part of their steps."""
    options = _parser().parse_args(arguments)
    with ThreadWatch(blas_threads(), ranks.threads(None)):
        model = _model(options, ranks, rank)
        for rows, paced in _engines(options):
            mx.reset_peak_memory()
            follower = Follower(partial(model.make_core, rows, paced))
            follow(pipe, follower)
            pipe.answer(Report(ranks.device, [mx.get_peak_memory()]))
            del follower
            _free_memory()
    assert isinstance(pipe.take(), Stop)


def _parser() -> argparse.ArgumentParser:
    from chairlift.loadtest import engine_bench

    return engine_parser(engine_bench.__doc__ or "", SHAPES, DTYPES)


def _model(options: argparse.Namespace, ranks: Ranks, rank: int = 0) -> MeasuredModel:
    """Makes the model, or this rank's part of it.

    Raises:
        ValueError: there is no such model.
    """
    config = config_of(options.model)
    shard = ranks.shard if ranks.size > 1 else None
    model = random_model(config, DTYPES[options.dtype], options.bits, shard=shard, rank=rank)
    adapt(model)
    settings = EngineConfig(
        max_rows=max([options.rows, *options.decode]),
        kv_memory=None if options.kv_gb is None else int(options.kv_gb * 1e9),
        kv_bits=options.kv_bits,
        max_step_ms=options.max_step_ms,
        prefix_cache_bytes=0,
    )
    if options.only == "mlx-lm":
        acceleration = Acceleration(eager=False)  # the model stays as mlx-lm makes it
    else:
        acceleration = accelerate(model, spare_bytes=memory.spare_bytes(settings, ranks.sharing))
    probed = probe(model, config["model_type"], kv_storage(settings, half=False))
    planned = memory.plan_kv_memory(settings, current(), probed.vocabulary, ranks.sharing)
    (kv_bytes,) = ranks.smallest(planned.kv_bytes)
    settings = replace(settings, kv_memory=kv_bytes)
    # As in the engine process: a full collection would delay a step.
    gc.freeze()
    return MeasuredModel(model, probed, acceleration, settings, ranks)


def _engines(options: argparse.Namespace) -> list[tuple[int, bool]]:
    """The rows of each engine to be measured, and whether the time of its steps is limited."""
    engines = [(rows, False) for rows in options.decode]
    return [*engines, (options.rows, True)] if options.requests else engines


def _measure(options: argparse.Namespace, model: MeasuredModel, leader: Leader | None) -> None:
    """Measures all engines, prints their figures, and writes them.

    Raises:
        ValueError: requests do not fit into the KV memory.
    """
    weights, vocabulary = _bytes_of(model.model), model.probed.vocabulary
    device = Device(options.bandwidth, options.flops)
    engines: dict[str, Callable[..., Engine]] = {"ours": partial(Ours, model)}
    if leader is None:
        engines["mlx-lm"] = partial(Peer, model.model)
    report: dict[str, Any] = {}
    for name, make in engines.items():
        if options.only not in (None, name):
            continue
        figures: dict[str, Any] = {"weight_bytes": weights}
        for rows, paced in _engines(options):
            mx.reset_peak_memory()
            engine = make(rows=rows, paced=paced)
            if paced:
                load = Load(
                    *(options.requests, options.prompt_tokens, options.output_tokens),
                    *(options.rate, options.seed),
                )
                new = mixed(engine, list(load.draw(vocabulary)), name).figures(weights)
                _print(new, name)
                figures |= new
            else:
                timed = rows in options.timeline
                took, timeline = decode_step(engine, rows, options.context, vocabulary, timed)
                bound = device.decode_ms(weights, model.probed.geometry, rows, options.context)
                figures[f"decode_{rows}_rows_ms"] = took
                print(f"{name:8} {rows:4} rows: {took:8.2f} ms a step (least {bound:.2f})")
                if timeline is not None:
                    print(f"{name:8} {rows:4} rows: {timeline.summary}")
                    figures[f"timeline_{rows}_rows"] = timeline._asdict()
            peaks = [mx.get_peak_memory()]
            if leader is not None:
                peaks = leader.end_engine(peaks[0])
            shown = ", ".join(f"{peak / 1e9:.2f}" for peak in peaks)
            print(f"{name:8} {rows:4} rows: peak of memory {shown} GB", flush=True)
            figures.setdefault("peak_bytes", []).append([rows, paced, *peaks])
            del engine
            _free_memory()
        report[name] = figures
    if options.adapters:
        report["adapters"] = _compare_adapters(options, model)
    if options.speculative:
        report["speculative"] = _compare_speculation(options, model)
    _write(options, report)


def _print(figures: Mapping[str, float], name: str) -> None:
    for key, value in figures.items():
        print(f"{name:8} {key:26} {value:10.2f}", flush=True)


def _write(options: argparse.Namespace, report: Mapping[str, Any]) -> None:
    if options.out:
        shown = {name: str(value) for name, value in vars(options).items()}
        options.out.write_text(json.dumps({"options": shown, **report}, indent=2) + "\n")


def _compare_adapters(options: argparse.Namespace, model: MeasuredModel) -> dict[int, float]:
    """A step's time without adapters as a part of that with them, by the number of rows."""
    ratios = {}
    with TemporaryDirectory() as folder:
        numbers = range(options.adapters)
        adapters = [random_adapter(model.model, Path(folder, f"a{n}"), 8, n) for n in numbers]
        for rows in options.decode:
            pair = [Ours(model, rows, False), Ours(model, rows, False, adapters)]
            plain, adapted = steps_in_turn(pair, rows, options.context, model.probed.vocabulary)
            ratios[rows] = plain / adapted
            print(
                f"adapters {rows:4} rows: {plain:.2f} / {adapted:.2f} ms a step = "
                f"{ratios[rows]:.3f}",
                flush=True,
            )
            del pair
            _free_memory()
    return ratios


def _compare_speculation(options: argparse.Namespace, model: MeasuredModel) -> dict[int, float]:
    """Tokens a second with drafts as a multiple of those without, by the number of rows."""
    ratios = {}
    for rows in options.decode:
        rates = []
        for propose in (proposers, oracles(options.speculative)):
            engine = Ours(model, rows, False, propose=propose)
            rates.append(decode_rate(engine, rows, options.context, model.probed.vocabulary))
            del engine
            _free_memory()
        plain, drafted = rates
        ratios[rows] = drafted.tokens_per_s / plain.tokens_per_s
        print(
            f"drafts   {rows:4} rows: {drafted.tokens_per_s:.1f} / {plain.tokens_per_s:.1f} tokens "
            f"a second = {ratios[rows]:.3f} ({drafted.accepted:.2f} of {drafted.proposed:.2f} "
            "tokens right for each row and step)",
            flush=True,
        )
    return ratios


def _free_memory() -> None:
    """Frees the last engine's memory, so that it does not count in the next engine's peak."""
    gc.collect()
    mx.clear_cache()


def _bytes_of(model: Any) -> int:
    parameters: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in parameters)
