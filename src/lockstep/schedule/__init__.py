"""Decides what a step computes and which KV blocks hold it: no torch, no clock, no model."""

from lockstep.schedule.blocks import BlockPool
from lockstep.schedule.prefix_cache import RadixCache
from lockstep.schedule.scheduler import (
    BLOCK_SIZE,
    Scheduler,
    SchedulerConfig,
)
from lockstep.schedule.sequence import SequenceSpec
from lockstep.schedule.step import Admission, Chunk, Step

__all__ = [
    "BLOCK_SIZE",
    "Admission",
    "BlockPool",
    "Chunk",
    "RadixCache",
    "Scheduler",
    "SchedulerConfig",
    "SequenceSpec",
    "Step",
]
