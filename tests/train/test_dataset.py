from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from lockstep.core.errors import DataError
from lockstep.text.tokenizer import Tokenizer
from lockstep.train.config import DataConfig
from lockstep.train.dataset import Dataset, load_dataset
from lockstep.train.masks import RecordTokenizer

RECORDS: list[dict[str, Any]] = [
    {"prompt": "2+2=", "completion": "4"},
    {"prompt": "hello", "completion": ", world" * 5},
]


@pytest.fixture
def load(make_tokenizer: Callable[..., Tokenizer]) -> Callable[..., Dataset]:
    """load(path, **settings)"""

    def load_path(path: Path, **settings: Any) -> Dataset:
        tokenizer = RecordTokenizer(make_tokenizer(), eos_token_ids=[2])
        return load_dataset(path, tokenizer, DataConfig(data=path, **settings))

    return load_path


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in RECORDS) + "\n\n")
    return path


def test_jsonl_and_parquet_give_the_same_documents(
    tmp_path: Path, jsonl: Path, load: Callable[..., Dataset]
) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "data.parquet")
    first, second = load(jsonl), load(tmp_path / "data.parquet")
    assert first.num_records == len(first.documents) == 2
    assert first.fingerprint() == second.fingerprint()
    assert first.num_loss_tokens == 2 + 7 * 5 - 5 + 1 + 5  # see below
    assert first.num_tokens == first.num_loss_tokens + len("2+2=") + 3


@pytest.mark.parametrize(
    ("overlong", "lengths", "truncated", "dropped"),
    [("truncate", [6, 10], 1, 0), ("drop", [6], 0, 1)],
)
def test_overlong_documents_are_counted(
    jsonl: Path,
    load: Callable[..., Dataset],
    overlong: str,
    lengths: list[int],
    truncated: int,
    dropped: int,
) -> None:
    dataset = load(jsonl, max_length=10, overlong=overlong)
    assert [len(document) for document in dataset.documents] == lengths
    assert (dataset.num_truncated, dataset.num_dropped) == (truncated, dropped)


def test_a_document_cut_before_its_answer_is_left_out(
    jsonl: Path, load: Callable[..., Dataset]
) -> None:
    dataset = load(jsonl, max_length=4)
    assert (len(dataset.documents), dataset.num_truncated, dataset.num_dropped) == (1, 1, 1)


def test_overlong_documents_can_be_refused(jsonl: Path, load: Callable[..., Dataset]) -> None:
    with pytest.raises(DataError, match=r"line 2: 39 tokens, at most 10 are allowed; raise"):
        load(jsonl, max_length=10, overlong="refuse")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"text": "a"}\n{"text": \n', r"line 2: not JSON"),
        (b'{"text": "a"}\n\n{"words": "b"}\n', r"line 3: no known format has the keys words"),
        (b'{"text": "\xff"}\n', "line 1: not UTF-8"),
        (b"\n", "has 0 records"),
        (b'{"messages": [{"role": "user", "content": "a"}]}\n', "line 1: there is no assistant"),
    ],
)
def test_the_place_of_a_bad_record_is_named(
    tmp_path: Path, load: Callable[..., Dataset], content: bytes, reason: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason):
        load(path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.jsonl", None, "is not a file"),
        ("data.csv", b"a,b", "neither .jsonl nor .parquet"),
        ("data.parquet", b"PAR1 but not really", "cannot be read as Parquet"),
    ],
)
def test_files_of_no_use_are_named(
    tmp_path: Path, load: Callable[..., Dataset], name: str, content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        load(tmp_path / name)
