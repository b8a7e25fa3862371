from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.errors import DataError
from lockstep.train.packing import Document, best_fit, pack, shared_rows, total_weight


@given(st.lists(st.integers(1, 64), max_size=60))
def test_every_document_is_in_one_bin_and_no_bin_overflows(lengths: list[int]) -> None:
    bins = best_fit(lengths, capacity=64)
    assert sorted(index for indices in bins for index in indices) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in indices) for indices in bins]
    assert all(size <= 64 for size in sums)
    # Two bins that fit into one are what best fit never leaves behind.
    assert all(a + b > 64 for i, a in enumerate(sums) for b in sums[:i])


def test_a_document_longer_than_a_micro_batch_is_refused_in_numbers() -> None:
    with pytest.raises(DataError, match="has 65 tokens and a micro-batch holds 64"):
        best_fit([3, 65], capacity=64)


def test_rows_predict_the_next_token_of_the_same_document() -> None:
    documents = [
        Document(token_ids=[10, 11, 12], loss_weights=[1, 0, 2], columns={"a": [5, 6, 7]}),
        Document(token_ids=[20, 21], loss_weights=[1, 1], columns={"a": [8, 9]}),
    ]
    (batch,) = pack(documents, max_tokens=8)
    assert batch.tokens_T.tolist() == [10, 11, 12, 20, 21]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 1]
    assert batch.cu_seqlens_S1.tolist() == [0, 3, 5]
    assert batch.cu_seqlens_S1.dtype == torch.int32
    # The first token of a document has no row that could predict it.
    assert batch.rows_R.tolist() == [1, 3]
    assert batch.targets_R.tolist() == [12, 21]
    assert batch.weights_R.tolist() == [2, 1]
    assert batch.columns["a"].tolist() == [7, 9]
    assert total_weight([batch]) == 3
    assert [document.num_loss_tokens for document in documents] == [1, 1]


def test_a_common_prefix_is_computed_once() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    documents = [
        Document(token_ids=[*prompt, *tail], loss_weights=[0] * 8 + [1] * len(tail))
        for tail in ([30, 40], [9], [30, 50, 60], [30, 40])
    ]
    (batch,) = pack(documents, max_tokens=100)
    assert batch.num_tokens == 8 * 4 + 8
    # One row for each distinct (prefix, token): the prompt, 9, 30, 30 40, 30 50, 30 50 60.
    assert len(batch.tokens_T) == 8 + 5
    assert batch.shared_E is not None
    laid_out = [token for document in documents for token in document.token_ids]
    assert batch.tokens_T[batch.shared_E].tolist() == laid_out
    assert batch.targets_R.tolist() == [30, 40, 9, 30, 50, 60, 30, 40]
    # All four first answers are predicted by the one row of the prompt's last token.
    first_answers = batch.rows_R[torch.tensor([0, 2, 3, 6])]
    assert batch.tokens_T[first_answers].tolist() == [8, 8, 8, 8]
    assert len(set(first_answers.tolist())) == 1
    assert batch.positions_T[first_answers[0]] == 7


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12))
def test_rows_stand_for_prefixes(documents: list[list[int]]) -> None:
    rows = shared_rows([np.array(document) for document in documents])
    prefixes = [tuple(d[: i + 1]) for d in documents for i in range(len(d))]
    if len(set(prefixes)) > len(prefixes) * 7 // 8:
        assert rows.tolist() == list(range(len(prefixes)))
        return
    by_prefix = dict(zip(prefixes, rows.tolist(), strict=True))
    assert rows.tolist() == [by_prefix[prefix] for prefix in prefixes]
    assert sorted(set(rows.tolist())) == list(range(len(by_prefix)))
