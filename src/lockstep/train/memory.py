"""What a training run will need, estimated from shapes before anything is allocated.

Counts weights, the packed copies that stay (frozen weights'), gradients, optimizer moments, what
one micro-batch saves for its backward pass, and what the loss makes beside it: all of it is there
at once when a step has several micro-batches; of one alone, gradients take the place of
activations. Libraries and tokenizer (0.35 GB), kernels' temporaries and the tokenised data come on
top.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lockstep.core.model_config import ModelConfig

FP32_BYTES = 4
LOGIT_ROWS_FP32, LOGIT_ROWS = 64, 192
"""Rows of logits, and of their gradient in the compute dtype, that there are at one time."""


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes by purpose."""

    weights: int
    """Parameters, and of frozen ones the copy in the layout and precision the kernels read."""
    optimizer: int
    gradients: int
    activations: int
    """Of one micro-batch at the end of its forward pass."""
    loss: int
    """Packed copies of the last projection, and chunks of logits."""

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.activations + self.loss


def estimate_memory(
    model: nn.Module,
    config: ModelConfig,
    *,
    compute_dtype: torch.dtype,
    micro_batch_tokens: int,
    activation_checkpointing: bool,
    recompute_mlp: bool = False,
) -> TrainingMemory:
    """Peak bytes of an optimizer step."""
    parameters = list(model.parameters())
    trainable = sum(weight.numel() for weight in parameters if weight.requires_grad)
    frozen = sum(w.numel() for w in parameters if w.dim() == 2 and not w.requires_grad)
    size = compute_dtype.itemsize
    qkv_size = config.q_size + 2 * config.kv_size
    # What enters both halves of a layer; heads, their output; gate and up.
    kept = 2 * config.hidden_size + qkv_size + config.q_size
    kept += qkv_size if config.qk_norm else 0
    wide = 2 * config.intermediate_size
    per_layer = size * (kept if recompute_mlp else kept + wide)
    if activation_checkpointing:
        activations = config.num_layers * size * config.hidden_size + size * (kept + wide)
    else:
        activations = config.num_layers * per_layer
    table = config.vocab_size * config.hidden_size
    logits = config.vocab_size * (LOGIT_ROWS_FP32 * FP32_BYTES + LOGIT_ROWS * size)
    return TrainingMemory(
        weights=sum(w.numel() * w.element_size() for w in parameters) + frozen * size,
        optimizer=2 * trainable * FP32_BYTES,
        gradients=trainable * FP32_BYTES,
        activations=micro_batch_tokens * activations,
        loss=2 * table * size + logits,
    )
