"""What an engine has done and is doing, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot. Counters count from the engine's start; times are sums over sequences, in
    seconds.
    """

    num_running: int
    """Sequences that hold KV blocks."""
    num_waiting: int
    kv_usage: float
    """Share of the KV blocks that sequences refer to, 0 to 1."""
    num_steps: int
    prefix_queries: int
    """Tokens looked up in the prefix cache."""
    prefix_hits: int
    """Tokens found there."""
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    num_finished: int
    """Sequences that ended by themselves."""
    num_aborted: int
    queue_s: float
    """From arrival to the first step."""
    prefill_s: float
    """From the first step to the first token."""
    decode_s: float
    """From the first token to the last."""


class EngineCounters:
    """The counters behind EngineStats; written by the engine alone."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.num_finished = 0
        self.num_aborted = 0
        self.queue_s = 0.0
        self.prefill_s = 0.0
        self.decode_s = 0.0

    def snapshot(self, *, num_running: int, num_waiting: int, kv_usage: float) -> EngineStats:
        return EngineStats(
            num_running=num_running, num_waiting=num_waiting, kv_usage=kv_usage, **vars(self)
        )
