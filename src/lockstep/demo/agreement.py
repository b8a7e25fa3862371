"""Does the trainer give the server's tokens the logprobs the server reported? To the bit.

The trainer's side is the code RL's loss runs: documents packed end to end, the model with its
adapter, the fused cross-entropy. The server's side came over HTTP, in its own batches, from paged
attention and a prefix cache. JSON carries an fp32 number without loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.models.llama import Llama
from lockstep.train.packing import Document, pack
from lockstep.train.step import target_statistics


@dataclass(frozen=True, kw_only=True)
class ServedAnswer:
    """What the server said to one request."""

    question: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """As the server reported them, one for each of `token_ids`."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Server and trainer side by side."""

    num_answers: int
    num_tokens: int
    num_different: int
    """Tokens whose two logprobs are not the same number."""
    max_difference: float


def trainer_logprobs(model: Llama, answers: Sequence[ServedAnswer]) -> list[tuple[float, ...]]:
    """Logprobs of every answer's tokens from one packed pass of the trainer."""
    documents = [
        Document(
            token_ids=answer.prompt_token_ids + answer.token_ids,
            loss_weights=[0.0] * len(answer.prompt_token_ids) + [1.0] * len(answer.token_ids),
        )
        for answer in answers
    ]
    # Room for all of them, so that they stay in order.
    (micro_batch,) = pack(documents, max_tokens=sum(map(len, documents)))
    logprobs = iter(target_statistics(model, micro_batch).logprobs_T.tolist())
    return [tuple(next(logprobs) for _ in answer.token_ids) for answer in answers]


def measure_agreement(
    answers: Sequence[ServedAnswer], logprobs: Sequence[Sequence[float]]
) -> Agreement:
    """`logprobs` are the trainer's, by answer and token."""
    differences = [
        abs(ours - theirs)
        for answer, of_trainer in zip(answers, logprobs, strict=True)
        for ours, theirs in zip(of_trainer, answer.logprobs, strict=True)
    ]
    return Agreement(
        num_answers=len(answers),
        num_tokens=len(differences),
        num_different=sum(difference != 0.0 for difference in differences),
        max_difference=max(differences),
    )
