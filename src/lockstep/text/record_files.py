"""Files of records: JSONL (one record a line) and Parquet, read record by record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.core.errors import DataError


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """(place for error messages, record) for every record of a file, by its suffix."""
    if not path.is_file():
        raise DataError(f"{path} is not a file; give a .jsonl or .parquet file")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif path.suffix in (".jsonl", ".ndjson", ".json"):
        yield from _read_jsonl(path)
    else:
        raise DataError(f"{path} is neither .jsonl nor .parquet; convert it, or rename it")


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except UnicodeDecodeError as error:
                raise DataError(f"{place}: not UTF-8 ({error.reason}); convert the file") from error
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{place}: not JSON ({error.msg} at column {error.colno}); "
                    "write one JSON object a line"
                ) from error
            yield place, record


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", record
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
