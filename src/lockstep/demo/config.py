"""Everything that determines the demo, in one place: the task, the sizes, the learning rates.

The methods turn it into the settings of the runs that the demo is made of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lockstep.evaluate.generation import GenerationConfig
from lockstep.evaluate.prompts import PromptConfig
from lockstep.evaluate.single_turn import TaskConfig
from lockstep.models.lora_config import LoraConfig
from lockstep.rl.config import LoopConfig as RLLoopConfig
from lockstep.rl.config import RLConfig, RolloutConfig
from lockstep.train.config import DataConfig, LoopConfig, OptimizerConfig, SFTConfig

BUNDLED = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What the demo does. The defaults are sized for two CPU cores."""

    model: str = "smollm2"
    precision: Literal["bf16", "fp32"] = "bf16"
    seed: int = 0
    """Of the data order, the prompts, the draws and the adapters' initial weights."""

    task: str = "reasoning_gym:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=2"
    """What RL trains on, and whose held-out items are measured."""
    held_out_task: str = ""
    """Task of the measurements; empty means the held-out split of `task`."""
    posing: TaskConfig = field(
        default_factory=lambda: TaskConfig(
            prompt=PromptConfig(system_prompt="Answer with a number."), extract="number"
        )
    )
    num_items: int = 400
    """Held-out items in each measurement."""
    measured_tokens: int = 32
    """Longest completion in a measurement."""

    choices: Path = BUNDLED / "common_knowledge.jsonl"
    """Multiple-choice questions that have nothing to do with the task: a regression check."""
    choices_prompt: PromptConfig = field(default_factory=PromptConfig)

    sft_data: Path = BUNDLED / "sft.jsonl"
    sft_examples: int = 96
    """Lines of the bundled `sft_data`, which scripts/make_demo_data.py writes."""
    sft_epochs: int = 2
    sft_batch_size: int = 16
    sft_learning_rate: float = 5e-4
    sft_lora: LoraConfig = field(default_factory=LoraConfig)

    rl_steps: int = 24
    rl_prompts: int = 64
    rl_samples: int = 8
    rl_max_tokens: int = 8
    rl_learning_rate: float = 2e-4
    rl_lora: LoraConfig = field(default_factory=LoraConfig)
    rl_eval_every: int = 8
    rl_eval_items: int = 200
    """Held-out items of the curve that is drawn while RL goes on."""

    port: int = 0
    """Of the server; 0 takes a free one."""
    question: str = "What is the capital of France?"
    """What the trained model is asked over HTTP, streaming."""
    question_tokens: int = 64
    num_questions: int = 16
    """Requests sent at once, whose logprobs the trainer then computes again."""
    answer_tokens: int = 32
    """Tokens of each of those answers."""

    significance: float = 0.01
    """RL must have raised held-out accuracy over SFT with a p-value below this."""

    def measured(self) -> GenerationConfig:
        """Greedy answers to the first `num_items` held-out items."""
        return GenerationConfig(num_items=self.num_items, max_tokens=self.measured_tokens)

    def sft(self, out: Path) -> SFTConfig:
        return SFTConfig(
            model=self.model,
            out=out,
            data=DataConfig(data=self.sft_data),
            loop=LoopConfig(
                epochs=self.sft_epochs, global_batch_size=self.sft_batch_size, seed=self.seed
            ),
            optimizer=OptimizerConfig(learning_rate=self.sft_learning_rate),
            lora=self.sft_lora,
            precision=self.precision,
        )

    def rl(self, model: Path, out: Path) -> RLConfig:
        return RLConfig(
            model=str(model),
            task=self.task,
            eval_task=self.held_out_task,
            out=out,
            posing=self.posing,
            rollout=RolloutConfig(
                prompts_per_step=self.rl_prompts,
                samples_per_prompt=self.rl_samples,
                max_tokens=self.rl_max_tokens,
            ),
            loop=RLLoopConfig(
                steps=self.rl_steps,
                eval_every=self.rl_eval_every,
                eval_items=self.rl_eval_items,
                held_out_items=self.num_items,
                save_every=self.rl_steps,
                seed=self.seed,
            ),
            optimizer=OptimizerConfig(learning_rate=self.rl_learning_rate),
            lora=self.rl_lora,
            precision=self.precision,
        )
