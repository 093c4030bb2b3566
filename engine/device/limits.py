"""The scheduler's limits, from the configuration, the device and the model."""

from __future__ import annotations

from chairlift.cache.capacity import KVGeometry
from chairlift.engine.config import EngineConfig
from chairlift.engine.device.profile import BANDS, DeviceProfile
from chairlift.engine.messages.speculative_config import draft_tokens
from chairlift.scheduler.limits import Limits


def build_limits(
    config: EngineConfig,
    profile: DeviceProfile,
    geometry: KVGeometry,
    vocabulary: int,
    kv_bytes: int,
    prefix_bytes: int,
) -> Limits:
    """Builds the scheduler's limits.

    Args:
        geometry: the bytes that tokens take in the model's caches.
        vocabulary: the last dimension of the model's logits.
        kv_bytes, prefix_bytes: see ``memory.plan_kv_memory``.

    Raises:
        ValueError: a limit that cannot work, with the numbers.
    """
    # Checkpoints are states of recurrent layers, kept for the prefix cache.
    keeps_states = prefix_bytes > 0 and not geometry.pads
    return Limits(
        max_rows=max_rows(config, profile),
        max_step_tokens=max_step_tokens(config, profile),
        kv_bytes=kv_bytes,
        geometry=geometry,
        checkpoint=profile.checkpoint_tokens if keeps_states else None,
        chunk_multiple=profile.chunk_multiple,
        max_scored=profile.max_scored(vocabulary),
        avoid_partial_prefill=profile.avoids_partial_prefill,
        lookahead_columns=profile.lookahead_columns,
        step_seconds=step_seconds(config, profile),
        max_step_stretch=0.0 if config.max_step_ms else profile.step_stretch,
        bands=BANDS,
        band_bytes=profile.band_bytes,
        ageing=config.priority_ageing,
        prefill_slack=config.prefill_slack,
        draft_tokens=draft_tokens(config.speculative),
    )


def max_rows(config: EngineConfig, profile: DeviceProfile) -> int:
    """Rows of the decode batch: the configured number, else the device's."""
    return profile.max_rows if config.max_rows is None else config.max_rows


def max_step_tokens(config: EngineConfig, profile: DeviceProfile) -> int:
    """Tokens of a step: the configured number, else a chunk and one decode token for each row."""
    if config.max_step_tokens is not None:
        return config.max_step_tokens
    return profile.chunk_tokens + max_rows(config, profile)


def step_seconds(config: EngineConfig, profile: DeviceProfile) -> float:
    """Time limit of a step while rows are decoding: the configured one, else the device's."""
    return profile.step_seconds if config.max_step_ms is None else config.max_step_ms / 1e3
