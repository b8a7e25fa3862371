"""Everything that determines an RL run, in the parts that use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lockstep.core.errors import ConfigError
from lockstep.core.quantization import KVCacheDtype
from lockstep.evaluate.single_turn import TaskConfig
from lockstep.models.lora_config import LoraConfig
from lockstep.rl.advantages import Estimator
from lockstep.train.config import OptimizerConfig, ScheduleConfig

Loss = Literal["grpo", "dapo", "dr_grpo"]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What is asked of the policy at each step, and how its answers are drawn.

    There is no top-k, top-p or min-p: the trainer would have to renormalise over the same
    truncated vocabulary to know the probability with which a token was drawn.
    """

    prompts_per_step: int = 16
    """Different prompts in one step."""
    samples_per_prompt: int = 8
    """Rollouts of each prompt; advantages are taken among them."""
    max_tokens: int = 64
    """Longest completion, in tokens."""
    temperature: float = 1.0
    """Temperature of the draws; the trainer computes logprobs at the same one."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """How the engine keeps keys and values; the trainer rounds its own alike."""
    trajectory_format: Literal["jsonl", "parquet"] = "jsonl"
    """File format of the recorded trajectories."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "prompts_per_step", "max_tokens")
        _at_least(self, 2, "samples_per_prompt")
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature must be above 0, got {self.temperature:g}: greedy rollouts of a "
                "prompt are all the same and teach nothing"
            )


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """The policy-gradient objective."""

    loss: Loss = "dapo"
    """Aggregation: grpo means each rollout's mean counts once; dapo every token of the batch
    counts once; dr_grpo divides each rollout's sum by max_tokens, whatever its length."""
    advantage: Estimator | None = None
    """Advantage estimator; by default dr_grpo's for loss dr_grpo, else grpo's."""
    gamma: float = 1.0
    """Discount of reinforce_plus_plus."""
    clip_low: float = 0.2
    """Ratios are clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """Ratios are clipped above at 1 + clip_high; DAPO has 0.28."""
    kl_beta: float = 0.0
    """Weight of the KL divergence from the starting weights; 0 computes none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators: the log ratio (its gradient is 0 on average: for watching only), half
    its square, or the unbiased one of low variance."""
    updates_per_rollout: int = 1
    """Optimizer steps on each batch of rollouts; from the second on, ratios move away from 1."""
    mask_truncated: bool = False
    """Leave rollouts that reached max_tokens out of the loss."""
    on_mismatch: Literal["fail", "warn"] = "fail"
    """What to do if a first ratio is not exactly 1, that is if trainer and engine disagree."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "updates_per_rollout")
        _at_least(self, 0, "kl_beta", "clip_high")
        if not 0 <= self.clip_low <= 1:
            raise ConfigError(f"clip_low must be from 0 to 1, got {self.clip_low:g}")
        if not 0 < self.gamma <= 1:
            raise ConfigError(f"gamma must be above 0 and at most 1, got {self.gamma:g}")

    @property
    def estimator(self) -> Estimator:
        if self.advantage is not None:
            return self.advantage
        return "dr_grpo" if self.loss == "dr_grpo" else "grpo"


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long to train, and when to measure and save."""

    steps: int = 100
    """Batches of rollouts."""
    micro_batch_tokens: int = 4096
    """Tokens in one forward and backward pass; it sets the memory, not what is learned."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    recompute_mlp: bool = False
    """Recompute half of them only, the wide ones of the MLP: about a tenth more time."""
    eval_every: int = 0
    """Steps between greedy measurements on held-out items, first and last always; 0 for none."""
    eval_items: int = 100
    """Held-out items in each measurement."""
    eval_seed: int = 0
    """Which held-out items."""
    held_out_items: int = 1000
    """Held-out questions, of eval_seed, that never occur as training prompts."""
    save_every: int = 10
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints to keep."""
    seed: int = 0
    """Seed of the prompts, of the draws and of the adapter's initial weights."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "steps", "micro_batch_tokens", "eval_items", "save_every", "keep")
        _at_least(self, 0, "eval_every", "held_out_items", "seed")


@dataclass(frozen=True, kw_only=True)
class RLScheduleConfig(ScheduleConfig):
    """As for supervised training, but constant unless asked: a run is often continued."""

    lr_schedule: Literal["cosine", "linear", "constant"] = "constant"
    """Shape after warm-up."""


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """Everything that determines a run."""

    model: str
    """What `load_model` takes: a name such as smollm2, a Hugging Face folder or a GGUF file."""
    task: str
    """reasoning_gym:NAME[:key=value,...] or free_answer:FILE."""
    out: Path
    eval_task: str = ""
    """Task of the held-out measurements; empty means the held-out split of `task`."""
    posing: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: RLScheduleConfig = field(default_factory=RLScheduleConfig)
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    """None trains every weight."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Precision of the computation; trained weights are stored in fp32 either way."""
    quantization: str | None = None
    """How frozen weights are held, or trained ones are rounded before each product: int8, int4 and
    so on, or native."""


def _at_least(config: object, low: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < low:
            raise ConfigError(f"{name} must be at least {low}, got {value:g}")
