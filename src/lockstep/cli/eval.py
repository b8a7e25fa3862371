"""`lockstep eval`: measure a model on held-out items, and compare two measurements."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from lockstep.cli.config_file import settings_from_file
from lockstep.cli.eval_tables import print_comparison, print_summary
from lockstep.core.completer import Completer
from lockstep.core.errors import ConfigError
from lockstep.core.progress import Progress
from lockstep.core.run_folder import RunFolder
from lockstep.evaluate.answers import Extraction, Match
from lockstep.evaluate.compare import compare_folders
from lockstep.evaluate.generation import GenerationConfig
from lockstep.evaluate.measurement import (
    ChoiceMeasurement,
    GenerationMeasurement,
    Measurement,
    measure,
)
from lockstep.evaluate.prompts import PromptConfig
from lockstep.evaluate.single_turn import TaskConfig
from lockstep.evaluate.tasks import load_environment

command = App(name="eval", config=settings_from_file)

_Flat = Parameter(name="*")  # the fields are flags of their own, without a prefix


@command.default
def evaluate(
    *,
    out: Path,
    model: str | None = None,
    url: str | None = None,
    adapter: Path | None = None,
    precision: Literal["bf16", "fp32"] = "bf16",
    quantization: str | None = None,
    task: str | None = None,
    multiple_choice: Path | None = None,
    free_answer: Path | None = None,
    generation: Annotated[GenerationConfig, _Flat] = GenerationConfig(),  # noqa: B008 (frozen)
    prompt: Annotated[PromptConfig, _Flat] = PromptConfig(),  # noqa: B008
    extract: Extraction = "whole",
    match: Match = "exact",
    config: Path | None = None,
) -> None:
    """Measure a model; one record an item and a summary with confidence intervals go to --out.

    Parameters
    ----------
    out
        Folder for results.jsonl, summary.json and the settings.
    model
        A name such as smollm2, a Hugging Face folder or a GGUF file; with --url, the name to ask
        the server for.
    url
        Address of an OpenAI-compatible server, such as http://127.0.0.1:8000; a key comes from
        LOCKSTEP_API_KEY or OPENAI_API_KEY.
    adapter
        PEFT folder of a LoRA adapter to put on the model.
    precision
        Precision of the computation.
    quantization
        How weights are held: int8, int4, fp8, a GGUF type, native or float; default: float.
    task
        reasoning_gym:NAME[:key=value,...]
    multiple_choice
        JSONL file of {question, choices, answer}, answered by likelihood.
    free_answer
        JSONL file of {prompt or messages, answer}.
    extract
        Where the answer is: the whole completion, inside its last answer tag, or its last number.
    match
        How free answers are compared: exact (normalised text) or numeric.
    config
        TOML file with settings under the names of these flags; flags win.
    """
    if sum(given is not None for given in (task, multiple_choice, free_answer)) != 1:
        raise ConfigError("give exactly one of --task, --multiple-choice and --free-answer")
    measurement: Measurement
    if multiple_choice is not None:
        task = f"multiple_choice:{multiple_choice}"
        measurement = ChoiceMeasurement(multiple_choice, generation.num_items, prompt)
    else:
        task = task or f"free_answer:{free_answer}"
        posing = TaskConfig(prompt=prompt, extract=extract, match=match)
        environment = load_environment(task, posing)
        measurement = GenerationMeasurement(environment, generation)
    completer = _completer(model, url, adapter, precision, quantization)
    with RunFolder(out) as folder, Progress() as progress:
        folder.write_config(
            {
                "model": model,
                "url": url,
                "adapter": adapter,
                "precision": precision,
                "quantization": quantization,
                "task": task,
                "generation": generation,
                "prompt": prompt,
                "extract": extract,
                "match": match,
            }
        )
        folder.write_environment()
        bar = progress.add("evaluate", total=measurement.num_items, unit="items")
        summary = measure(measurement, completer, out, on_finish=lambda _: bar.advance())
        bar.finish()
    print_summary(summary)
    print(f"results: {out}")


@command.command(name="compare")
def compare(a: Path, b: Path, /, *, metric: str = "accuracy") -> None:
    """Compare two evaluations of the same items with a paired test: is B better than A?

    Parameters
    ----------
    a
        Folder that `lockstep eval` wrote.
    b
        Folder of the evaluation to hold against it.
    metric
        accuracy, score, or another metric of the records (acc_norm, acc_bytes).
    """
    print_comparison(compare_folders(a, b, metric=metric))


def _completer(
    model: str | None,
    url: str | None,
    adapter: Path | None,
    precision: Literal["bf16", "fp32"],
    quantization: str | None,
) -> Completer:
    if url is not None:
        if adapter is not None:
            raise ConfigError("--adapter goes on a model loaded here; start the server with it")
        from lockstep.evaluate.http_completer import HttpCompleter

        api_key = os.environ.get("LOCKSTEP_API_KEY") or os.environ.get("OPENAI_API_KEY")
        return HttpCompleter(url, model=model, api_key=api_key)
    if model is None:
        raise ConfigError("nothing to measure; give --model MODEL or --url URL")
    # Torch takes two seconds to import; a mistyped task should not.
    from lockstep.engine import Engine, EngineCompleter
    from lockstep.models import load_model
    from lockstep.serve.loading import add_adapter

    loaded = load_model(model, precision=precision, weights=quantization)
    if adapter is not None:
        add_adapter(loaded, adapter)
    return EngineCompleter(Engine(loaded.model, loaded.tokenizer), model_name=loaded.name)
