"""Asking the policy: items to trajectories, every draw reproducible from its record.

Rollouts of a prompt are one request with n samples, so its prompt is prefilled once. Seeds derive
from (run seed, step, position) and never from what was drawn before. A rollout that the
environment could not grade is a record with status `failed`, not a crash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from lockstep.core.completer import Completer
from lockstep.core.environment import Environment, Grade, TaskItem
from lockstep.core.errors import ConfigError
from lockstep.core.records import Completion, Sample, Trajectory, TrajectoryStatus
from lockstep.core.sampling import SamplingParams
from lockstep.evaluate.generation import grade_completion, opening_prompt
from lockstep.rl.config import RolloutConfig


def roll_out(
    policy: Completer,
    environment: Environment,
    items: Sequence[TaskItem],
    config: RolloutConfig,
    *,
    seed: int,
    step: int,
    on_finish: Callable[[int], None] | None = None,
) -> list[Trajectory]:
    """`samples_per_prompt` trajectories of each item, those of an item next to each other."""
    if environment.max_turns > 1:
        raise ConfigError(
            f"{environment.name} takes up to {environment.max_turns} turns; "
            "RL trains on single-turn tasks"
        )
    prompts = [opening_prompt(policy, environment, item) for item in items]
    params = [
        SamplingParams(
            n=config.samples_per_prompt,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            seed=derive_seed(seed, step, position),
            logprobs=0,
        )
        for position in range(len(items))
    ]
    completions = policy.complete(prompts, params, on_finish=on_finish)
    return [
        _trajectory(environment, item, group_id=f"{step}/{position}", drawn=(completion, sample, p))
        for position, (item, completion, p) in enumerate(
            zip(items, completions, params, strict=True)
        )
        for sample in completion.samples
    ]


def derive_seed(seed: int, step: int, position: int) -> int:
    """A 63-bit seed that no other (seed, step, position) shares, short of a hash collision."""
    digest = hashlib.blake2b(f"rollout {seed} {step} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _trajectory(
    environment: Environment,
    item: TaskItem,
    *,
    group_id: str,
    drawn: tuple[Completion, Sample, SamplingParams],
) -> Trajectory:
    completion, sample, params = drawn
    grade = grade_completion(environment, item, sample.text)
    num_prompt, num_drawn = len(completion.prompt_token_ids), len(sample.token_ids)
    return Trajectory(
        task=environment.name,
        item_id=item.item_id,
        group_id=group_id,
        sample_index=sample.index,
        token_ids=completion.prompt_token_ids + sample.token_ids,
        loss_mask=(False,) * num_prompt + (True,) * num_drawn,
        behaviour_logprobs=(0.0,) * num_prompt + _behaviour_logprobs(sample),
        reward=grade.reward,
        rewards=dict(grade.rewards),
        status=_status(sample, grade),
        weight_version=completion.weight_version,
        seed=sample.seed,
        sampling=params,
        completion_text=sample.text,
        metadata={
            "score": grade.score,
            "answer": grade.answer,
            "expected": item.answer,
            "error": grade.error,
        },
    )


def _status(sample: Sample, grade: Grade) -> TrajectoryStatus:
    if grade.error is not None or sample.finish_reason == "error":
        return "failed"
    return "truncated" if sample.finish_reason == "length" else "completed"


def _behaviour_logprobs(sample: Sample) -> tuple[float, ...]:
    logprobs = []
    for token in sample.logprobs:
        assert token.sampling_logprob is not None, "the policy must report sampling logprobs"
        logprobs.append(token.sampling_logprob)
    return tuple(logprobs)
