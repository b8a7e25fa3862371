"""Bias and penalties against their definitions, and that only what is named changes."""

from __future__ import annotations

import pytest
import torch

from lockstep.core.sampling import SamplingParams
from lockstep.engine.logits import adjust, changes_logits

LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0, -2.0])


def adjusted(params: SamplingParams, *, prompt=(), output=(), end_tokens=()) -> list[float]:
    logits_V = LOGITS.clone()
    adjust(logits_V, params, prompt=prompt, output=output, end_tokens=end_tokens)
    return logits_V.tolist()


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_output():
    params = SamplingParams(repetition_penalty=2.0)
    assert adjusted(params, prompt=[0, 0], output=[1]) == [1.0, -2.0, 0.5, 3.0, -2.0]


def test_presence_counts_once_and_frequency_every_time_and_only_in_the_output():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    got = adjusted(params, prompt=[3, 4], output=[0, 0, 2])
    assert got == [2.0 - 0.5 - 0.5, -1.0, 0.5 - 0.5 - 0.25, 3.0, -2.0]


def test_bias_is_added_before_the_penalties():
    params = SamplingParams(logit_bias={1: 2.0}, repetition_penalty=2.0)
    assert adjusted(params, output=[1])[1] == 0.5


@pytest.mark.parametrize(("num_output", "is_masked"), [(0, True), (1, True), (2, False)])
def test_end_tokens_are_masked_until_min_tokens(num_output, is_masked):
    params = SamplingParams(min_tokens=2)
    got = adjusted(params, output=[0] * num_output, end_tokens={3, 4})
    assert (got[3] == got[4] == float("-inf")) is is_masked
    assert got[:3] == LOGITS[:3].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {1: 1.0}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"min_tokens": 1},
    ],
)
def test_changes_logits_sees_every_option(options):
    assert changes_logits(SamplingParams(**options), num_output=0)
    assert not changes_logits(SamplingParams(), num_output=0)
