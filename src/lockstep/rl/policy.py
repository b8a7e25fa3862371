"""The model that is trained, and the one KL is measured from.

Trainer and engine share one model object: an update is visible to the next rollout without a copy.
The reference is the same model with its adapters off, or, when every weight is trained, a second
copy in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.kernels.attention import KVFormat
from lockstep.models.llama import Llama
from lockstep.models.loading import LoadedModel, load_model
from lockstep.models.lora import apply_lora, set_lora_enabled
from lockstep.rl.config import RLConfig
from lockstep.rl.loss import Reference


def load_policy(config: RLConfig) -> LoadedModel:
    """The model with exactly those parameters trainable that the run trains, in fp32."""
    loaded = load_model(
        config.model,
        precision=config.precision,
        weights=config.quantization,
        master_weights=config.lora is None,
    )
    if config.lora is not None:
        apply_lora(loaded.model, config.lora, seed=config.loop.seed)
    loaded.model.kv_format = _kv_format(config)
    loaded.model.activation_checkpointing = config.loop.activation_checkpointing
    loaded.model.recompute_mlp(config.loop.recompute_mlp)
    return loaded


def load_reference(config: RLConfig, policy: Llama) -> Reference | None:
    """The distribution before training; None if KL is off."""
    if config.algorithm.kl_beta == 0:
        return None
    if config.lora is not None:
        return lambda: _adapters_off(policy)
    frozen = load_model(
        config.model, precision=config.precision, weights=config.quantization, quiet=True
    ).model
    frozen.requires_grad_(False)
    frozen.kv_format = _kv_format(config)
    return lambda: _as_context(frozen)


def _kv_format(config: RLConfig) -> KVFormat | None:
    dtype = config.rollout.kv_cache_dtype
    return None if dtype == "auto" else dtype


@contextmanager
def _adapters_off(policy: Llama) -> Iterator[Llama]:
    set_lora_enabled(policy, False)
    try:
        yield policy
    finally:
        set_lora_enabled(policy, True)


@contextmanager
def _as_context(model: Llama) -> Iterator[Llama]:
    yield model
