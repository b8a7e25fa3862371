"""Supervised fine-tuning, from a model and a file of records to weights that others can load.

    run folder/
        config.json, environment.json, metrics.jsonl
        checkpoints/checkpoint-<step>/     what resuming continues from, to the same bits
        adapter/                           the LoRA adapter, in PEFT's format
        model/                             the whole model (merged), as a Hugging Face folder

The loss is the mean over the loss tokens of the global batch: gradient accumulation changes the
memory a step needs, not what it computes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.errors import ConfigError
from lockstep.core.progress import Progress
from lockstep.core.run_folder import RunFolder, as_json
from lockstep.models.loading import LoadedModel, load_model
from lockstep.models.lora import apply_lora
from lockstep.train.checkpoint import fingerprint_frozen
from lockstep.train.config import SFTConfig, keys_that_may_differ
from lockstep.train.dataset import Dataset, load_dataset
from lockstep.train.export import TrainedModel, export_trained
from lockstep.train.masks import RecordTokenizer
from lockstep.train.memory import TrainingMemory, estimate_memory
from lockstep.train.order import DataOrder
from lockstep.train.packing import pack, total_weight
from lockstep.train.step import evaluate_loss, negative_log_likelihood
from lockstep.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class SFTResult:
    """What a finished run left; paths are inside its folder."""

    num_steps: int
    num_tokens: int
    final_loss: float | None
    """Loss of the last step; None when a resumed run had nothing left to do."""
    final_eval_loss: float | None
    model_folder: Path
    adapter_folder: Path | None


class SFTRun:
    """A run that is ready to start: the model is loaded, the data tokenised, nothing written."""

    def __init__(self, config: SFTConfig) -> None:
        self.config = config
        self.loaded = _load_trainable(config)
        tokenizer = RecordTokenizer(
            self.loaded.tokenizer, eos_token_ids=self.loaded.config.eos_token_ids
        )
        self.dataset = load_dataset(config.data.data, tokenizer, config.data)
        self.eval_dataset: Dataset | None = None
        if config.data.eval_data is not None:
            self.eval_dataset = load_dataset(config.data.eval_data, tokenizer, config.data)
        self._order = DataOrder(
            num_documents=len(self.dataset.documents),
            batch_size=config.loop.global_batch_size,
            seed=config.loop.seed,
        )
        self.num_steps = config.loop.epochs * self._order.batches_per_epoch
        if config.loop.max_steps is not None:
            self.num_steps = min(self.num_steps, config.loop.max_steps)
        self._trainer = Trainer(
            self.loaded.model,
            optimizer=config.optimizer,
            schedule=config.schedule,
            num_steps=self.num_steps,
        )
        self._num_tokens = 0

    def describe(self) -> list[str]:
        """What the run will do, in lines for the user."""
        weights = list(self.loaded.model.parameters())
        trainable = sum(weight.numel() for weight in weights if weight.requires_grad)
        total = sum(weight.numel() for weight in weights)
        data, loop = self.dataset, self.config.loop
        lines = [
            f"model: {self.loaded.name}, {_method(self.config)}, "
            f"{trainable:,} of {total:,} parameters trainable, {self.config.precision} compute",
            f"data: {data.num_records:,} records, {len(data.documents):,} documents, "
            f"{data.num_tokens:,} tokens, {data.num_loss_tokens:,} with loss",
            f"steps: {self.num_steps:,} of {loop.global_batch_size} documents, "
            f"micro-batches of at most {loop.micro_batch_tokens:,} tokens",
            f"memory: about {self._memory().total / 2**30:.1f} GiB",
        ]
        if data.num_truncated or data.num_dropped:
            lines.insert(
                2,
                f"data: {data.num_truncated:,} documents cut to {self.config.data.max_length:,} "
                f"tokens, {data.num_dropped:,} left out (too long, or nothing left to learn)",
            )
        return lines

    def train(self, *, resume: bool = False, progress: Progress | None = None) -> SFTResult:
        """Train to the end, and export. `resume` continues a run that stopped, wherever it did."""
        progress = progress or Progress(quiet=True)
        with RunFolder(self.config.out) as folder:
            self._open(folder, resume=resume, progress=progress)
            bar = progress.add("SFT", total=self.num_steps - self._trainer.step, unit="steps")
            row: dict[str, Any] = {}
            while self._trainer.step < self.num_steps:
                row = self._step()
                folder.append_metrics(row)
                if self._is_due(self.config.loop.save_every):
                    self._save()
                bar.advance(note=_note(row))
            bar.finish()
        return self._export(row)

    def _step(self) -> dict[str, Any]:
        """One optimizer step and its row of metrics, under TRL's names where they have one."""
        started_s = time.perf_counter()
        learning_rate = self._trainer.learning_rate
        batch = [self.dataset.documents[index] for index in self._order.next_batch()]
        micro_batches = pack(batch, max_tokens=self.config.loop.micro_batch_tokens)
        metrics = self._trainer.update(
            micro_batches, negative_log_likelihood, normaliser=total_weight(micro_batches)
        )
        self._num_tokens += metrics.num_tokens
        step_time_s = time.perf_counter() - started_s
        row = {
            "step": self._trainer.step,
            "epoch": self._order.epoch + self._order.cursor / self._order.num_documents,
            "loss": metrics.loss,
            "grad_norm": metrics.grad_norm,
            "learning_rate": learning_rate,
            "entropy": metrics.sums["entropy"] / metrics.num_loss_tokens,
            "num_tokens": self._num_tokens,
            "step_time": step_time_s,
            "tokens_per_second": metrics.num_tokens / step_time_s,
        }
        if self.eval_dataset is not None and self._is_due(self.config.loop.eval_every):
            row["eval_loss"] = self._eval_loss(self.eval_dataset)
        return row

    def _eval_loss(self, dataset: Dataset) -> float:
        micro_batches = pack(dataset.documents, max_tokens=self.config.loop.micro_batch_tokens)
        return evaluate_loss(self.loaded.model, micro_batches, negative_log_likelihood)

    def _is_due(self, every: int) -> bool:
        return self._trainer.step % every == 0 or self._trainer.step == self.num_steps

    def _open(self, folder: RunFolder, *, resume: bool, progress: Progress) -> None:
        """Start a new run in `folder`, or go to where the last checkpoint of this one left off."""
        checkpoints = folder.path / "checkpoints"
        if folder.config_path.exists() and not resume:
            raise ConfigError(
                f"{folder.path} already holds a run; pass --resume to continue it, or another --out"
            )
        state = self._trainer.resume(
            checkpoints,
            config=self._identity(),
            may_differ=keys_that_may_differ(self.config),
            on_message=progress.say,
        )
        if state is not None:
            self._order.restore(state["order"])
            self._num_tokens = state["num_tokens"]
            progress.say(f"resuming after step {self._trainer.step}")
        folder.rewind(before_step=self._trainer.step + 1 if state else 0)
        folder.write_config(self.config)
        folder.write_environment()
        if state is None and self.eval_dataset is not None:
            folder.append_metrics({"step": 0, "eval_loss": self._eval_loss(self.eval_dataset)})

    def _save(self) -> None:
        self._trainer.save(
            self.config.out / "checkpoints",
            state={"order": self._order.state(), "num_tokens": self._num_tokens},
            config=self._identity(),
            keep=self.config.loop.keep,
        )

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be one of this run."""
        return {
            "settings": as_json(self.config),
            "data_sha256": self.dataset.fingerprint(),
            "frozen_weights_sha256": fingerprint_frozen(self.loaded.model),
        }

    def _export(self, last_row: dict[str, Any]) -> SFTResult:
        trained = TrainedModel(loaded=self.loaded, lora=self.config.lora)
        folders = export_trained(trained, self.config.out, quiet=True)
        return SFTResult(
            num_steps=self._trainer.step,
            num_tokens=self._num_tokens,
            final_loss=last_row.get("loss"),
            final_eval_loss=last_row.get("eval_loss"),
            model_folder=folders.model,
            adapter_folder=folders.adapter,
        )

    def _memory(self) -> TrainingMemory:
        return estimate_memory(
            self.loaded.model,
            self.loaded.config,
            compute_dtype=self.loaded.model.compute_dtype,
            micro_batch_tokens=self.config.loop.micro_batch_tokens,
            activation_checkpointing=self.config.loop.activation_checkpointing,
            recompute_mlp=self.config.loop.recompute_mlp,
        )


def _load_trainable(config: SFTConfig) -> LoadedModel:
    """The model with exactly those parameters trainable that the run trains, in fp32."""
    loaded = load_model(
        config.model,
        precision=config.precision,
        weights=config.quantization,
        master_weights=config.lora is None,
    )
    if config.lora is not None:
        apply_lora(loaded.model, config.lora, seed=config.loop.seed)
    loaded.model.activation_checkpointing = config.loop.activation_checkpointing
    loaded.model.recompute_mlp(config.loop.recompute_mlp)
    return loaded


def _method(config: SFTConfig) -> str:
    if config.lora is None:
        return "full fine-tuning"
    return f"LoRA r={config.lora.r} alpha={config.lora.alpha:g} on {', '.join(config.lora.targets)}"


def _note(row: dict[str, Any]) -> str:
    note = f"loss {row['loss']:.4f}, {row['tokens_per_second']:,.0f} tokens/s"
    return f"{note}, eval loss {row['eval_loss']:.4f}" if "eval_loss" in row else note
