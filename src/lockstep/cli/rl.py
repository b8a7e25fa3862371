"""`lockstep rl`: reinforcement learning on a verifiable task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from lockstep.cli.config_file import settings_from_file
from lockstep.core.progress import Progress
from lockstep.evaluate.answers import Extraction, Match
from lockstep.evaluate.prompts import PromptConfig
from lockstep.evaluate.single_turn import TaskConfig
from lockstep.evaluate.verifiers import parse_weights
from lockstep.models.lora_config import ALL_LINEAR, LoraConfig
from lockstep.rl.config import (
    AlgorithmConfig,
    LoopConfig,
    RLConfig,
    RLScheduleConfig,
    RolloutConfig,
)
from lockstep.train.config import OptimizerConfig

command = App(name="rl", config=settings_from_file)

_Flat = Parameter(name="*")  # the fields are flags of their own, without a prefix


@command.default
def reinforce(
    *,
    model: str,
    task: str,
    out: Path,
    eval_task: str = "",
    rollout: Annotated[RolloutConfig, _Flat] = RolloutConfig(),  # noqa: B008 (frozen)
    algorithm: Annotated[AlgorithmConfig, _Flat] = AlgorithmConfig(),  # noqa: B008
    loop: Annotated[LoopConfig, _Flat] = LoopConfig(),  # noqa: B008
    prompt: Annotated[PromptConfig, _Flat] = PromptConfig(),  # noqa: B008
    extract: Extraction = "whole",
    match: Match = "exact",
    reward: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ("correct",),
    optimizer: Annotated[OptimizerConfig, _Flat] = OptimizerConfig(),  # noqa: B008
    schedule: Annotated[RLScheduleConfig, _Flat] = RLScheduleConfig(),  # noqa: B008
    precision: Literal["bf16", "fp32"] = "bf16",
    quantization: str | None = None,
    full: bool = False,
    lora_r: int = 16,
    lora_alpha: float = 32.0,
    lora_targets: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ALL_LINEAR,
    resume: bool = False,
    config: Path | None = None,
) -> None:
    """Train a model by GRPO or its kin on rewards that can be verified.

    Parameters
    ----------
    model
        A name such as smollm2, a Hugging Face folder or a GGUF file.
    task
        reasoning_gym:NAME[:key=value,...] or free_answer:FILE.
    out
        Folder of the run: settings, metrics, trajectories, checkpoints, and the trained weights.
    eval_task
        Task of the held-out measurements; default: the held-out split of --task.
    extract
        Where the answer is: the whole completion, inside its last answer tag, or its last number.
    match
        How free answers are compared: exact (normalised text) or numeric.
    reward
        NAME or NAME=WEIGHT, several are added up: correct, graded, answered or FILE.py:FUNCTION.
    precision
        Precision of the computation; trained weights are kept in fp32 either way.
    quantization
        How weights are held: int8, int4, fp8, a GGUF type, native or float; default: float.
    full
        Train every weight instead of a LoRA adapter.
    lora_r
        Rank of the adapter.
    lora_alpha
        Scale of the adapter: alpha / r times B A is added to a weight.
    lora_targets
        Projections that get an adapter.
    resume
        Continue the run in --out from its last good checkpoint, to the same bits.
    config
        TOML file with settings under the names of these flags; flags win.
    """
    from lockstep.rl.run import RLRun  # torch: two seconds that --help need not pay

    run = RLRun(
        RLConfig(
            model=model,
            task=task,
            out=out,
            eval_task=eval_task,
            posing=TaskConfig(
                prompt=prompt, extract=extract, match=match, rewards=parse_weights(reward)
            ),
            rollout=rollout,
            algorithm=algorithm,
            loop=loop,
            optimizer=optimizer,
            schedule=schedule,
            lora=None if full else LoraConfig(r=lora_r, alpha=lora_alpha, targets=lora_targets),
            precision=precision,
            quantization=quantization,
        )
    )
    with Progress() as progress:
        for line in run.describe():
            progress.say(line)
        result = run.train(resume=resume, progress=progress)
    for name, summary in (("first", result.first_evaluation), ("last", result.last_evaluation)):
        if summary is not None:
            accuracy = summary.accuracy
            print(
                f"{name} held-out accuracy: {accuracy.mean:.4f} "
                f"({accuracy.low:.4f} to {accuracy.high:.4f}, {accuracy.num_items} items)"
            )
    if result.adapter_folder is not None:
        print(f"adapter: {result.adapter_folder}")
    print(f"model: {result.model_folder}")
    print(f"metrics: {out / 'metrics.jsonl'}")
