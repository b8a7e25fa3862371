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
from lockstep.core.quantization import FLOAT, NATIVE, WeightScheme, names, parse_scheme
from lockstep.kernels import huge_pages
from lockstep.kernels.linear import QuantizedWeight, Weight, quantize_rtn
from lockstep.models import packed_cache
from lockstep.models.hf_folder import HfFolder
from lockstep.models.layers import Embedding, Linear, release_weights, set_weight
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

    @property
    def is_quantized(self) -> bool: ...

    def read(self, name: str) -> torch.Tensor: ...

    def read_quantized(self, name: str) -> QuantizedWeight | None: ...

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
    weights: str | None = None,
    master_weights: bool = False,
    packed: bool = False,
    quiet: bool = False,
) -> LoadedModel:
    """Load `source`: a known name such as `smollm2`, a Hugging Face folder or a GGUF file.

    Computation is in `precision`. Parameters are held in it too, or in float32 with
    `master_weights` (for training). `weights` says how matrices are held: a scheme of
    `lockstep.core.quantization` to round to while loading (with `master_weights`: before each
    product, for quantisation-aware training), `native` as the checkpoint holds them, `float`.
    By default GGUF files become float and compressed-tensors folders stay as they are.
    With `packed` the model can only serve: its projections are held in packed form alone, read from
    the file kept by the last such call (`packed_cache`). Raises
    CheckpointError, or FetchError for a known name that cannot be had.
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
    plan = _plan(
        checkpoint,
        weights,
        is_gguf=resolved.format == "gguf",
        master_weights=master_weights,
        where=str(resolved.path),
    )
    if packed and kernels.missing_reason() is None and not plan.rounds_on_the_fly:
        _load_packed(checkpoint, model, resolved, precision, plan, quiet=quiet)
    else:
        copy_weights(checkpoint, model, where=str(resolved.path), plan=plan, quiet=quiet)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        name=resolved.name,
        folder=resolved.path,
        generation_config=checkpoint.generation_config,
    )


def _load_packed(
    checkpoint: Checkpoint,
    model: Llama,
    source: ModelSource,
    precision: str,
    plan: WeightPlan,
    *,
    quiet: bool,
) -> None:
    file = packed_cache.PackedFile.of(source, precision, plan.name)
    kept = file.read()
    if kept is not None:
        kept.give_to(model)
        return
    where = str(source.path)
    copy_weights(checkpoint, model, where=where, plan=plan, packed_only=True, quiet=quiet)
    file.write(packed_cache.PackedWeights.of(model))


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """The checkpoint with nothing but its headers read."""
    if source.format == "gguf":
        from lockstep.models.gguf_model import GgufModel  # 60 ms that other starts need not pay

        return GgufModel(source.path)
    return HfFolder(source.path)


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """How weights are held in memory."""

    keeps_stored: bool = False
    """Quantised weights stay as the checkpoint has them."""
    scheme: WeightScheme | None = None
    """What float weights are rounded to."""
    rounds_on_the_fly: bool = False
    """Parameters stay float and are rounded before each product."""

    @property
    def name(self) -> str:
        """What `weights` would be to get this plan."""
        return NATIVE if self.keeps_stored else FLOAT if self.scheme is None else self.scheme.name

    def weight(self, checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Weight:
        """The weight of that name, a parameter unless quantised."""
        if self.keeps_stored and (stored := checkpoint.read_quantized(name)) is not None:
            return stored
        tensor = checkpoint.read(name)
        scheme = None if self.scheme is None else self.scheme.of_tensor(name, tuple(tensor.shape))
        if scheme is not None and not self.rounds_on_the_fly:
            return quantize_rtn(tensor, scheme)
        # A copy even where dtypes agree: a tensor read from safetensors may be a view of the file.
        return nn.Parameter(tensor.to(dtype, copy=True))


def _plan(
    checkpoint: Checkpoint,
    weights: str | None,
    *,
    is_gguf: bool,
    master_weights: bool,
    where: str,
) -> WeightPlan:
    if weights == FLOAT or (weights is None and (is_gguf or not checkpoint.is_quantized)):
        return WeightPlan()
    if weights in (None, NATIVE):
        if not checkpoint.is_quantized:
            raise ConfigError(
                f"{where} holds no quantised weights that kernels read, so weights='native' has "
                f"nothing to keep; use {', '.join(names()[:3])} to round its float weights"
            )
        if master_weights:
            raise ConfigError(
                f"{where} holds quantised weights, which cannot be trained in full; train a LoRA "
                "adapter on them, or use weights='float'"
            )
        return WeightPlan(keeps_stored=True)
    assert weights is not None
    scheme = parse_scheme(weights)
    if checkpoint.is_quantized and not is_gguf:
        raise ConfigError(
            f"{where} is quantised already; leave weights unset to use it as it is, or give "
            f"the checkpoint it was made from to round to {scheme}"
        )
    return WeightPlan(scheme=scheme, rounds_on_the_fly=master_weights)


def copy_weights(
    checkpoint: Checkpoint,
    model: Llama,
    *,
    where: str,
    plan: WeightPlan | None = None,
    packed_only: bool = False,
    quiet: bool = False,
) -> None:
    """Give every parameter of `model`, on the meta device, the checkpoint's values in its dtype, or
    as `plan` says. With `packed_only`, layer by layer, they are packed and given up.
    """
    plan = plan or WeightPlan()
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    _check_tensors(checkpoint.shapes, wanted, model.config, where=where)
    last_of_layer = {name.rpartition(".layers.")[2].partition(".")[0]: name for name in wanted}
    with Progress(quiet=quiet) as progress:
        for name in progress.track(wanted, "load weights", total=len(wanted), unit="tensors"):
            owner_name, _, leaf = name.rpartition(".")
            owner = model.get_submodule(owner_name)
            try:
                weight = plan.weight(checkpoint, name, dtypes[name])
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
            if isinstance(owner, Linear | Embedding) and leaf == "weight":
                set_weight(owner, weight)
                if plan.scheme is not None and plan.rounds_on_the_fly:
                    owner.scheme = plan.scheme.of_tensor(name, wanted[name])
            else:
                owner.register_parameter(leaf, weight)
            number = name.rpartition(".layers.")[2].partition(".")[0]
            if packed_only and number.isdigit() and last_of_layer[number] == name:
                layer = model.model.layers[int(number)]
                model.pack_layer(layer)
                release_weights(layer)
                huge_pages.trim_heap()
    if packed_only:
        model.pack_table()
        release_weights(model)
        huge_pages.trim_heap()


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
