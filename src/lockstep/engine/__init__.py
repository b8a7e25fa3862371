"""Answers requests with a model: scheduling steps, computing them, drawing tokens, ending samples.

Never trains, and never changes a weight. Names are imported on first use, so that
`lockstep.engine.request` does not cost a torch import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.engine.async_engine import AsyncEngine, EngineStoppedError
    from lockstep.engine.completer import EngineCompleter
    from lockstep.engine.config import EngineConfig
    from lockstep.engine.engine import Engine
    from lockstep.engine.request import Request, RequestLimits, sample_seed
    from lockstep.engine.stats import EngineStats

_HOMES = {
    "AsyncEngine": "async_engine",
    "Engine": "engine",
    "EngineCompleter": "completer",
    "EngineConfig": "config",
    "EngineStats": "stats",
    "EngineStoppedError": "async_engine",
    "Request": "request",
    "RequestLimits": "request",
    "sample_seed": "request",
}

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineCompleter",
    "EngineConfig",
    "EngineStats",
    "EngineStoppedError",
    "Request",
    "RequestLimits",
    "sample_seed",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
