"""The gradient of a step is that of the whole batch, however the batch is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from lockstep import kernels
from lockstep.models.llama import Llama
from lockstep.models.lora import LoraConfig, apply_lora
from lockstep.train.config import OptimizerConfig
from lockstep.train.optimizer import build_optimizer
from lockstep.train.packing import Document, MicroBatch, pack, total_weight
from lockstep.train.step import (
    DivergenceError,
    LossSum,
    evaluate_loss,
    negative_log_likelihood,
    target_statistics,
    train_step,
)

LENGTHS = [5, 17, 2, 9, 12, 1, 20]


def gradients(model: Llama, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """What a step would apply; the weights stay as they are (learning rate 0 is not allowed)."""
    model.zero_grad()
    normaliser = total_weight(micro_batches)
    for micro_batch in micro_batches:
        (negative_log_likelihood(model, micro_batch).total / normaliser).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("max_tokens", [20, 33])
def test_accumulated_gradients_equal_those_of_one_big_batch(
    make_model: Callable[..., Llama],
    make_documents: Callable[..., list[Document]],
    max_tokens: int,
    checkpointing: bool,
) -> None:
    model, documents = make_model(), make_documents(LENGTHS)
    whole = gradients(model, pack(documents, max_tokens=1000))
    model.activation_checkpointing = checkpointing
    micro_batches = pack(documents, max_tokens=max_tokens)
    assert len(micro_batches) > 1
    split = gradients(model, micro_batches)
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_a_packed_document_has_to_the_bit_the_logprobs_it_has_alone(
    make_model: Callable[..., Llama],
    make_documents: Callable[..., list[Document]],
    compute_dtype: torch.dtype,
) -> None:
    model, documents = make_model(compute_dtype=compute_dtype), make_documents(LENGTHS)
    (packed,) = pack(documents, max_tokens=1000)
    together = target_statistics(model, packed).logprobs_T
    alone = [
        target_statistics(model, pack([document], max_tokens=1000)[0]).logprobs_T
        for document in documents
        if document.num_loss_tokens
    ]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_to_the_bit_for_any_number_of_threads(
    make_model: Callable[..., Llama],
    make_documents: Callable[..., list[Document]],
    compute_dtype: torch.dtype,
) -> None:
    model = make_model(compute_dtype=compute_dtype, qk_norm=True, qkv_bias=True)
    batches = pack(make_documents([90, 70, 33, 5]), max_tokens=1000)
    threads = torch.get_num_threads()
    try:
        found = []
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            kernels.set_num_threads(num_threads)
            found.append(gradients(model, batches))
    finally:
        torch.set_num_threads(threads)
        kernels.set_num_threads(threads)
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def test_the_gradient_is_that_of_plain_torch(
    make_model: Callable[..., Llama], make_documents: Callable[..., list[Document]]
) -> None:
    """Every document alone through transformers' model, with the textbook loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model, documents = make_model(), make_documents(LENGTHS)
    theirs = LlamaForCausalLM(LlamaConfig.from_dict(dict(model.config.to_hf())))
    theirs.load_state_dict(model.state_dict(), strict=False)
    loss_sum = torch.zeros(())
    for document in documents:
        if len(document) == 1:
            continue
        tokens = torch.tensor([document.token_ids])
        logits = theirs(tokens).logits[0, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
        loss_sum = loss_sum + (losses * torch.tensor(document.loss_weights[1:])).sum()
    (loss_sum / sum(document.num_loss_tokens for document in documents)).backward()
    ours = gradients(model, pack(documents, max_tokens=40))
    for name, weight in theirs.named_parameters():
        if name in ours:
            torch.testing.assert_close(ours[name], weight.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_a_loss_of_ones_own_sees_its_columns_and_is_reported(
    make_model: Callable[..., Llama],
) -> None:
    def policy_gradient(model: Llama, micro_batch: MicroBatch) -> LossSum:
        logprobs_R = target_statistics(model, micro_batch).logprobs_T
        advantages_R = micro_batch.columns["advantages"]
        return LossSum(
            total=-(logprobs_R * advantages_R).sum(), sums={"advantages": advantages_R.sum()}
        )

    documents = [
        Document(
            token_ids=[5, 6, 7, 8],
            loss_weights=[0, 0, 1, 1],
            columns={"advantages": [0, 0, advantage, advantage]},
        )
        for advantage in (1.0, 0.5)
    ]
    model = make_model()
    optimizer = build_optimizer(model, OptimizerConfig(learning_rate=1e-3))
    micro_batches = pack(documents, max_tokens=4)
    expected = sum(policy_gradient(model, batch).total.item() for batch in micro_batches) / 8
    metrics = train_step(model, optimizer, micro_batches, policy_gradient, normaliser=8.0)
    assert metrics.loss == pytest.approx(expected)
    assert metrics.sums == {"advantages": 3.0}
    assert (metrics.num_tokens, metrics.num_loss_tokens) == (8, 4)


def test_a_step_is_seen_by_the_next_forward_pass(
    make_model: Callable[..., Llama], make_documents: Callable[..., list[Document]]
) -> None:
    """Packed copies of the weights are made anew: the version counter of every weight moved."""
    model = make_model()
    apply_lora(model, LoraConfig(r=2))
    (batch,) = pack(make_documents([9, 9]), max_tokens=1000)
    optimizer = build_optimizer(model, OptimizerConfig(learning_rate=1e-2))
    before = {name: (w._version, w.detach().clone()) for name, w in model.named_parameters()}
    losses = [
        train_step(model, optimizer, [batch], negative_log_likelihood, normaliser=1.0).loss
        for _ in range(3)
    ]
    assert losses[0] > losses[1] > losses[2]
    for name, weight in model.named_parameters():
        version, value = before[name]
        assert (weight._version > version) == weight.requires_grad, name
        assert torch.equal(weight, value) != weight.requires_grad, name


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(
    make_model: Callable[..., Llama], make_documents: Callable[..., list[Document]]
) -> None:
    def overflow(model: Llama, micro_batch: MicroBatch) -> LossSum:
        return LossSum(total=negative_log_likelihood(model, micro_batch).total * float("inf"))

    model = make_model()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerConfig())
    batches = pack(make_documents([9]), max_tokens=1000)
    with pytest.raises(DivergenceError, match="lower the learning rate"):
        train_step(model, optimizer, batches, overflow, normaliser=1.0)
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())


def test_the_held_out_loss_is_a_mean_over_tokens(
    make_model: Callable[..., Llama], make_documents: Callable[..., list[Document]]
) -> None:
    model, documents = make_model(), make_documents(LENGTHS)
    (whole,) = pack(documents, max_tokens=1000)
    expected = negative_log_likelihood(model, whole).total.item() / total_weight([whole])
    split = pack(documents, max_tokens=20)
    assert evaluate_loss(model, split, negative_log_likelihood) == pytest.approx(expected, rel=1e-5)


def _alike_documents() -> list[Document]:
    prompt = list(range(3, 40))
    tails = [[41, 7, 2], [41, 9], [5], [41, 7, 60, 61, 62, 2]]
    return [
        Document(token_ids=[*prompt, *tail], loss_weights=[0.0] * len(prompt) + [1.0] * len(tail))
        for tail in tails
    ]


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 11])
def test_a_document_with_a_shared_prefix_has_to_the_bit_the_logprobs_it_has_alone(
    make_model: Callable[..., Llama], compute_dtype: torch.dtype, window: int | None
) -> None:
    model, documents = (
        make_model(compute_dtype=compute_dtype, sliding_window=window),
        _alike_documents(),
    )
    (packed,) = pack(documents, max_tokens=1000)
    assert packed.shared_E is not None
    alone = [
        target_statistics(model, pack([document], max_tokens=1000)[0]).logprobs_T
        for document in documents
    ]
    assert torch.equal(target_statistics(model, packed).logprobs_T, torch.cat(alone))


def test_a_shared_prefix_has_the_gradient_of_its_copies(make_model: Callable[..., Llama]) -> None:
    model, documents = make_model(), _alike_documents()
    shared = gradients(model, pack(documents, max_tokens=1000))
    apart = gradients(model, [pack([document], max_tokens=1000)[0] for document in documents])
    for name, gradient in apart.items():
        torch.testing.assert_close(shared[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
