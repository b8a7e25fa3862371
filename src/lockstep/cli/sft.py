"""`lockstep sft`: fine-tune a model on conversations or prompt/completion pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from lockstep.cli.config_file import settings_from_file
from lockstep.core.errors import ConfigError
from lockstep.core.progress import Progress
from lockstep.models.lora_config import ALL_LINEAR, LoraConfig
from lockstep.train.config import (
    DataConfig,
    LoopConfig,
    OptimizerConfig,
    ScheduleConfig,
    SFTConfig,
)

command = App(name="sft", config=settings_from_file)

_Flat = Parameter(name="*")  # the fields are flags of their own, without a prefix


@command.default
def fine_tune(
    *,
    model: str,
    out: Path,
    data: Annotated[DataConfig, _Flat],
    loop: Annotated[LoopConfig, _Flat] = LoopConfig(),  # noqa: B008 (frozen)
    optimizer: Annotated[OptimizerConfig, _Flat] = OptimizerConfig(),  # noqa: B008
    schedule: Annotated[ScheduleConfig, _Flat] = ScheduleConfig(),  # noqa: B008
    precision: Literal["bf16", "fp32"] = "bf16",
    quantization: str | None = None,
    full: bool = False,
    lora_r: int = 16,
    lora_alpha: float = 32.0,
    lora_targets: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ALL_LINEAR,
    resume: bool = False,
    config: Path | None = None,
) -> None:
    """Fine-tune a model; the loss is on what the assistant says, end of turn included.

    Parameters
    ----------
    model
        A name such as smollm2, a Hugging Face folder or a GGUF file.
    out
        Folder of the run: settings, metrics, checkpoints, and the trained weights.
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
    if not data.data.exists():  # before minutes of loading
        raise ConfigError(f"--data {data.data} does not exist")
    from lockstep.train.sft import SFTRun  # torch: two seconds that --help need not pay

    run = SFTRun(
        SFTConfig(
            model=model,
            out=out,
            data=data,
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
    if result.adapter_folder is not None:
        print(f"adapter: {result.adapter_folder}")
    print(f"model: {result.model_folder}")
    print(f"metrics: {out / 'metrics.jsonl'}")
