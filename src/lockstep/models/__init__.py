"""Models: one definition for trainer and server, and the checkpoints it is read from and written
to.

Names are imported on first use, so that `lockstep.models.resolve` does not cost a torch import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.models.attention import AttentionContext, KVCache, PackedAttention, PagedAttention
    from lockstep.models.llama import Llama
    from lockstep.models.loading import LoadedModel, load_model
    from lockstep.models.lora import apply_lora, lora_state_dict, merge_lora
    from lockstep.models.lora_config import LoraConfig
    from lockstep.models.resolve import ModelSource, resolve_model

_HOMES = {
    "AttentionContext": "attention",
    "KVCache": "attention",
    "Llama": "llama",
    "LoadedModel": "loading",
    "LoraConfig": "lora_config",
    "ModelSource": "resolve",
    "PackedAttention": "attention",
    "PagedAttention": "attention",
    "apply_lora": "lora",
    "load_model": "loading",
    "lora_state_dict": "lora",
    "merge_lora": "lora",
    "resolve_model": "resolve",
}

__all__ = [
    "AttentionContext",
    "KVCache",
    "Llama",
    "LoadedModel",
    "LoraConfig",
    "ModelSource",
    "PackedAttention",
    "PagedAttention",
    "apply_lora",
    "load_model",
    "lora_state_dict",
    "merge_lora",
    "resolve_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
