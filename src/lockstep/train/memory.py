"""What a training run will need, estimated from shapes before anything is allocated.

Counts weights, their packed copies, gradients, optimizer moments and the activations that one
micro-batch saves for its backward pass. Temporary buffers, the libraries (about 0.4 GB) and the
tokenised data come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lockstep.core.model_config import ModelConfig

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes by purpose."""

    weights: int
    """Parameters, and the copy of each in the layout and precision the kernels read."""
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate_memory(
    model: nn.Module,
    config: ModelConfig,
    *,
    compute_dtype: torch.dtype,
    micro_batch_tokens: int,
    activation_checkpointing: bool,
) -> TrainingMemory:
    """Peak bytes of an optimizer step."""
    parameters = list(model.parameters())
    trainable = sum(weight.numel() for weight in parameters if weight.requires_grad)
    matrices = sum(weight.numel() for weight in parameters if weight.dim() == 2)
    per_layer = compute_dtype.itemsize * (
        6 * config.hidden_size
        + 3 * config.q_size
        + 4 * config.kv_size
        + 3 * config.intermediate_size
    )
    saved_a_layer = (
        compute_dtype.itemsize * config.hidden_size if activation_checkpointing else per_layer
    )
    recomputed = per_layer if activation_checkpointing else 0
    return TrainingMemory(
        weights=sum(weight.numel() * weight.element_size() for weight in parameters)
        + matrices * compute_dtype.itemsize,
        gradients=trainable * FP32_BYTES,
        optimizer=2 * trainable * FP32_BYTES,
        activations=micro_batch_tokens * (config.num_layers * saved_a_layer + recomputed),
    )
