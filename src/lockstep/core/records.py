"""Records that cross layer borders: what an engine returns, and what RL keeps of it.

Logprobs come in two kinds, never mixed up:
- `logprob`: log-softmax of the model's raw logits at the chosen token;
- `sampling_logprob`: the same after bias, penalties, temperature and truncation: the
  log-probability with which the token was actually drawn (0.0 for greedy). This is RL's behaviour
  logprob.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.core.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
"""`error`: the model's logits were not numbers; `stop_reason` says where."""
TrajectoryStatus = Literal["completed", "truncated", "failed"]


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """One token's logprobs. `top` holds (token id, raw logprob), most likely first."""

    token_id: int
    logprob: float
    sampling_logprob: float | None = None
    rank: int | None = None
    """1 for the most likely token; None when not asked for."""
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One of a request's n continuations."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One for each token in `token_ids`."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it, or what the error was; None for
    end-of-sequence and length.
    """
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Aligned with the prompt; the first is None. None when not asked for."""
    num_cached_tokens: int = 0
    weight_version: int = 0


@dataclass(frozen=True, kw_only=True)
class SampleDelta:
    """What one engine step added to one sample; concatenated deltas equal the Sample."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Present in the first delta only, when asked for."""
    num_cached_tokens: int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One rollout: everything a trainer needs, in token ids, and enough to draw it again."""

    task: str
    item_id: str
    group_id: str
    """Rollouts of one prompt share it; advantages are taken within it."""
    sample_index: int
    token_ids: tuple[int, ...]
    """Prompt and everything after it."""
    loss_mask: tuple[bool, ...]
    """True where the policy drew the token; same length as `token_ids`."""
    behaviour_logprobs: tuple[float, ...]
    """Log-probability with which each token was drawn; 0.0 where `loss_mask` is False."""
    reward: float
    rewards: dict[str, float] = field(default_factory=dict)
    """By verifier; `reward` is their weighted sum."""
    status: TrajectoryStatus = "completed"
    weight_version: int = 0
    seed: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    completion_text: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
