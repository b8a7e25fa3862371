"""Whole runs on a toy task, real engine and trainer; the first ratio is 1 to the bit throughout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.core.errors import ConfigError
from lockstep.core.run_folder import read_metrics
from lockstep.core.sampling import SamplingParams
from lockstep.engine import Engine, EngineCompleter
from lockstep.evaluate.compare import compare_folders
from lockstep.evaluate.prompts import PromptConfig
from lockstep.evaluate.single_turn import TaskConfig
from lockstep.evaluate.tasks import load_environment
from lockstep.models import load_model
from lockstep.models.lora import LoraConfig
from lockstep.rl.batch import make_batch
from lockstep.rl.config import AlgorithmConfig, LoopConfig, RLConfig, RolloutConfig
from lockstep.rl.loss import MismatchError, PolicyLoss
from lockstep.rl.rollouts import roll_out
from lockstep.rl.run import RLRun
from lockstep.rl.trajectory_files import read_trajectories
from lockstep.train.optimizer import OptimizerConfig
from lockstep.train.packing import pack


@pytest.fixture
def config(toy, tmp_path: Path) -> RLConfig:
    return RLConfig(
        model=str(toy.model),
        task=f"free_answer:{toy.train}",
        eval_task=f"free_answer:{toy.held_out}",
        out=tmp_path / "run",
        posing=TaskConfig(prompt=PromptConfig(style="text")),
        rollout=RolloutConfig(prompts_per_step=16, samples_per_prompt=8, max_tokens=1),
        loop=LoopConfig(steps=60, eval_every=60, eval_items=30, save_every=60),
        optimizer=OptimizerConfig(learning_rate=5e-3),
        lora=None,
        precision="fp32",
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rl_lifts_held_out_accuracy(config: RLConfig, precision) -> None:
    result = RLRun(replace(config, precision=precision)).train()
    assert result.first_evaluation.accuracy.mean <= 0.2
    assert result.last_evaluation.accuracy.mean >= 0.8
    evaluations = config.out / "evaluations"
    comparison = compare_folders(evaluations / "step-00000", evaluations / "step-00060")
    assert comparison.test.p_value < 0.001
    rows = read_metrics(config.out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(61))
    assert all(row["sampling/max_ratio_deviation"] == 0.0 for row in rows[1:])
    assert all(row["sampling/num_mismatches"] == 0 for row in rows[1:])
    assert rows[60]["reward"] > rows[1]["reward"]
    assert (result.model_folder / "model.safetensors").is_file()


def test_first_ratio_is_1_with_adapters_temperature_and_several_updates(config: RLConfig) -> None:
    """LoRA in bf16, longer completions, temperature 0.7, KL, micro-batches, 3 updates a batch."""
    run = RLRun(
        replace(
            config,
            precision="bf16",
            lora=LoraConfig(r=4),
            rollout=RolloutConfig(prompts_per_step=8, max_tokens=6, temperature=0.7),
            algorithm=AlgorithmConfig(updates_per_rollout=3, kl_beta=0.1, loss="grpo"),
            loop=LoopConfig(steps=2, micro_batch_tokens=150),
        )
    )
    result = run.train()
    rows = read_metrics(config.out / "metrics.jsonl")
    assert all(row["sampling/importance_sampling_ratio/min"] == 1.0 for row in rows)
    assert all(row["sampling/importance_sampling_ratio/max"] == 1.0 for row in rows)
    assert rows[0]["kl"] > 0  # the second and third update have left the reference behind
    assert result.adapter_folder is not None


def test_one_flipped_bit_of_a_weight_between_drawing_and_training_is_seen(config) -> None:
    loaded = load_model(config.model, precision="fp32", quiet=True)
    policy = EngineCompleter(Engine(loaded.model, loaded.tokenizer), model_name="toy")
    environment = load_environment(config.task, config.posing)
    items = [environment.item(i, split="train") for i in range(16)]
    drawn = roll_out(policy, environment, items, config.rollout, seed=0, step=0)
    batch = make_batch(drawn, config.algorithm, max_tokens=config.rollout.max_tokens)
    (micro_batch,) = pack(batch.documents, max_tokens=1000)

    def train() -> None:
        PolicyLoss(AlgorithmConfig(), inverse_temperature=1.0, is_on_policy=True)(
            loaded.model, micro_batch
        )

    train()
    with torch.no_grad():
        loaded.model.model.norm.weight.view(torch.int32)[5] ^= 1
    with pytest.raises(MismatchError, match="trainer and engine disagree"):
        train()


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_every_token_of_a_trajectory_can_be_drawn_again(config: RLConfig, format) -> None:
    rollout = replace(config.rollout, max_tokens=8, temperature=1.3, trajectory_format=format)
    RLRun(replace(config, rollout=rollout, loop=LoopConfig(steps=1))).train()
    trajectories = read_trajectories(config.out / "trajectories" / f"step-00000.{format}")
    assert len(trajectories) == 128
    assert {trajectory.status for trajectory in trajectories} == {"completed", "truncated"}

    loaded = load_model(config.model, precision="fp32", quiet=True)
    engine = Engine(loaded.model, loaded.tokenizer)
    for trajectory in trajectories[::17]:
        num_prompt = trajectory.loss_mask.index(True)
        params: SamplingParams = replace(trajectory.sampling, n=1, seed=trajectory.seed)
        (again,) = engine.generate([trajectory.token_ids[:num_prompt]], params)
        (sample,) = again.samples
        assert sample.token_ids == trajectory.token_ids[num_prompt:]
        logprobs = tuple(token.sampling_logprob for token in sample.logprobs)
        assert logprobs == trajectory.behaviour_logprobs[num_prompt:]
        assert trajectory.weight_version == again.weight_version == 0


def test_a_file_cannot_be_measured_on_itself(config: RLConfig) -> None:
    with pytest.raises(ConfigError, match="has no held-out part; give --eval-task"):
        RLRun(replace(config, eval_task=""))


def test_a_folder_holds_one_run(config: RLConfig) -> None:
    short = replace(config, loop=LoopConfig(steps=1))
    RLRun(short).train()
    with pytest.raises(ConfigError, match="already holds a run; pass --resume"):
        RLRun(short).train()
    other = replace(short, rollout=replace(config.rollout, temperature=0.5))
    with pytest.raises(ConfigError, match=r"temperature was 1\.0, is 0\.5"):
        RLRun(other).train(resume=True)


def test_a_run_can_be_made_longer(config: RLConfig) -> None:
    """Two steps, then up to four: the weights of four steps at once."""
    short = replace(config, out=config.out / "short", loop=LoopConfig(steps=2))
    RLRun(short).train()
    RLRun(replace(short, loop=LoopConfig(steps=4))).train(resume=True)
    whole = replace(config, out=config.out / "whole", loop=LoopConfig(steps=4))
    RLRun(whole).train()
    first, second = (c.out / "model" / "model.safetensors" for c in (short, whole))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RolloutConfig(temperature=0.0), "temperature must be above 0"),
        (lambda: RolloutConfig(samples_per_prompt=1), "samples_per_prompt must be at least 2"),
        (lambda: AlgorithmConfig(clip_low=1.5), "clip_low must be from 0 to 1"),
        (lambda: LoopConfig(steps=0), "steps must be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
