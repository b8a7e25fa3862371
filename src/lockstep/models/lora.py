"""Low-rank adapters (Hu et al. 2021, eq. 3): y = W x + (alpha / r) B A x, W frozen.

Adapters compute unmerged in trainer and engine alike, so their bits agree; `merge_lora` folds them
in for export. Names inside the model match PEFT's but for its prefix: `<path>.lora_A.weight` (r, K)
and `<path>.lora_B.weight` (N, r).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lockstep.core.errors import ConfigError
from lockstep.kernels.linear import QuantizedWeight, is_fused
from lockstep.kernels.linear.trained import Adapter, Projection
from lockstep.kernels.scale import scale
from lockstep.models.layers import Linear, set_weight, take_over
from lockstep.models.llama import Llama
from lockstep.models.lora_config import LoraConfig


class LoraLinear(Linear):
    """A frozen Linear with an adapter beside it; takes over the base's parameters and packs."""

    def __init__(self, base: Linear, config: LoraConfig) -> None:
        nn.Module.__init__(self)
        n, k = base.weight.shape
        take_over(self, base)
        self.scaling = config.alpha / config.r
        self.enabled = True
        self.lora_A = Linear(k, config.r, row_parallel=base.segments > 1)
        self.lora_B = Linear(config.r, n)

    @property
    def is_adapted(self) -> bool:
        return self.enabled

    def adapt(self, x_TK: Tensor, y_TN: Tensor) -> Tensor:
        """y + B (alpha / r) A x; in place where products are fused."""
        h_TR = scale(self.lora_A(x_TK), self.scaling)
        return self.lora_B(h_TR, y_TN, out=y_TN if is_fused(x_TK) else None)

    def projection(self) -> Projection | None:
        if not self.enabled:
            return self._projection(None)
        return self._projection(
            Adapter(
                a_RK=self.lora_A.weight,
                b_NR=self.lora_B.weight,
                scaling=self.scaling,
                segments=self.lora_A.segments,
            )
        )


def apply_lora(model: Llama, config: LoraConfig, *, seed: int = 0) -> list[str]:
    """Freeze the model and give every targeted projection an adapter; returns the adapted modules'
    names.

    A is drawn uniformly as PEFT draws it (Kaiming, a = sqrt 5) and B is zero, so outputs do not
    change yet. Adapter parameters are fp32.
    """
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    adapted = []
    for name, module in list(model.named_modules()):
        leaf = name.rpartition(".")[2]
        if leaf not in config.targets or not isinstance(module, Linear):
            continue
        layer = LoraLinear(module, config)
        bound = 1 / math.sqrt(module.weight.shape[1])
        nn.init.uniform_(layer.lora_A.weight, -bound, bound, generator=generator)
        nn.init.zeros_(layer.lora_B.weight)
        model.set_submodule(name, layer)
        adapted.append(name)
    if not adapted:
        raise ConfigError(
            f"no module of the model matches lora targets {', '.join(config.targets)}"
        )
    return adapted


def lora_state_dict(model: Llama) -> dict[str, Tensor]:
    """The adapters' parameters by name."""
    return {
        name: p for name, p in model.named_parameters() if ".lora_A." in name or ".lora_B." in name
    }


def set_lora_enabled(model: Llama, enabled: bool) -> None:
    """Switch all adapters on or off: off gives the base model's bits."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.enabled = enabled


@torch.no_grad()
def merge_lora(model: Llama) -> None:
    """Fold every adapter into its weight, W += (alpha / r) B A in fp32, and drop it.

    The merged model rounds differently from the adapted one, so their logprobs agree closely, not
    bitwise. A quantised weight becomes fp32.
    """
    for name, module in list(model.named_modules()):
        if not isinstance(module, LoraLinear):
            continue
        delta = module.lora_B.weight.float() @ module.lora_A.weight.float() * module.scaling
        merged = Linear(0, 0)
        take_over(merged, module)
        if isinstance(merged.weight, QuantizedWeight):
            set_weight(merged, nn.Parameter(merged.weight.dequantize() + delta))
        else:
            merged.weight.copy_((merged.weight.float() + delta).to(merged.weight.dtype))
        model.set_submodule(name, merged)
