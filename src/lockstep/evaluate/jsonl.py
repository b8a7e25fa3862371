"""Reading JSONL files of questions, with errors that name the file and the line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.core.errors import DataError

Record = Mapping[str, Any]


def read_records(path: Path) -> Iterator[tuple[int, Record]]:
    """(line number from 1, object) for every line that is not blank."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start})") from error
    # Not splitlines: JSON strings may hold U+2028 and its like unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number} is not JSON: {error.msg}") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number} must be a JSON object, got {type(record).__name__}")
        yield number, record


def required(record: Record, key: str, path: Path, number: int) -> Any:
    if key not in record:
        have = ", ".join(record) or "nothing"
        raise DataError(f"{path}:{number} lacks {key!r}; it has {have}")
    return record[key]


def item_name(record: Record, path: Path, number: int) -> str:
    """The record's own `id`, or the file's name and line."""
    return str(record["id"]) if "id" in record else f"{path.name}:{number}"


def group_name(record: Record) -> str | None:
    return str(record["group"]) if record.get("group") is not None else None
