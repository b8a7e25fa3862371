"""Training files to documents: read, tokenised, and fitted to a maximal length; all in memory.

JSONL (one record a line) and Parquet. Everything that was left out or shortened is counted.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.core.errors import DataError, RequestError
from lockstep.text.record_files import read_records
from lockstep.text.records import parse_record
from lockstep.train.config import DataConfig
from lockstep.train.masks import RecordTokenizer
from lockstep.train.packing import Document


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Documents that each have at least one token to learn, and what became of the records."""

    path: Path
    documents: list[Document]
    num_records: int
    num_truncated: int
    num_dropped: int
    """Documents that were too long, or had nothing left to learn."""

    @property
    def num_tokens(self) -> int:
        return sum(len(document) for document in self.documents)

    @property
    def num_loss_tokens(self) -> int:
        return sum(document.num_loss_tokens for document in self.documents)

    def fingerprint(self) -> str:
        """Hash of all tokens and weights: the same text with another tokenizer is other data."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(len(document).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(document.token_ids, dtype="<i4").tobytes())
            digest.update(np.ascontiguousarray(document.loss_weights, dtype="<f4").tobytes())
        return digest.hexdigest()


def load_dataset(path: Path, tokenizer: RecordTokenizer, config: DataConfig) -> Dataset:
    """Tokenise every record of `path`; DataError says which cannot be used, and why."""
    documents: list[Document] = []
    num_records = num_truncated = num_dropped = 0
    for place, record in read_records(path):
        num_records += 1
        try:
            made = tokenizer.documents(parse_record(record))
        except (DataError, RequestError) as error:
            raise DataError(f"{place}: {error}") from error
        for document in made:
            is_overlong = len(document) > config.max_length
            if is_overlong and config.overlong == "refuse":
                raise DataError(
                    f"{place}: {len(document)} tokens, at most {config.max_length} are allowed; "
                    "raise --max-length, or choose --overlong truncate or drop"
                )
            shortened = _truncate(document, config.max_length)
            if shortened.num_loss_tokens == 0 or (is_overlong and config.overlong == "drop"):
                num_dropped += 1
            else:
                num_truncated += is_overlong
                documents.append(shortened)
    if not documents:
        raise DataError(
            f"{path} has {num_records} records and none has a token to train on; "
            f"add records or raise --max-length (now {config.max_length})"
        )
    return Dataset(
        path=path,
        documents=documents,
        num_records=num_records,
        num_truncated=num_truncated,
        num_dropped=num_dropped,
    )


def _truncate(document: Document, max_length: int) -> Document:
    if len(document) <= max_length:
        return document
    return Document(
        token_ids=document.token_ids[:max_length], loss_weights=document.loss_weights[:max_length]
    )
