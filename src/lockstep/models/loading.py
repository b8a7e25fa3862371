"""From a checkpoint on disk to a model in memory.

The model is built on the meta device, then filled tensor by tensor, so at no time are there two
copies of the weights. What is in the checkpoint and what the model has must be the same: anything
missing, left over or of another shape stops the load before a byte of it is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from lockstep import kernels
from lockstep.core.errors import CheckpointError, ConfigError
from lockstep.core.json_fields import JsonFields
from lockstep.core.model_config import ModelConfig
from lockstep.core.progress import Progress
from lockstep.models import packed_cache
from lockstep.models.hf_folder import HfFolder
from lockstep.models.llama import Llama
from lockstep.models.resolve import ModelSource, resolve_model
from lockstep.text.tokenizer import Tokenizer

Precision = Literal["fp32", "bf16"]
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

# What older checkpoints carry although it follows from the config.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.masked_bias")
_NUM_NAMED = 3


class Checkpoint(Protocol):
    """Weights under Hugging Face's names, with what is needed to use them."""

    config: ModelConfig
    generation_config: Mapping[str, Any]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> torch.Tensor: ...

    def tokenizer(self) -> Tokenizer: ...


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to run, its tokenizer, and where they came from."""

    model: Llama
    tokenizer: Tokenizer
    config: ModelConfig
    """With the end tokens of generation_config.json merged in."""
    name: str
    """What the user called it; the name it is served under."""
    folder: Path
    """Where it was read from: a Hugging Face folder or a GGUF file."""
    generation_config: Mapping[str, Any]
    """generation_config.json, or empty."""


def load_model(
    source: str | Path | ModelSource,
    *,
    precision: Precision = "bf16",
    master_weights: bool = False,
    packed: bool = False,
    quiet: bool = False,
) -> LoadedModel:
    """Load `source`: a known name such as `smollm2`, a Hugging Face folder or a GGUF file.

    Computation is in `precision`. Parameters are held in it too, or in float32 with
    `master_weights` (for training). With `packed` the model can only serve: its projections are
    held in packed form alone, read from the file kept by the last such call (`packed_cache`).
    Raises CheckpointError, or FetchError for a known name that cannot be had.
    """
    if precision not in DTYPES:
        raise ConfigError(f"precision is {precision!r}; use {' or '.join(DTYPES)}")
    resolved = source if isinstance(source, ModelSource) else resolve_model(source)
    checkpoint = open_checkpoint(resolved)
    config = _with_generation_ends(checkpoint.config, checkpoint.generation_config)
    _check_size(checkpoint, where=str(resolved.path))
    dtype = DTYPES[precision]
    model = Llama(
        config,
        compute_dtype=dtype,
        param_dtype=torch.float32 if master_weights else dtype,
        device="meta",
    )
    tokenizer = checkpoint.tokenizer()
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{resolved.path}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"the model only {config.vocab_size}"
        )
    if packed and kernels.missing_reason() is None:
        _load_packed(checkpoint, model, resolved, precision, quiet=quiet)
    else:
        copy_weights(checkpoint, model, where=str(resolved.path), quiet=quiet)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        name=resolved.name,
        folder=resolved.path,
        generation_config=checkpoint.generation_config,
    )


def _load_packed(
    checkpoint: Checkpoint, model: Llama, source: ModelSource, precision: str, *, quiet: bool
) -> None:
    file = packed_cache.PackedFile.of(source, precision)
    tensors = file.read()
    if tensors is None:
        copy_weights(checkpoint, model, where=str(source.path), quiet=quiet)
        model.pack_weights()
        file.write(packed_cache.packed_weights_of(model))
        packed_cache.release_weights(model)
    else:
        packed_cache.take_packed_weights(model, tensors)


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """The checkpoint with nothing but its headers read."""
    if source.format == "gguf":
        from lockstep.models.gguf_model import GgufModel  # 60 ms that other starts need not pay

        return GgufModel(source.path)
    return HfFolder(source.path)


def copy_weights(checkpoint: Checkpoint, model: Llama, *, where: str, quiet: bool = False) -> None:
    """Give every parameter of `model`, on the meta device, the checkpoint's values in its dtype."""
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    _check_tensors(checkpoint.shapes, wanted, model.config, where=where)
    with Progress(quiet=quiet) as progress:
        names = progress.track(wanted, "load weights", total=len(wanted), unit="tensors")
        for name in names:
            owner_name, _, leaf = name.rpartition(".")
            owner = model.get_submodule(owner_name)
            dtype = owner.get_parameter(leaf).dtype
            # A copy even where dtypes agree: a tensor read from safetensors may be a view of the
            # file.
            tensor = checkpoint.read(name).to(dtype, copy=True)
            owner.register_parameter(leaf, nn.Parameter(tensor))


def _check_size(checkpoint: Checkpoint, *, where: str) -> None:
    """Two tensors that bound what the config may claim, before a model of that size is built."""
    config, shapes = checkpoint.config, checkpoint.shapes
    last = f"model.layers.{config.num_layers - 1}.self_attn.k_proj.weight"
    expected = (config.kv_size, config.hidden_size)
    if shapes.get(last) != expected:
        got = f"has shape {shapes[last]}" if last in shapes else "is not there"
        raise CheckpointError(
            f"{where} does not match its config: {last} {got}, expected shape {expected}"
        )


def _check_tensors(
    got: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    *,
    where: str,
) -> None:
    missing = [name for name in wanted if name not in got]
    extra = [name for name in got if name not in wanted and not _is_redundant(name, config)]
    misshapen = [
        f"{name} {got[name]} instead of {shape}"
        for name, shape in wanted.items()
        if name in got and got[name] != shape
    ]
    faults = [("lacks", missing), ("has unexpected", extra), ("has misshapen", misshapen)]
    found = [f"{verb} {len(names)} tensors ({_first(names)})" for verb, names in faults if names]
    if found:
        raise CheckpointError(f"{where} does not match its config: it {', '.join(found)}")


def _is_redundant(name: str, config: ModelConfig) -> bool:
    return name.endswith(_DERIVED_SUFFIXES) or (config.tie_embeddings and name == "lm_head.weight")


def _first(names: list[str]) -> str:
    more = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


def _with_generation_ends(config: ModelConfig, generation: Mapping[str, Any]) -> ModelConfig:
    """End tokens are in either file, or in both and different; any of them ends a generation."""
    ends = JsonFields(generation, where="generation_config.json").token_ids("eos_token_id")
    merged = tuple(dict.fromkeys((*config.eos_token_ids, *ends)))
    return dataclasses.replace(config, eos_token_ids=merged)
