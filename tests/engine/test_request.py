"""A bad request is refused in one sentence with both numbers; seeds of samples."""

from __future__ import annotations

import pytest

from lockstep.core.errors import RequestError
from lockstep.core.sampling import SamplingParams
from lockstep.engine.request import Request, RequestLimits, sample_seed


def request(prompt=(1, 2, 3), **params) -> Request:
    return Request(request_id="r", prompt_token_ids=prompt, params=SamplingParams(**params))


def limits(*, has_tokenizer: bool = False) -> RequestLimits:
    return RequestLimits(vocab_size=10, max_model_len=5, has_tokenizer=has_tokenizer)


@pytest.mark.parametrize(
    ("bad", "message", "param"),
    [
        (request(prompt=()), "the prompt is empty", "prompt"),
        (request(prompt=(1, 10)), "the prompt has token id 10; ids go from 0 to 9", "prompt"),
        (request(prompt=(-1,)), "the prompt has token id -1", "prompt"),
        (request(prompt=(1,) * 5), "has 5 tokens and at least one.*max_model_len is 5", "prompt"),
        (request(prompt=(1,) * 6, max_tokens=0), "has 6 tokens, but max_model_len is 5", "prompt"),
        (request(stop_token_ids=(11,)), "stop_token_ids has token id 11", "stop_token_ids"),
        (request(logit_bias={12: 1.0}), "logit_bias has token id 12", "logit_bias"),
        (request(stop=("x",)), "stop strings need a tokenizer", "stop"),
    ],
)
def test_a_bad_request_is_refused(bad, message, param):
    with pytest.raises(RequestError, match=message) as caught:
        limits().check(bad)
    assert caught.value.param == param


def test_what_just_fits_is_accepted():
    limits().check(request(prompt=(1,) * 4, max_tokens=99))
    limits().check(request(prompt=(1,) * 5, max_tokens=0))
    limits(has_tokenizer=True).check(request(stop=("x",)))


def test_max_tokens_is_cut_at_the_models_length():
    assert limits().max_new_tokens(request(max_tokens=99)) == 2
    assert limits().max_new_tokens(request(max_tokens=1)) == 1


def test_the_first_sample_keeps_the_requests_seed_and_no_two_samples_share_one():
    assert sample_seed(-5, 0) == -5
    seeds = {sample_seed(seed, index) for seed in range(50) for index in range(1, 50)}
    assert len(seeds) == 50 * 49
    assert all(0 <= seed < 2**63 for seed in seeds)
