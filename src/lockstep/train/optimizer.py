"""AdamW on fp32 master weights, global-norm clipping in a fixed order, and learning-rate schedules.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019). Weights, moments and
gradients are each touched once a step: clipping is a factor on the gradients as they are read. The
rate is a function of the step number, not an object with state, so there is nothing to restore.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.errors import ConfigError
from lockstep.kernels import huge_pages
from lockstep.kernels.adamw import Update, adamw, sums_of_squares
from lockstep.train.config import OptimizerConfig, ScheduleConfig


class AdamW(torch.optim.Optimizer):
    """AdamW with the state names of torch's: `step`, `exp_avg`, `exp_avg_sq`, all fp32."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None, *, grad_scale: float = 1.0) -> None:
        """Update every weight that has a gradient, of which `grad_scale` times is taken."""
        assert closure is None, "the update needs the gradient once"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group, grad_scale)

    def _update(
        self, weight: Tensor, gradient: Tensor, group: dict[str, Any], grad_scale: float
    ) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            # Apart from the heap: what stays would lie between activations that come and go.
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = huge_pages.empty(weight.shape, torch.float32).zero_()
        state["step"] += 1
        update = Update(
            rate=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=int(state["step"]),
            grad_scale=grad_scale,
        )
        adamw(weight, state["exp_avg"], state["exp_avg_sq"], gradient.contiguous(), update)
        # Packed copies of a weight know by its version that they are old.
        torch.autograd.graph.increment_version(weight)


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


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
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
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """In the model's own order, which fixes the order of every reduction over parameters."""
    return [weight for weight in model.parameters() if weight.requires_grad]


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Global L2 norm of the gradients."""
    return global_norm([weight.grad for weight in parameters if weight.grad is not None])


def clipping_factor(norm: float, *, max_norm: float | None) -> float:
    """What brings gradients of L2 norm `norm` to `max_norm` at most."""
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / norm


def global_norm(tensors: Sequence[Tensor]) -> float:
    """L2 norm over all elements, the same to the bit for any number of threads.

    Pieces are summed in a fixed order and the sums by `math.fsum`, which rounds once and so has no
    order.
    """
    sums: list[float] = []
    for tensor in tensors:
        sums += sums_of_squares(tensor.detach().float().contiguous()).tolist()
    if not all(map(math.isfinite, sums)):
        return math.nan
    return math.sqrt(math.fsum(sums))


def _is_decayed(name: str, weight: Tensor) -> bool:
    return weight.dim() >= 2 and "embed_tokens" not in name
