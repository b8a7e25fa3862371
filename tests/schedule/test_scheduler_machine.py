"""A Hypothesis state machine that plays every user of the scheduler and simulates the KV cache.

The simulated cache stores, at each position of each block, *what was computed there*: the namespace
and all tokens up to that position. Reading a position whose content is not one's own prefix is
exactly the bug that a wrongly shared, lost or stale block would cause, so it is checked before
every chunk, over the chunk's whole context.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from lockstep.schedule import Chunk, Scheduler, SchedulerConfig, SequenceSpec

BLOCK_SIZE = 2
TOKENS = st.integers(0, 1)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=9)


class SchedulerMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(
        num_blocks=st.integers(6, 14),
        max_num_seqs=st.integers(1, 5),
        max_batch_tokens=st.integers(1, 9),
        max_chunk_tokens=st.integers(1, 5),
        enable_prefix_cache=st.booleans(),
    )
    def start(self, **config):
        self.scheduler = Scheduler(SchedulerConfig(block_size=BLOCK_SIZE, **config))
        self.memory: dict[tuple[int, int], object] = {}
        self.live: dict[int, SequenceSpec] = {}
        self.tokens: dict[int, list[int]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.num_own: Counter[int] = Counter()
        self.weights = 0

    # Users

    @rule(
        target=sequences,
        prompt=PROMPTS,
        max_new_tokens=st.integers(0, 4),
        priority=st.integers(0, 2),
        namespace=st.sampled_from([None, "adapter"]),
        max_cached_tokens=st.none() | st.integers(0, 5),
    )
    def add(self, prompt, **options):
        return self._add(prompt, leader=None, **options)

    @rule(
        target=sequences,
        leader=sequences,
        max_new_tokens=st.integers(0, 4),
        priority=st.integers(0, 2),
    )
    def add_follower(self, leader, **options):
        prompt = self.prompts[leader]
        return self._add(prompt, leader=leader, namespace=None, **options)

    @rule(seq_id=consumes(sequences))
    def abort(self, seq_id):
        self.scheduler.abort(seq_id)
        self.live.pop(seq_id, None)

    @rule()
    def clear_cache(self):
        self.scheduler.clear_cache()

    @rule()
    def update_weights(self):
        self.weights += 1
        self.scheduler.clear_cache(recompute=True)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), stop_early=st.booleans(), abort_in_flight=st.booleans())
    def step(self, data, stop_early, abort_in_flight):
        self._step(
            draw_token=lambda: data.draw(TOKENS),
            stop=stop_early and data.draw(st.sampled_from(sorted(self.live))),
            abort=abort_in_flight and data.draw(st.sampled_from(sorted(self.live))),
        )

    def teardown(self):
        """Whatever was going on, everything finishes and every block comes back."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.live:
                break
            self._step(draw_token=lambda: 0, stop=False, abort=False)
            self.every_block_is_accounted_for()
        assert not self.live
        assert not self.scheduler.has_work
        assert self.scheduler.tables.pool.num_used == 0
        self.scheduler.clear_cache()
        assert self.scheduler.tables.pool.num_free == self.scheduler.config.num_blocks

    # The model

    def _add(self, prompt, *, max_new_tokens, **options):
        seq_id = len(self.prompts)
        spec = SequenceSpec(
            seq_id=seq_id, prompt_token_ids=prompt, max_new_tokens=max_new_tokens, **options
        )
        self.prompts[seq_id] = prompt
        self.scheduler.add(spec)
        self.live[seq_id] = spec
        self.tokens[seq_id] = list(prompt)
        return seq_id

    def _step(self, *, draw_token, stop, abort):
        step = self.scheduler.schedule()
        assert step.chunks, "there is work, but nothing was scheduled"
        self._check_limits(step)
        self._check_nobody_writes_where_another_reads(step)
        for chunk in step.chunks:
            self._compute(chunk)
        if abort is not False:
            self.abort(abort)
        sampled = {chunk.seq_id: draw_token() for chunk in step.chunks if chunk.samples}
        finished = [
            chunk.seq_id
            for chunk in step.chunks
            if chunk.seq_id in self.live and self._is_done(chunk, stop)
        ]
        self.scheduler.commit(step, sampled=sampled, finished=finished)
        for seq_id, token in sampled.items():
            self.tokens[seq_id].append(token)
        for seq_id in finished:
            del self.live[seq_id]

    def _is_done(self, chunk: Chunk, stop) -> bool:
        spec = self.live[chunk.seq_id]
        if spec.max_new_tokens == 0:
            return chunk.end == len(spec.prompt_token_ids)
        num_new = chunk.end + 1 - len(spec.prompt_token_ids)
        return chunk.samples and (num_new >= spec.max_new_tokens or chunk.seq_id == stop)

    def _check_limits(self, step):
        config = self.scheduler.config
        assert step.num_tokens <= config.max_batch_tokens
        assert self.scheduler.num_running <= config.max_num_seqs
        assert len({chunk.seq_id for chunk in step.chunks}) == len(step.chunks)
        for chunk in step.chunks:
            tokens = self.tokens[chunk.seq_id]
            assert 1 <= len(chunk.token_ids) <= config.max_chunk_tokens
            assert list(chunk.token_ids) == tokens[chunk.start : chunk.end]
            wants_token = self.live[chunk.seq_id].max_new_tokens > 0
            assert chunk.samples == (chunk.end == len(tokens) and wants_token)

    def _check_nobody_writes_where_another_reads(self, step):
        readers = Counter(
            block for seq_id in self.live for block in self.scheduler.block_table(seq_id)
        )
        for chunk in step.chunks:
            first, last = chunk.start // BLOCK_SIZE, (chunk.end - 1) // BLOCK_SIZE
            for block in chunk.block_table[first : last + 1]:
                assert readers[block] == 1

    def _compute(self, chunk: Chunk):
        spec, tokens = self.live[chunk.seq_id], self.tokens[chunk.seq_id]

        def slot(position):
            return chunk.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE

        def content(position):
            return self.weights, spec.namespace, tuple(tokens[: position + 1])

        for position in range(chunk.start):
            assert self.memory[slot(position)] == content(position)
        self._check_prompt_is_computed(chunk)
        for position in range(chunk.start, chunk.end):
            self.memory[slot(position)] = content(position)

    def _check_prompt_is_computed(self, chunk: Chunk):
        """Prompt positions that must not come from the cache: none is left out."""
        limit = self.live[chunk.seq_id].max_cached_tokens
        if limit is not None:
            assert chunk.start <= max(self.num_own[chunk.seq_id], limit)
            self.num_own[chunk.seq_id] = max(self.num_own[chunk.seq_id], chunk.end)

    # What must hold after every rule

    @invariant()
    def every_block_is_accounted_for(self):
        pool = self.scheduler.tables.pool
        assert pool.num_free + pool.num_used + pool.num_cached == pool.num_total
        tables = [self.scheduler.block_table(seq_id) for seq_id in self.live]
        references = Counter(block for table in tables for block in table)
        assert all(pool.num_references(block) == n for block, n in references.items())
        assert pool.num_used == len(references)
        assert all(len(set(table)) == len(table) for table in tables)

    @invariant()
    def the_tree_holds_exactly_the_kept_blocks(self):
        cache, pool = self.scheduler.tables.cache, self.scheduler.tables.pool
        found, queue = [], [cache.root]
        while queue:
            node = queue.pop()
            queue += node.children.values()
            if node.block is None:
                continue
            found.append(node.block)
            is_used = pool.num_references(node.block) > 0
            assert is_used != pool.is_cached(node.block)
            parent = node.parent
            if is_used and parent.block is not None:
                assert pool.num_references(parent.block) > 0, "a used node below an unused one"
        assert len(set(found)) == len(found) == len(cache)
        assert pool.num_cached == sum(pool.is_cached(block) for block in found)


SchedulerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase
