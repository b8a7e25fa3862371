from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from lockstep.core.sampling import SamplingParams
from lockstep.demo.agreement import ServedAnswer, measure_agreement, trainer_logprobs
from lockstep.engine import Engine, EngineCompleter
from lockstep.models import load_model


def test_the_engine_agrees_and_one_flipped_bit_does_not(tiny_model: Path) -> None:
    loaded = load_model(tiny_model, precision="fp32")
    completer = EngineCompleter(Engine(loaded.model, loaded.tokenizer), model_name="tiny")
    prompts = [[70, 71, 72], [90], list(range(40, 60))]
    params = SamplingParams(max_tokens=9, seed=1, ignore_eos=True, logprobs=0)
    answers = [
        ServedAnswer(
            question="",
            prompt_token_ids=done.prompt_token_ids,
            token_ids=done.samples[0].token_ids,
            logprobs=tuple(entry.logprob for entry in done.samples[0].logprobs),
            text=done.samples[0].text,
        )
        for done in completer.complete(prompts, params)
    ]
    logprobs = trainer_logprobs(loaded.model, answers)
    agreement = measure_agreement(answers, logprobs)
    assert (agreement.num_answers, agreement.num_tokens) == (3, 27)
    assert (agreement.num_different, agreement.max_difference) == (0, 0.0)

    first = torch.tensor(answers[1].logprobs[0])
    flipped = (first.view(torch.int32) ^ 1).view(torch.float32).item()
    answers[1] = replace(answers[1], logprobs=(flipped, *answers[1].logprobs[1:]))
    agreement = measure_agreement(answers, logprobs)
    assert agreement.num_different == 1
    assert agreement.max_difference == abs(first.item() - flipped) > 0
