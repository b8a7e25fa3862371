"""Trajectories on disk, one file a step, as JSONL or Parquet with the same columns.

Logprobs are fp32 values written in full, so they read back to the bit; with the seed, the sampling
parameters and the weight version of the record, every token can be drawn again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lockstep.core.errors import DataError
from lockstep.core.files import replacing, write_text
from lockstep.core.records import Trajectory
from lockstep.core.run_folder import as_json
from lockstep.core.sampling import SamplingParams

Format = Literal["jsonl", "parquet"]

_AS_JSON_TEXT = ("rewards", "sampling", "metadata")
"""Columns whose keys vary; Parquet holds them as JSON text."""


def write_trajectories(
    folder: Path, step: int, trajectories: Sequence[Trajectory], *, format: Format
) -> Path:
    """Write `folder/step-<step>.<format>` atomically."""
    path = folder / f"step-{step:05d}.{format}"
    rows = [as_json(trajectory) for trajectory in trajectories]
    if format == "jsonl":
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        write_text(path, "".join(f"{line}\n" for line in lines))
    else:
        _write_parquet(path, rows)
    return path


def read_trajectories(path: Path) -> list[Trajectory]:
    """The trajectories of one file of either format."""
    if not path.is_file():
        raise DataError(f"there is no trajectory file {path}")
    if path.suffix == ".parquet":
        return [_from_row(row) for row in _read_parquet(path)]
    lines = path.read_text().split("\n")  # splitlines would also cut at U+2028 within a string
    return [_from_row(json.loads(line)) for line in lines if line]


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    flat = [row | {key: json.dumps(row[key]) for key in _AS_JSON_TEXT} for row in rows]
    with replacing(path) as temporary:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat), temporary)


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return [row | {key: json.loads(row[key]) for key in _AS_JSON_TEXT} for row in rows]


def _from_row(row: Mapping[str, Any]) -> Trajectory:
    sampling = dict(row["sampling"])
    sampling["logit_bias"] = {int(k): v for k, v in sampling["logit_bias"].items()}
    for name in ("stop", "stop_token_ids"):
        sampling[name] = tuple(sampling[name])
    known = {field.name for field in dataclasses.fields(Trajectory)}
    if unknown := sorted(row.keys() - known):
        raise DataError(f"a trajectory has unknown fields {', '.join(unknown)}")
    values = dict(row) | {"sampling": SamplingParams(**sampling)}
    for name in ("token_ids", "loss_mask", "behaviour_logprobs"):
        values[name] = tuple(values[name])
    return Trajectory(**values)
