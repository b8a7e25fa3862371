"""Continuous batching: which sequences compute which tokens in the next step.

    step = scheduler.schedule()              decide, and reserve the blocks
    ...                                      compute it, or only predict how long that takes
    scheduler.commit(step, sampled=...)      tell what was sampled

A step computes one chunk of each chosen sequence, at most `max_batch_tokens` in all. Decoding
sequences come first, since each costs one token and a user waits for it; then prompts, in chunks
of at most `max_chunk_tokens`. Among equals the more urgent comes first: the **lower** priority
number, then the earlier arrival.

When a decoding sequence needs a block and there is none, the least urgent running sequence is
preempted if it is less urgent than the one in need: it gives up its blocks, keeps its tokens, and
later computes prompt and tokens again (from the prefix cache, as far as that still has them).
Otherwise the sequence in need skips the step. A waiting sequence never preempts a running one.
So the most urgent running sequence always advances, since any sequence that is accepted fits
alone, and every sequence finishes.

There is no clock and no cost here: a planner drives this same scheduler under a predicted clock.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.core.errors import CapacityError, ConfigError
from lockstep.schedule.block_tables import BlockTables
from lockstep.schedule.sequence import ScheduledSequence, SequenceSpec
from lockstep.schedule.step import Admission, Chunk, Step

BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step and of the KV cache."""

    num_blocks: int
    """Blocks in the KV cache."""
    block_size: int = BLOCK_SIZE
    """Token positions in a block."""
    max_num_seqs: int = 256
    """Sequences that hold blocks at one time."""
    max_batch_tokens: int = 2048
    """Tokens computed in one step, over all sequences."""
    max_chunk_tokens: int = 2048
    """Prompt tokens of one sequence computed in one step."""
    enable_prefix_cache: bool = True
    """Share blocks between sequences that begin with the same tokens."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_batch_tokens"):
            self._check_positive(name)
        self._check_positive("max_chunk_tokens")

    def _check_positive(self, name: str) -> None:
        if getattr(self, name) < 1:
            raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(kw_only=True, slots=True)
class _Draft:
    """A step in the making."""

    budget: int
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    is_short_of_blocks: bool = False

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.budget -= chunk.num_tokens

    def finish(self) -> Step:
        return Step(
            chunks=tuple(self.chunks),
            admitted=tuple(self.admitted),
            preempted=tuple(self.preempted),
        )


class Scheduler:
    """Owns every sequence's state from `add` until it is finished or aborted; others hold ids."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.tables = BlockTables(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            enable_prefix_cache=config.enable_prefix_cache,
        )
        self._sequences: dict[int, ScheduledSequence] = {}
        self._waiting: list[ScheduledSequence] = []
        self._running: list[ScheduledSequence] = []
        self._num_arrived = 0
        self._in_flight: Step | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def tokens(self, seq_id: int) -> Sequence[int]:
        """Prompt and everything sampled so far."""
        return self._sequences[seq_id].tokens

    def block_table(self, seq_id: int) -> Sequence[int]:
        """Empty while the sequence waits."""
        return self._sequences[seq_id].blocks.tolist()

    def add(self, spec: SequenceSpec) -> None:
        """Queue a sequence. Raises CapacityError if the whole KV cache could not hold it alone."""
        assert spec.seq_id not in self._sequences
        assert len(spec.prompt_token_ids) > 0
        if self.tables.num_blocks_for(spec.max_computed_tokens) > self.config.num_blocks:
            capacity = self.config.num_blocks * self.config.block_size
            raise CapacityError(
                f"{len(spec.prompt_token_ids)} prompt tokens and max_tokens={spec.max_new_tokens} "
                f"need a KV cache of {spec.max_computed_tokens} tokens, but it has {capacity}; "
                "lower max_tokens, shorten the prompt, or enlarge the KV cache"
            )
        sequence = ScheduledSequence(
            spec=spec, arrival=self._num_arrived, tokens=list(spec.prompt_token_ids)
        )
        self._num_arrived += 1
        self._sequences[spec.seq_id] = sequence
        self._enqueue(self._waiting, sequence)

    def abort(self, seq_id: int) -> None:
        """Drop a sequence in whatever state it is; an unknown id (already finished) is ignored."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is None:
            return
        (self._running if sequence.is_running else self._waiting).remove(sequence)
        self.tables.release(sequence)

    def clear_cache(self, *, recompute: bool = False) -> None:
        """Forget cached prefixes; with `recompute` (new weights) running sequences start over."""
        assert self._in_flight is None, "commit the step in flight first"
        if recompute:
            for sequence in list(self._running):
                self._preempt(sequence)
        self.tables.cache.clear()

    def schedule(self) -> Step:
        """Choose the next step and reserve its blocks; it must be committed before the next one."""
        assert self._in_flight is None, "commit the step in flight first"
        draft = _Draft(budget=self.config.max_batch_tokens)
        decoding: list[ScheduledSequence] = []
        prefilling: list[ScheduledSequence] = []
        for sequence in self._running:
            (decoding if sequence.is_decoding else prefilling).append(sequence)
        self._schedule_decodes(draft, decoding)
        self._schedule_prefills(draft, prefilling)
        self._in_flight = draft.finish()
        return self._in_flight

    def commit(
        self, step: Step, *, sampled: Mapping[int, int], finished: Collection[int] = ()
    ) -> None:
        """The step was computed; `sampled` has a token for each chunk that samples, by id."""
        assert step is self._in_flight, "only the step that was scheduled last can be committed"
        self._in_flight = None
        for chunk in step.chunks:
            sequence = self._sequences.get(chunk.seq_id)
            if sequence is None:
                continue  # aborted meanwhile
            end = sequence.num_computed = chunk.end
            if not sequence.is_prompt_done:
                sequence.is_prompt_done = end >= len(sequence.spec.prompt_token_ids)
            self.tables.publish(sequence)
            if chunk.samples:
                sequence.tokens.append(sampled[chunk.seq_id])
        for seq_id in finished:
            self.abort(seq_id)

    def _schedule_decodes(self, draft: _Draft, decoding: list[ScheduledSequence]) -> None:
        for sequence in decoding:
            if draft.budget == 0:
                return
            if not sequence.is_running:
                continue  # preempted by a more urgent one
            if self.tables.has_room(sequence):
                draft.add(self._chunk(sequence, 1))
                continue
            while not self.tables.can_grow(sequence) and self._running[-1] is not sequence:
                draft.preempted.append(self._running[-1].seq_id)
                self._preempt(self._running[-1])
                draft.is_short_of_blocks = True
            if self.tables.can_grow(sequence):
                self.tables.grow(sequence)
                draft.add(self._chunk(sequence, 1))
            else:
                draft.is_short_of_blocks = True

    def _schedule_prefills(self, draft: _Draft, prefilling: list[ScheduledSequence]) -> None:
        may_admit = not draft.is_short_of_blocks
        for sequence in self._by_urgency(prefilling):
            if draft.budget == 0:
                return
            if not sequence.is_running:
                if not may_admit or self._is_following(sequence):
                    continue
                if not self._can_admit(sequence):
                    may_admit = False  # nobody overtakes it
                    continue
                draft.admitted.append(self._admit(sequence))
            limit = min(self.config.max_chunk_tokens, draft.budget)
            draft.add(self._chunk(sequence, min(sequence.num_uncomputed, limit)))

    def _by_urgency(self, prefilling: list[ScheduledSequence]) -> Iterator[ScheduledSequence]:
        """Prompts under way and waiting sequences; from copies, since admission moves them."""
        under_way = [sequence for sequence in prefilling if sequence.is_running]
        return heapq.merge(under_way, list(self._waiting), key=_urgency)

    def _is_following(self, sequence: ScheduledSequence) -> bool:
        """Whether it waits for a leader that is still there and has not computed its prompt yet."""
        if sequence.spec.leader is None or not self.config.enable_prefix_cache:
            return False
        leader = self._sequences.get(sequence.spec.leader)
        return leader is not None and not leader.is_prompt_done

    def _can_admit(self, sequence: ScheduledSequence) -> bool:
        """Leaves each running sequence a block to grow into: admission should not preempt."""
        return self.num_running < self.config.max_num_seqs and self.tables.can_allocate(
            sequence, reserve=self.num_running
        )

    def _admit(self, sequence: ScheduledSequence) -> Admission:
        self._waiting.remove(sequence)
        self._enqueue(self._running, sequence)
        self.tables.allocate(sequence)
        return Admission(
            seq_id=sequence.seq_id,
            num_tokens=len(sequence.tokens),
            num_cached_tokens=sequence.num_computed,
        )

    def _preempt(self, sequence: ScheduledSequence) -> None:
        self._running.remove(sequence)
        self._enqueue(self._waiting, sequence)
        self.tables.release(sequence)

    def _chunk(self, sequence: ScheduledSequence, num_tokens: int) -> Chunk:
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        spec, tokens = sequence.spec, sequence.tokens
        samples = end == len(tokens) and spec.max_new_tokens > 0
        return Chunk(spec.seq_id, start, tokens[start:end], sequence.blocks, samples)

    @staticmethod
    def _enqueue(queue: list[ScheduledSequence], sequence: ScheduledSequence) -> None:
        bisect.insort(queue, sequence, key=_urgency)


def _urgency(sequence: ScheduledSequence) -> tuple[int, int]:
    return sequence.urgency
