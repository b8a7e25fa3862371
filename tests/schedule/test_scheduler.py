"""The scheduler's policy, case by case; `test_scheduler_machine.py` shows that nothing is lost."""

from __future__ import annotations

import pytest

from lockstep.core.errors import CapacityError, ConfigError
from lockstep.schedule import Scheduler, SchedulerConfig, SequenceSpec, Step


def scheduler_of(**config) -> Scheduler:
    return Scheduler(SchedulerConfig(**{"num_blocks": 32, "block_size": 4, **config}))


def add(scheduler, seq_id, prompt, max_new_tokens=4, **spec) -> None:
    scheduler.add(
        SequenceSpec(seq_id=seq_id, prompt_token_ids=prompt, max_new_tokens=max_new_tokens, **spec)
    )


def run(scheduler, *, finished=()) -> Step:
    """One step in which every sampled token is 9."""
    step = scheduler.schedule()
    sampled = {chunk.seq_id: 9 for chunk in step.chunks if chunk.samples}
    scheduler.commit(step, sampled=sampled, finished=finished)
    return step


def shape(step: Step) -> list[tuple[int, int, int, bool]]:
    return [(c.seq_id, c.start, len(c.token_ids), c.samples) for c in step.chunks]


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_one_samples():
    scheduler = scheduler_of(max_chunk_tokens=4)
    add(scheduler, 1, range(10))
    assert shape(run(scheduler)) == [(1, 0, 4, False)]
    assert shape(run(scheduler)) == [(1, 4, 4, False)]
    assert shape(run(scheduler)) == [(1, 8, 2, True)]
    assert shape(run(scheduler)) == [(1, 10, 1, True)]


def test_decodes_come_before_prompts_and_share_the_budget():
    scheduler = scheduler_of(max_batch_tokens=5)
    add(scheduler, 1, [1, 2])
    run(scheduler)
    add(scheduler, 2, range(20, 29))
    assert shape(run(scheduler)) == [(1, 2, 1, True), (2, 0, 4, False)]


def test_lower_priority_number_goes_first_then_arrival():
    scheduler = scheduler_of(max_num_seqs=1)
    add(scheduler, 1, [1], priority=5)
    add(scheduler, 2, [2], priority=0)
    add(scheduler, 3, [3], priority=0)
    order = []
    while scheduler.has_work:
        step = scheduler.schedule()
        (chunk,) = step.chunks
        order.append(chunk.seq_id)
        scheduler.commit(step, sampled={chunk.seq_id: 9}, finished=[chunk.seq_id])
    assert order == [2, 3, 1]


def test_an_urgent_newcomer_overtakes_a_prompt_under_way():
    scheduler = scheduler_of(max_batch_tokens=4)
    add(scheduler, 1, range(12), priority=1)
    run(scheduler)
    add(scheduler, 2, [50, 51], priority=0)
    assert shape(run(scheduler)) == [(2, 0, 2, True), (1, 4, 2, False)]


def test_a_prefix_is_computed_once_and_the_last_token_always():
    scheduler = scheduler_of()
    add(scheduler, 1, range(8))
    run(scheduler)
    add(scheduler, 2, range(8))
    step = run(scheduler)
    assert shape(step) == [(1, 8, 1, True), (2, 4, 4, True)]
    assert step.admitted[0].num_cached_tokens == 4
    assert scheduler.block_table(1)[0] == scheduler.block_table(2)[0]


def test_two_sequences_that_computed_the_same_block_end_up_sharing_it():
    scheduler = scheduler_of()
    add(scheduler, 1, range(8))
    add(scheduler, 2, range(8))
    run(scheduler)
    assert scheduler.block_table(1) == scheduler.block_table(2)
    assert scheduler.tables.pool.num_used == 2


def test_namespaces_and_prompt_logprobs_do_not_read_the_cache():
    scheduler = scheduler_of()
    add(scheduler, 1, range(8))
    run(scheduler)
    add(scheduler, 2, range(8), namespace="adapter")
    add(scheduler, 3, range(8), max_cached_tokens=3)
    assert shape(run(scheduler))[1:] == [(2, 0, 8, True), (3, 0, 8, True)]


def test_without_a_prefix_cache_nothing_is_shared_and_followers_do_not_wait():
    scheduler = scheduler_of(enable_prefix_cache=False)
    add(scheduler, 1, range(8))
    add(scheduler, 2, range(8), leader=1)
    assert shape(run(scheduler)) == [(1, 0, 8, True), (2, 0, 8, True)]
    assert not set(scheduler.block_table(1)) & set(scheduler.block_table(2))


def test_followers_wait_for_their_leader_and_share_its_prompt():
    scheduler = scheduler_of(max_chunk_tokens=6)
    add(scheduler, 1, range(10))
    add(scheduler, 2, range(10), leader=1)
    assert shape(run(scheduler)) == [(1, 0, 6, False)]
    assert shape(run(scheduler)) == [(1, 6, 4, True)]
    assert shape(run(scheduler)) == [(1, 10, 1, True), (2, 8, 2, True)]


def test_a_follower_whose_leader_is_gone_proceeds_alone():
    scheduler = scheduler_of(max_chunk_tokens=4)
    add(scheduler, 1, range(10))
    add(scheduler, 2, range(10), leader=1)
    run(scheduler)
    scheduler.abort(1)
    assert shape(run(scheduler)) == [(2, 4, 4, False)]


def test_a_waiting_follower_does_not_block_those_behind_it():
    scheduler = scheduler_of(max_chunk_tokens=4)
    add(scheduler, 1, range(10))
    add(scheduler, 2, range(10), leader=1)
    add(scheduler, 3, [70])
    assert shape(run(scheduler)) == [(1, 0, 4, False), (3, 0, 1, True)]


def test_the_least_urgent_sequence_is_preempted_and_keeps_its_tokens():
    scheduler = scheduler_of(num_blocks=4, enable_prefix_cache=False)
    add(scheduler, 1, range(4), max_new_tokens=9)
    run(scheduler)
    add(scheduler, 2, range(10, 14), max_new_tokens=9)
    for _ in range(4):
        run(scheduler)
    assert scheduler.tables.pool.num_free == 0
    step = run(scheduler)
    assert step.preempted == (2,)
    assert shape(step) == [(1, 8, 1, True)]
    assert scheduler.block_table(2) == []
    assert scheduler.tokens(2) == [10, 11, 12, 13, 9, 9, 9, 9]
    run(scheduler, finished=[1])
    assert shape(run(scheduler)) == [(2, 0, 8, True)]


def test_the_least_urgent_sequence_waits_rather_than_preempt_a_more_urgent_one():
    scheduler = scheduler_of(num_blocks=5, enable_prefix_cache=False)
    add(scheduler, 1, range(10, 14), max_new_tokens=9, priority=1)
    run(scheduler)
    add(scheduler, 2, range(6), max_new_tokens=9)
    for _ in range(4):
        run(scheduler)
    assert scheduler.tables.pool.num_free == 0
    step = run(scheduler)
    assert step.preempted == ()
    assert shape(step) == [(2, 9, 1, True)]
    run(scheduler, finished=[2])
    assert shape(run(scheduler)) == [(1, 8, 1, True)]


def test_nobody_overtakes_a_sequence_that_does_not_fit_yet():
    scheduler = scheduler_of(num_blocks=4)
    add(scheduler, 1, range(8))
    run(scheduler)
    add(scheduler, 2, range(20, 32), max_new_tokens=1)
    add(scheduler, 3, [60])
    assert shape(run(scheduler)) == [(1, 8, 1, True)]


def test_a_sequence_that_can_never_fit_is_refused_in_numbers():
    scheduler = scheduler_of(num_blocks=2)
    with pytest.raises(CapacityError, match=r"6 prompt tokens and max_tokens=4.*9 tokens.*has 8"):
        add(scheduler, 1, range(6), max_new_tokens=4)
    add(scheduler, 1, range(6), max_new_tokens=3)


def test_max_new_tokens_zero_computes_the_prompt_and_samples_nothing():
    scheduler = scheduler_of()
    add(scheduler, 1, range(4), max_new_tokens=0)
    assert shape(run(scheduler, finished=[1])) == [(1, 0, 4, False)]
    assert not scheduler.has_work


def test_abort_between_schedule_and_commit_is_harmless():
    scheduler = scheduler_of()
    add(scheduler, 1, range(8))
    step = scheduler.schedule()
    scheduler.abort(1)
    scheduler.commit(step, sampled={1: 9})
    assert not scheduler.has_work
    assert scheduler.tables.pool.num_free == 32


def test_new_weights_recompute_what_is_running():
    scheduler = scheduler_of()
    add(scheduler, 1, range(8))
    run(scheduler)
    scheduler.clear_cache(recompute=True)
    assert shape(run(scheduler)) == [(1, 0, 9, True)]


def test_clearing_the_cache_does_not_disturb_what_is_running():
    scheduler = scheduler_of()
    add(scheduler, 1, range(8))
    run(scheduler)
    scheduler.clear_cache()
    add(scheduler, 2, range(8))
    assert shape(run(scheduler)) == [(1, 8, 1, True), (2, 0, 8, True)]


def test_limits_must_be_positive():
    with pytest.raises(ConfigError, match="max_chunk_tokens must be at least 1, got 0"):
        scheduler_of(max_chunk_tokens=0)
