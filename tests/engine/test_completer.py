"""The engine as a Completer: chat prompts and scores."""

from __future__ import annotations

import pytest

from lockstep.core.completer import Completer
from lockstep.core.errors import RequestError
from lockstep.core.sampling import SamplingParams
from lockstep.engine import EngineCompleter


@pytest.fixture
def completer(engine) -> Completer:
    return EngineCompleter(engine, model_name="tiny")


def test_a_chat_prompt_is_the_rendered_template_in_tokens(completer, tokenizer):
    prompt = completer.chat_prompt([{"role": "user", "content": "hi"}])
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_chat_prompt_needs_a_template(engine_of):
    completer = EngineCompleter(engine_of(with_tokenizer=False), model_name="tiny")
    with pytest.raises(RequestError, match="tiny has no chat template"):
        completer.chat_prompt([{"role": "user", "content": "hi"}])


def test_scores_are_the_prompt_logprobs_of_the_continuation(completer, engine, tokenizer):
    pairs = [("the sky is", " blue"), ("the sky is", " a"), (tokenizer.encode("q"), "abc")]
    scores = completer.score(pairs)
    assert [len(score) for score in scores] == [5, 2, 3]
    texts = ["the sky is blue", "the sky is a", "qabc"]
    whole = engine.generate(texts, SamplingParams(max_tokens=0, prompt_logprobs=0))
    for score, completion in zip(scores, whole, strict=True):
        expected = [entry.logprob for entry in completion.prompt_logprobs[-len(score) :]]
        assert score == expected


def test_scoring_again_reads_the_context_from_the_prefix_cache(completer, engine):
    context = "x" * 50
    first = completer.score([(context, "a")])
    hits = engine.stats().prefix_hits
    assert completer.score([(context, "a"), (context, "b")])[0] == first[0]
    assert engine.stats().prefix_hits - hits == 2 * 48


def test_the_choices_of_one_question_share_its_context(completer, engine):
    completer.score([("x" * 50, choice) for choice in "abcd"])
    assert engine.stats().prefix_hits == 3 * 48


def test_completions_come_in_the_order_of_the_prompts(completer, engine):
    params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in (9, 1, 5)]
    completions = completer.complete(["a", "b", "c"], params)
    assert [len(c.samples[0].token_ids) for c in completions] == [9, 1, 5]
