from __future__ import annotations

import pytest

from lockstep.core.errors import ConfigError
from lockstep.evaluate.reasoning_gym_source import ITEMS_PER_SEED, ReasoningGymSource
from lockstep.evaluate.tasks import load_environment


@pytest.fixture(scope="module")
def chain_sum() -> ReasoningGymSource:
    return ReasoningGymSource("chain_sum:max_terms=3,min_digits=1,max_digits=2")


def test_names_are_canonical(chain_sum: ReasoningGymSource) -> None:
    other = ReasoningGymSource("chain_sum:max_digits=2,min_digits=1,max_terms=3")
    assert other.name == chain_sum.name
    item = chain_sum.item(7, split="held_out", seed=2)
    assert item.item_id == f"{chain_sum.name}/held_out/2/7"


def test_an_address_always_gives_the_same_item(chain_sum: ReasoningGymSource) -> None:
    again = ReasoningGymSource("chain_sum:max_terms=3,min_digits=1,max_digits=2")
    for index in (0, 1, ITEMS_PER_SEED - 1):
        assert chain_sum.item(index, split="train", seed=3) == again.item(
            index, split="train", seed=3
        )


def test_splits_and_seeds_do_not_share_generator_seeds() -> None:
    # Large numbers, so that two equal questions could only come from equal generator seeds.
    source = ReasoningGymSource("chain_sum:min_digits=9,max_digits=9,min_terms=6,max_terms=6")
    questions = [
        source.item(index, split=split, seed=seed).prompt
        for split in ("train", "held_out")
        for seed in (0, 1, 2)
        for index in range(50)
    ]
    assert len(set(questions)) == len(questions)


def test_score_is_the_generators(chain_sum: ReasoningGymSource) -> None:
    item = chain_sum.item(0, split="held_out", seed=0)
    assert chain_sum.score(item.answer, item) == 1.0
    assert chain_sum.score(f"{item.answer} apples", item) < 1.0
    assert chain_sum.score(None, item) == 0.0


def test_a_scorer_that_raises_scores_0() -> None:
    source = ReasoningGymSource("prime_factorization")
    item = source.item(0, split="held_out", seed=0)
    assert source.score("not a number", item) == 0.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("chain_summ", "did you mean chain_sum"),
        ("chain_sum:digits=2", "no setting digits; it has allow_negation, max_digits"),
        ("chain_sum:min_terms=9,max_terms=2", "refuses its settings"),
        ("chain_sum:min_terms", "not of the form key=value"),
    ],
)
def test_bad_specs_are_one_sentence(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_environment(f"reasoning_gym:{spec}")


def test_lists_and_words_are_values() -> None:
    source = ReasoningGymSource("number_format:max_num_candidates=3")
    assert source.name == "reasoning_gym:number_format:max_num_candidates=3"
    spec = "count_bits:max_n=9,min_n=1"
    assert ReasoningGymSource(spec).name == f"reasoning_gym:{spec}"


def test_seeds_beyond_their_block_are_refused(chain_sum: ReasoningGymSource) -> None:
    with pytest.raises(ConfigError, match="from 0 to 9999, got 10000"):
        chain_sum.item(0, split="train", seed=10_000)
