from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockstep.core.errors import DataError
from lockstep.core.sampling import SamplingParams
from lockstep.rl.trajectory_files import Format, read_trajectories, write_trajectories


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_trajectories_survive_the_disk_to_the_bit(
    make_trajectory, tmp_path: Path, format: Format
) -> None:
    logprobs = np.random.default_rng(0).normal(-2, 1, 4).astype(np.float32)
    trajectories = [
        make_trajectory(
            reward=0.1,
            behaviour_logprobs=(0.0,) * 3 + tuple(float(value) for value in logprobs),
            rewards={"correct": 1.0},
            seed=2**63 - 1,
            sampling=SamplingParams(n=8, temperature=0.7, stop=("\n",), logit_bias={5: 1.5}),
            completion_text="caf\u00e9 \U0001f600\u2028",
            metadata={"answer": None},
        ),
        make_trajectory(reward=0.0, status="failed", metadata={"error": "boom"}),
    ]
    path = write_trajectories(tmp_path, 3, trajectories, format=format)
    assert path.name == f"step-00003.{format}"
    assert read_trajectories(path) == trajectories


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no trajectory file"):
        read_trajectories(tmp_path / "step-00000.jsonl")
