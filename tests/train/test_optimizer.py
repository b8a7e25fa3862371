from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from lockstep.core.errors import ConfigError
from lockstep.models.llama import Llama
from lockstep.train.config import OptimizerConfig, ScheduleConfig
from lockstep.train.optimizer import (
    build_optimizer,
    clipping_factor,
    global_norm,
    learning_rate_at,
)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [1, 1, 1, 1, 1]),
        ("linear", [1, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [1, 0.55 + 0.45 * 0.5**0.5, 0.55, 0.55 - 0.45 * 0.5**0.5, 0.1]),
    ],
)
def test_rates(kind: str, expected: list[float]) -> None:
    schedule = ScheduleConfig(lr_schedule=kind, warmup_steps=2, min_lr_ratio=0.1)
    rates = [learning_rate_at(s, peak=1.0, num_steps=6, schedule=schedule) for s in range(7)]
    assert rates == pytest.approx([0.5, 1, *expected])


def test_the_norm_is_right_and_the_same_for_any_number_of_threads(restore_threads: None) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(300, 700), torch.randn(5), torch.randn(1024)]
    exact = math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))
    norms = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        norms.append(global_norm(tensors))
    assert norms[0] == pytest.approx(exact, rel=1e-6)
    assert norms[0] == norms[1] == norms[2]


def test_clipping_scales_to_the_limit_and_leaves_smaller_gradients_alone() -> None:
    assert clipping_factor(5.0, max_norm=10.0) == 1.0
    assert clipping_factor(5.0, max_norm=None) == 1.0
    assert clipping_factor(5.0, max_norm=1.0) == pytest.approx(0.2)


def test_updates_are_those_of_torchs_adamw(make_model: Callable[..., Llama]) -> None:
    """Five steps with decay and a clipped gradient, beside torch's AdamW in float64."""
    ours, exact = make_model(), make_model().double()
    exact.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(ours, OptimizerConfig(learning_rate=3e-3, weight_decay=0.1))
    groups = [
        {
            "params": [
                dict(exact.named_parameters())[n]
                for n, w in ours.named_parameters()
                if id(w) in {id(p) for p in group["params"]}
            ],
            "weight_decay": group["weight_decay"],
        }
        for group in optimizer.param_groups
    ]
    theirs = torch.optim.AdamW(groups, lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for mine, other in zip(ours.parameters(), exact.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.double() * 0.25
        optimizer.step(grad_scale=0.25)
        theirs.step()
    for mine, other in zip(ours.parameters(), exact.parameters(), strict=True):
        assert torch.allclose(mine.double(), other, rtol=2e-6, atol=2e-8)


def test_decay_is_on_matrices_only(make_model: Callable[..., Llama]) -> None:
    model = make_model(qkv_bias=True)
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.1))
    decayed = {id(weight) for weight in optimizer.param_groups[0]["params"]}
    for name, weight in model.named_parameters():
        assert (id(weight) in decayed) == (name.endswith("_proj.weight")), name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_weights_below_fp32_are_refused(make_model: Callable[..., Llama]) -> None:
    with pytest.raises(ConfigError, match="must be fp32 masters"):
        build_optimizer(make_model().bfloat16(), OptimizerConfig())


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="learning_rate must be above 0, got -1"):
        OptimizerConfig(learning_rate=-1)
    with pytest.raises(ConfigError, match="beta2 must be from 0 to below 1, got 1"):
        OptimizerConfig(beta2=1)
    with pytest.raises(ConfigError, match="min_lr_ratio must be from 0 to 1, got 2"):
        ScheduleConfig(min_lr_ratio=2)
