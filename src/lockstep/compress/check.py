"""The gate on a finished model: loaded as users load it, against the original, on the same text.

Measures whatever makes a model differ from its original: a folder or GGUF file in fewer bits, a
scheme that loading rounds to (`weights`), or keys and values kept in fewer bits (`kv_cache_dtype`,
of the checked model alone; the original keeps those of its compute dtype).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from lockstep.compress.config import CheckConfig, NarrowKVCacheDtype, default_increase
from lockstep.compress.gate import Divergence, GateReport
from lockstep.compress.layer_stream import HiddenStates
from lockstep.compress.texts import load_texts
from lockstep.core.errors import ConfigError
from lockstep.core.progress import Progress
from lockstep.models.attention import PackedAttention
from lockstep.models.layers import quantized_weights
from lockstep.models.llama import Llama
from lockstep.models.loading import LoadedModel, load_model


@torch.no_grad()
def check(config: CheckConfig, *, quiet: bool = False) -> GateReport:
    """Measure; one model's layers are in memory at a time. ConfigError where the models cannot be
    compared.
    """
    original = load_model(config.original, quiet=quiet)
    texts = load_texts(config.data, original.tokenizer, quiet=quiet)
    tokens_SL = texts.held_out_SL
    with tempfile.TemporaryDirectory(prefix="lockstep-check-") as folder:
        shape = (*tokens_SL.shape, original.config.hidden_size)
        states = HiddenStates(Path(folder) / "original", shape, original.model.compute_dtype)
        with Progress(quiet=quiet) as progress:
            for index in progress.track(range(len(tokens_SL)), "original", total=len(tokens_SL)):
                states.x_SLD[index] = _hidden(original.model, tokens_SL[index], None)
            del original.model.model.layers[:]  # the last projection is still needed
            checked = load_model(config.checked, weights=config.weights, quiet=quiet)
            _check_alike(original, checked, config)
            divergence = Divergence()
            for index in progress.track(range(len(tokens_SL)), "checked", total=len(tokens_SL)):
                divergence.add(
                    states.x_SLD[index],
                    _hidden(checked.model, tokens_SL[index], config.kv_cache_dtype),
                    tokens_SL[index],
                    logits_before=original.model.logits,
                    logits_after=checked.model.logits,
                )
    return divergence.report(
        text=texts.held_out_name,
        max_perplexity_increase=default_increase(config.limits, _family(checked.model)),
        limits=config.limits,
        layers=[],
    )


def _hidden(model: Llama, tokens_L: Tensor, kv_cache_dtype: NarrowKVCacheDtype | None) -> Tensor:
    attention = PackedAttention.from_lengths([len(tokens_L)], kv_format=kv_cache_dtype)
    return model(tokens_L, attention.positions(), attention)


def _family(model: Llama) -> str | None:
    """int4 where any weight has 4 bits; None for models of no family, which get the least limit."""
    return "int4" if any(w.scheme.bits == 4 for _, w in quantized_weights(model)) else None


def _check_alike(original: LoadedModel, checked: LoadedModel, config: CheckConfig) -> None:
    sizes = original.config.vocab_size, checked.config.vocab_size
    probe = "The same text, 123 naïve tokens?"
    if sizes[0] != sizes[1] or original.tokenizer.encode(probe) != checked.tokenizer.encode(probe):
        raise ConfigError(
            f"{config.checked} and {config.original} do not share a vocabulary ({sizes[1]} and "
            f"{sizes[0]} tokens), so their predictions cannot be compared; give the model that "
            f"{config.checked} was made from"
        )
