"""AdamW on fp32 master weights, global-norm clipping in a fixed order, and learning-rate schedules.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019); the update itself
is torch's. The rate is a function of the step number, not an object with state, so there is
nothing to restore.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lockstep.core.errors import ConfigError
from lockstep.train.config import OptimizerConfig, ScheduleConfig

_NORM_BLOCK = 1024


def learning_rate_at(step: int, *, peak: float, num_steps: int, schedule: ScheduleConfig) -> float:
    """Rate of the update that follows `step` finished ones (0 for the first)."""
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.lr_schedule == "constant":
        return peak
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, num_steps - schedule.warmup_steps))
    remaining = (
        0.5 * (1 + math.cos(math.pi * progress))
        if schedule.lr_schedule == "cosine"
        else 1 - progress
    )
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * remaining)


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, in two groups: with and without weight decay."""
    trainable = [
        (name, weight) for name, weight in model.named_parameters() if weight.requires_grad
    ]
    if not trainable:
        raise ConfigError("no parameter is trainable; apply LoRA or unfreeze the weights first")
    for name, weight in trainable:
        if weight.dtype != torch.float32:
            raise ConfigError(
                f"{name} is {weight.dtype}; trainable weights must be fp32 masters: "
                "load the model with master_weights=True"
            )
    decayed = [weight for name, weight in trainable if _is_decayed(name, weight)]
    exempt = [weight for name, weight in trainable if not _is_decayed(name, weight)]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """In the model's own order, which fixes the order of every reduction over parameters."""
    return [weight for weight in model.parameters() if weight.requires_grad]


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], *, max_norm: float | None) -> float:
    """Scale gradients in place to a global L2 norm of `max_norm` at most; return it as it was."""
    gradients = [weight.grad for weight in parameters if weight.grad is not None]
    norm = global_norm(gradients)
    if max_norm is not None and norm > max_norm and math.isfinite(norm):
        torch._foreach_mul_(gradients, max_norm / norm)
    return norm


def global_norm(tensors: Sequence[Tensor]) -> float:
    """L2 norm over all elements, the same to the bit for any number of threads.

    Squares are summed in blocks of 1,024 and the blocks by `math.fsum`, which rounds once and so
    has no order.
    """
    block_sums: list[float] = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).to(torch.float32)
        whole = flat.numel() // _NORM_BLOCK * _NORM_BLOCK
        block_sums += flat[:whole].view(-1, _NORM_BLOCK).square().sum(dim=1).tolist()
        block_sums.append(flat[whole:].square().sum().item())
    if not all(map(math.isfinite, block_sums)):
        return math.nan
    return math.sqrt(math.fsum(block_sums))


def _is_decayed(name: str, weight: Tensor) -> bool:
    return weight.dim() >= 2 and "embed_tokens" not in name
