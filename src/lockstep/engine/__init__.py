"""Answers requests with a model: scheduling steps, computing them, drawing tokens, ending samples.

Never trains, and never changes a weight.
"""

from lockstep.engine.async_engine import AsyncEngine, EngineStoppedError
from lockstep.engine.completer import EngineCompleter
from lockstep.engine.config import EngineConfig
from lockstep.engine.engine import Engine
from lockstep.engine.request import Request, RequestLimits, sample_seed
from lockstep.engine.stats import EngineStats

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
