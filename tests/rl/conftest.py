from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lockstep.core.model_config import ModelConfig
from lockstep.core.records import Trajectory
from lockstep.models.llama import Llama


@pytest.fixture
def tiny_config() -> ModelConfig:
    return ModelConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=128,
        tie_embeddings=True,
        eos_token_ids=(0,),
        initializer_range=0.2,
    )


@pytest.fixture
def tiny_model(tiny_config: ModelConfig) -> Llama:
    model = Llama(tiny_config, compute_dtype=torch.float32)
    model.initialise(seed=0)
    return model


@pytest.fixture
def make_trajectory() -> Callable[..., Trajectory]:
    def make(*, reward: float, group: str = "g", prompt: int = 3, drawn: int = 4, **fields):
        num = prompt + drawn
        values = {
            "token_ids": tuple(1 + (7 * i + drawn) % 60 for i in range(num)),
            "behaviour_logprobs": (0.0,) * prompt + (-1.5,) * drawn,
        } | fields
        return Trajectory(
            task="toy",
            item_id="toy/0",
            group_id=group,
            sample_index=0,
            loss_mask=(False,) * prompt + (True,) * drawn,
            reward=reward,
            **values,
        )

    return make


@dataclass(frozen=True)
class Toy:
    """A task that a tiny model learns from rewards alone: `a+b=` is answered by b."""

    model: Path
    train: Path
    held_out: Path


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory, save_tiny_model: Callable[..., None]) -> Toy:
    folder = tmp_path_factory.mktemp("toy")
    save_tiny_model(folder / "model", pieces="0123456789+=", max_position=64)
    lines = [
        json.dumps({"prompt": f"{a}+{b}=", "answer": str(b)}) for a in range(10) for b in range(10)
    ]
    is_held_out = [(a + 3 * b) % 10 < 3 for a in range(10) for b in range(10)]
    for name in ("train", "held_out"):
        wanted = name == "held_out"
        chosen = [line for line, out in zip(lines, is_held_out, strict=True) if out == wanted]
        (folder / f"{name}.jsonl").write_text("\n".join(chosen))
    return Toy(folder / "model", folder / "train.jsonl", folder / "held_out.jsonl")
