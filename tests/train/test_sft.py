"""The whole of `lockstep sft` on a tiny model: it learns, and leaves what it says it leaves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.cli.main import run as run_command
from lockstep.core.errors import CheckpointError, ConfigError
from lockstep.core.run_folder import read_metrics
from lockstep.models.export import load_adapter_weights, read_adapter_config, save_hf_folder
from lockstep.models.llama import Llama
from lockstep.models.loading import load_model
from lockstep.models.lora import LoraConfig, apply_lora
from lockstep.train.config import (
    DataConfig,
    LoopConfig,
    OptimizerConfig,
    ScheduleConfig,
    SFTConfig,
)
from lockstep.train.export import export_trained, load_trained
from lockstep.train.order import DataOrder
from lockstep.train.packing import pack
from lockstep.train.sft import SFTRun
from lockstep.train.step import target_statistics


@pytest.fixture
def config(tmp_path: Path, model_folder: Path, data_file: Path) -> SFTConfig:
    """Full fine-tuning in fp32, six steps an epoch."""
    return SFTConfig(
        model=str(model_folder),
        out=tmp_path / "run",
        data=DataConfig(data=data_file, max_length=64),
        loop=LoopConfig(epochs=2, global_batch_size=2, micro_batch_tokens=64, save_every=4),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        schedule=ScheduleConfig(lr_schedule="constant", warmup_steps=2),
        lora=None,
        precision="fp32",
    )


def logprobs_of_answers(model: Llama, run: SFTRun) -> torch.Tensor:
    (batch,) = pack(run.dataset.documents, max_tokens=10_000)
    with torch.no_grad():
        return target_statistics(model, batch).logprobs_T


@pytest.mark.parametrize(("lora", "left"), [(None, 0.3), (LoraConfig(r=8), 0.7)])
def test_it_learns_the_answers_by_heart_and_exports_what_it_learned(
    config: SFTConfig, lora: LoraConfig | None, left: float
) -> None:
    loop = dataclasses.replace(config.loop, epochs=20, global_batch_size=12, save_every=100)
    run = SFTRun(dataclasses.replace(config, lora=lora, loop=loop))
    before = logprobs_of_answers(run.loaded.model, run)
    result = run.train()
    rows = read_metrics(config.out / "metrics.jsonl")
    assert rows[0]["loss"] == pytest.approx(-before.mean().item(), rel=1e-4)
    assert rows[-1]["loss"] < left * rows[0]["loss"]
    exported = load_model(result.model_folder, precision="fp32", quiet=True).model
    after = logprobs_of_answers(exported, run)
    torch.testing.assert_close(after, logprobs_of_answers(run.loaded.model, run))
    assert after.mean() > left * before.mean()


def test_lora_changes_its_adapters_only_and_exports_them(config: SFTConfig) -> None:
    lora = LoraConfig(r=2, alpha=6.0, targets=("q_proj", "up_proj"))
    run = SFTRun(dataclasses.replace(config, lora=lora))
    result = run.train()
    saved = load_file(config.out / "checkpoints" / "checkpoint-12" / "parameters.safetensors")
    assert len(saved) == 2 * 2 * 2  # layers, targets, A and B
    assert all(".lora_" in name for name in saved)
    # The adapter is to the bit what was trained, and the base is to the bit what it was.
    assert result.adapter_folder is not None
    adapted = load_model(config.model, precision="fp32", quiet=True).model
    apply_lora(adapted, read_adapter_config(result.adapter_folder)[0])
    load_adapter_weights(adapted, result.adapter_folder)
    assert all(torch.equal(adapted.get_parameter(name), saved[name]) for name in saved)
    base = load_model(config.model, precision="fp32", quiet=True).model
    for name, merged in run.loaded.model.named_parameters():
        difference = merged - base.get_parameter(name)
        path = name.removesuffix(".weight")
        if f"{path}.lora_A.weight" in saved:
            product = saved[f"{path}.lora_B.weight"] @ saved[f"{path}.lora_A.weight"]
            torch.testing.assert_close(difference, product * 3.0, atol=1e-6, rtol=1e-3)
        else:
            assert not difference.any(), name
    torch.testing.assert_close(
        logprobs_of_answers(adapted, run), logprobs_of_answers(run.loaded.model, run)
    )


def test_the_loss_curve_is_that_of_a_plain_loop_in_transformers(config: SFTConfig) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.0, weight_decay=0.0)
    run = SFTRun(config)
    order = DataOrder(num_documents=12, batch_size=2, seed=0)
    losses = []
    for step in range(12):
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        documents = [run.dataset.documents[index] for index in order.next_batch()]
        loss = torch.zeros(())
        for document in documents:
            tokens = torch.tensor(document.token_ids)[None].long()
            weights = torch.tensor(document.loss_weights)[1:]
            logits = theirs(tokens).logits[0, :-1]
            per_token = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
            loss = loss + (per_token * weights).sum()
        loss = loss / sum(document.num_loss_tokens for document in documents)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    run.train()
    ours = [row["loss"] for row in read_metrics(config.out / "metrics.jsonl")]
    assert ours == pytest.approx(losses, rel=2e-3)


def test_a_run_folder_tells_all(config: SFTConfig, data_file: Path) -> None:
    data = dataclasses.replace(config.data, eval_data=data_file)
    loop = dataclasses.replace(config.loop, eval_every=5)
    run = SFTRun(dataclasses.replace(config, data=data, loop=loop))
    text = "\n".join(run.describe())
    assert "full fine-tuning, 27,296 of 27,296 parameters trainable" in text
    assert "12 records, 12 documents" in text
    result = run.train()
    rows = read_metrics(config.out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(13))
    assert [row["step"] for row in rows if "eval_loss" in row] == [0, 5, 10, 12]
    assert rows[-1]["eval_loss"] == result.final_eval_loss < rows[0]["eval_loss"]
    assert rows[-1]["num_tokens"] == result.num_tokens == 2 * run.dataset.num_tokens
    assert rows[-1]["epoch"] == 2.0
    assert [row["learning_rate"] for row in rows[1:4]] == [5e-3, 1e-2, 1e-2]
    assert rows[1]["entropy"] == pytest.approx(5.6, abs=0.5)  # ln 272: it knew nothing
    assert json.loads((config.out / "config.json").read_text())["loop"]["epochs"] == 2
    assert sorted(path.name for path in (config.out / "checkpoints").iterdir()) == [
        "checkpoint-12",
        "checkpoint-8",
    ]


def test_a_folder_that_holds_a_run_is_not_overwritten(config: SFTConfig) -> None:
    SFTRun(config).train()
    with pytest.raises(ConfigError, match="already holds a run; pass --resume"):
        SFTRun(config).train()
    again = SFTRun(config).train(resume=True)  # nothing left to do: exports once more
    assert (again.num_steps, again.final_loss) == (12, None)


def test_resuming_under_other_settings_is_refused_but_longer_at_a_constant_rate_is_not(
    config: SFTConfig, data_file: Path
) -> None:
    SFTRun(config).train()
    longer = dataclasses.replace(config, loop=dataclasses.replace(config.loop, epochs=3))
    assert SFTRun(longer).train(resume=True).num_steps == 18
    slower = dataclasses.replace(config, optimizer=OptimizerConfig(learning_rate=1e-3))
    with pytest.raises(ConfigError, match=r"settings.optimizer.learning_rate was 0.01, is 0.001"):
        SFTRun(slower).train(resume=True)
    data_file.write_text(data_file.read_text() + '{"text": "more"}\n')
    with pytest.raises(ConfigError, match="data_sha256 was"):
        SFTRun(longer).train(resume=True)


def test_a_micro_batch_must_hold_the_longest_document(config: SFTConfig) -> None:
    with pytest.raises(ConfigError, match="max_length=64 exceeds micro_batch_tokens=32"):
        dataclasses.replace(config, loop=LoopConfig(micro_batch_tokens=32))


def test_the_command_reads_a_file_of_settings_which_flags_override(
    tmp_path: Path, config: SFTConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "sft.toml"
    settings.write_text(
        f'model = "{config.model}"\ndata = "{config.data.data}"\nfull = true\nmax_steps = 9\n'
        'max_length = 64\nprecision = "fp32"\nlr_schedule = "linear"\n'
    )
    out = tmp_path / "from-command"
    arguments = ["--config", str(settings), "--out", str(out)]
    assert run_command(["sft", *arguments, "--max-steps", "1"]) == 0
    written = json.loads((out / "config.json").read_text())
    assert written["loop"]["max_steps"] == 1
    assert written["schedule"]["lr_schedule"] == "linear"
    assert written["lora"] is None
    assert f"model: {out / 'model'}" in capsys.readouterr().out
    settings.write_text("learning_speed = 3\n")
    with pytest.raises(ConfigError, match="learning_speed"):
        run_command(["sft", *arguments])


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2)])
def test_a_checkpoint_exports_to_the_same_weights_as_the_run(
    tmp_path: Path, config: SFTConfig, lora: LoraConfig | None
) -> None:
    result = SFTRun(dataclasses.replace(config, lora=lora)).train()
    checkpoint = config.out / "checkpoints" / "checkpoint-12"
    again = tmp_path / "again"
    assert run_command(["export", str(checkpoint), str(again), "--dtype", "float32"]) == 0
    for file in result.model_folder.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file
    folders = export_trained(load_trained(checkpoint), tmp_path / "both", quiet=True)
    assert (folders.adapter is None) == (lora is None)
    for file in (result.adapter_folder or result.model_folder).iterdir():
        copy = (folders.adapter or folders.model) / file.name
        assert copy.read_bytes() == file.read_bytes(), file


def test_a_checkpoint_does_not_export_onto_another_base(
    tmp_path: Path, config: SFTConfig, make_model: Callable[..., Llama]
) -> None:
    run = SFTRun(dataclasses.replace(config, lora=LoraConfig(r=2)))
    run.train()
    other = make_model()
    other.initialise(seed=1)
    save_hf_folder(
        other, Path(config.model), tokenizer=run.loaded.tokenizer, dtype="float32", quiet=True
    )
    with pytest.raises(CheckpointError, match="is not the model that"):
        load_trained(config.out / "checkpoints" / "checkpoint-12")
