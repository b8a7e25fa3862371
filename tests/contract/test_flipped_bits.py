"""The comparisons of this suite can fail: one flipped bit of a weight or of the KV cache is seen.

The lowest bit of one number is the smallest change there is. If the suite's comparison did not
notice it, "the same bits" would mean nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.core.sampling import SamplingParams
from lockstep.engine import Request
from lockstep.engine.collector import CompletionCollector
from lockstep.kernels.linear import QuantizedWeight
from lockstep.models.layers import set_weight

PARAMETERS = (
    "model.embed_tokens.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.v_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)


def flip_lowest_bit(numbers: Tensor, index: tuple[int, ...]) -> None:
    integers = numbers.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[numbers.itemsize])
    integers[index] ^= 1


def largest(numbers: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(numbers.abs().argmax(), numbers.shape))


@pytest.fixture(scope="module")
def requests(requests_of):
    """Random prompts of up to 300 tokens; one of them has every token of the vocabulary."""
    drawn = [
        Request(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            params=SamplingParams(max_tokens=12, seed=1, prompt_logprobs=0, ignore_eos=True),
        )
        for request in requests_of(6, seed=6)
    ]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, seed=1)
    return [*drawn, Request(request_id="all", prompt_token_ids=range(331), params=params)]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_bit_of_a_weight(precision, name, shared_model, fresh_model, requests, answers_of):
    expected = answers_of(shared_model("llama", precision), requests)
    model = fresh_model("llama", precision)
    assert answers_of(model, requests) == expected
    module = model.get_submodule(name.removesuffix(".weight"))
    with torch.no_grad():
        if isinstance(module.weight, QuantizedWeight):
            changed = module.weight.rows(torch.arange(module.weight.shape[0]))  # a copy
            flip_lowest_bit(changed.values_NK, largest(changed.dequantize()))
            set_weight(module, changed)
        else:
            flip_lowest_bit(module.weight, largest(module.weight))
    assert answers_of(model, requests) != expected


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_bit_of_the_kv_cache(family, precision, which, layer, shared_model, engine_of, bits_of):
    """Flipped in a block of the prompt that eight samples share, once the first has computed it.
    A change this small can vanish in the rounding of one token, not of some 300.
    """
    model = shared_model(family, precision)
    request = Request(
        request_id="r",
        prompt_token_ids=range(40),
        params=SamplingParams(n=8, max_tokens=40, seed=1, ignore_eos=True),
    )

    def answer(*, flipped: bool):
        engine, collector = engine_of(model), CompletionCollector(request)
        engine.add_request(request)
        for delta in engine.step():
            collector.push(delta)
        if flipped:
            block, slot = engine._scheduler.block_table(0)[1], 15
            cache = engine._runner.cache
            pages = cache.pages[layer]
            if pages.format == "fp32":
                keys, values = pages.k[block, ..., slot], pages.v[block, :, slot]
            else:
                keys = pages.k[block, :, :, slot]
                values = pages.v[block, :, slot // 2, :, slot % 2]
            numbers = keys if which == "k" else values
            flip_lowest_bit(numbers, largest(numbers))
        while engine.has_work:
            for delta in engine.step():
                collector.push(delta)
        return bits_of(collector.completion(0))

    assert answer(flipped=False) == answer(flipped=False)
    assert answer(flipped=True) != answer(flipped=False)
