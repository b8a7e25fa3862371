from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep.core.errors import CheckpointError, ConfigError
from lockstep.models.llama import Llama
from lockstep.models.lora import LoraConfig, apply_lora
from lockstep.train import checkpoint
from lockstep.train.config import OptimizerConfig, ScheduleConfig
from lockstep.train.packing import Document, pack
from lockstep.train.step import negative_log_likelihood
from lockstep.train.trainer import Trainer

CONFIG = {"settings": {"learning_rate": 0.01, "keep": 2}, "data": "abc"}


@pytest.fixture
def make_trainer(make_model: Callable[..., Llama]) -> Callable[..., Trainer]:
    """make_trainer(lora=False), before its first step."""

    def make(*, lora: bool = False) -> Trainer:
        model = make_model()
        if lora:
            apply_lora(model, LoraConfig(r=2))
        return Trainer(
            model,
            optimizer=OptimizerConfig(learning_rate=0.01, weight_decay=0.1),
            schedule=ScheduleConfig(warmup_steps=2),
            num_steps=10,
        )

    return make


@pytest.fixture
def update(make_documents: Callable[..., list[Document]]) -> Callable[[Trainer, int], None]:
    """update(trainer, n): n steps on the same data."""
    batches = pack(make_documents([9, 12]), max_tokens=16)

    def steps(trainer: Trainer, count: int) -> None:
        for _ in range(count):
            trainer.update(batches, negative_log_likelihood, normaliser=10.0)

    return steps


@pytest.mark.parametrize("lora", [False, True])
def test_a_restored_trainer_goes_on_to_the_same_bits(
    tmp_path: Path,
    make_trainer: Callable[..., Trainer],
    update: Callable[[Trainer, int], None],
    lora: bool,
) -> None:
    first, second = make_trainer(lora=lora), make_trainer(lora=lora)
    update(first, 2)
    folder = first.save(tmp_path, state={"cursor": 7}, config=CONFIG)
    assert folder.name == "checkpoint-2"
    random_after_save = torch.rand(3)
    update(first, 3)
    assert second.resume(tmp_path, config=CONFIG) == {"cursor": 7}
    assert second.step == 2
    assert torch.equal(torch.rand(3), random_after_save)
    update(second, 3)
    for (name, a), (_, b) in zip(
        first.model.named_parameters(), second.model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


def test_the_newest_are_kept(
    tmp_path: Path, make_trainer: Callable[..., Trainer], update: Callable[[Trainer, int], None]
) -> None:
    trainer = make_trainer(lora=True)
    for _ in range(4):
        update(trainer, 1)
        trainer.save(tmp_path, state={}, config=CONFIG, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.parametrize("damage", ["flip a bit", "cut", "remove", "no manifest", "torn manifest"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path,
    make_trainer: Callable[..., Trainer],
    update: Callable[[Trainer, int], None],
    damage: str,
) -> None:
    trainer = make_trainer(lora=True)
    for step in (1, 2):
        update(trainer, 1)
        trainer.save(tmp_path, state={"step": step}, config=CONFIG)
    file = tmp_path / "checkpoint-2" / "optimizer.safetensors"
    manifest = tmp_path / "checkpoint-2" / "manifest.json"
    match damage:
        case "flip a bit":
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        case "cut":
            file.write_bytes(file.read_bytes()[:-1])
        case "remove":
            file.unlink()
        case "no manifest":
            manifest.unlink()
        case "torn manifest":
            manifest.write_bytes(manifest.read_bytes()[:40])
    messages: list[str] = []
    state = make_trainer(lora=True).resume(tmp_path, config=CONFIG, on_message=messages.append)
    assert state == {"step": 1}
    assert len(messages) == 1
    assert "skipping a damaged checkpoint" in messages[0]


def test_what_a_killed_save_left_is_swept_away(
    tmp_path: Path, make_trainer: Callable[..., Trainer]
) -> None:
    half = tmp_path / ".checkpoint-5.abc.tmp"
    half.mkdir()
    (half / "parameters.safetensors").write_bytes(b"half")
    assert make_trainer(lora=True).resume(tmp_path, config=CONFIG) is None
    assert list(tmp_path.iterdir()) == []


def test_other_settings_are_refused_by_name(
    tmp_path: Path, make_trainer: Callable[..., Trainer]
) -> None:
    make_trainer(lora=True).save(tmp_path, state={}, config=CONFIG)
    changed = {"settings": {"learning_rate": 0.02, "keep": 3}, "data": "abc"}
    with pytest.raises(ConfigError, match=r"settings.learning_rate was 0.01, is 0.02; restore"):
        make_trainer(lora=True).resume(tmp_path, config=changed, may_differ=["settings.keep"])


def test_a_checkpoint_of_other_tensors_is_refused(
    tmp_path: Path, make_trainer: Callable[..., Trainer]
) -> None:
    make_trainer(lora=True).save(tmp_path, state={}, config=CONFIG)
    with pytest.raises(CheckpointError, match="28 trainable tensors and the model"):
        make_trainer(lora=False).resume(tmp_path, config=CONFIG)


def test_frozen_weights_have_a_fingerprint(make_trainer: Callable[..., Trainer]) -> None:
    model = make_trainer(lora=True).model
    before = checkpoint.fingerprint_frozen(model)
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.q_proj.lora_B.weight").add_(1.0)
    assert checkpoint.fingerprint_frozen(model) == before
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    assert checkpoint.fingerprint_frozen(model) != before
