from __future__ import annotations

from collections.abc import Callable

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
