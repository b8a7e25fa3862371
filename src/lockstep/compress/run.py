"""A compression from beginning to end: layer by layer, then the gate, then the folder in its place.

For each layer: read it; run the original on the held-out states; learn what enters its projections
from the calibration states, which come from layers already quantised, so that later layers see
the errors of earlier ones (Frantar et al. 2022); round; run the rounded layer on both sets of
states. In memory are one layer, its statistics and one sequence's activations; at the two ends the
token table. States lie on disk.

A crash leaves nothing under the name of the result. A model that fails the gate is kept, marked in
its report, and named in the error.
"""

from __future__ import annotations

import errno
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from lockstep.compress.compressed_tensors import CompressedTensorsWriter
from lockstep.compress.config import QuantizeConfig
from lockstep.compress.gate import Divergence, GateReport, LayerError, Logits
from lockstep.compress.gguf_writer import TABLE_SCHEME, GgufModelWriter
from lockstep.compress.layer_stream import HiddenStates, LayerRunner, read_layer
from lockstep.compress.methods import STORED, RoundedWeight, quantize_layer, quantize_nearest
from lockstep.compress.report import write_report
from lockstep.compress.rounded import round_layer
from lockstep.compress.statistics import collect
from lockstep.compress.texts import Texts, load_texts
from lockstep.compress.writers import WeightWriter
from lockstep.core.errors import CapacityError, CheckpointError, ConfigError
from lockstep.core.files import replacing_folder
from lockstep.core.progress import Progress
from lockstep.core.quantization import WeightScheme, parse_scheme
from lockstep.kernels import huge_pages
from lockstep.kernels.linear import PackCache, QuantizedWeight, Weight, linear
from lockstep.kernels.rms_norm import rms_norm
from lockstep.models.llama import Layer
from lockstep.models.loading import Checkpoint, open_checkpoint
from lockstep.models.resolve import resolve_model

COMPUTE = torch.bfloat16
"""What activations are in between projections, as when serving."""
TABLE, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished compression."""

    folder: Path
    gate: GateReport
    seconds: float
    peak_memory_bytes: int

    @property
    def passed(self) -> bool:
        return not self.gate.failures


@torch.no_grad()
def quantize(config: QuantizeConfig, *, quiet: bool = False) -> Outcome:
    """Compress a model into `config.out`, which must not exist or be empty."""
    check_out(config.out)
    checkpoint = open_checkpoint(resolve_model(config.model))
    if checkpoint.is_quantized:
        raise CheckpointError(
            f"the weights of {config.model} are quantised already, and rounding them again would "
            "add to their error; start from the float checkpoint they were made of"
        )
    texts = load_texts(config.data, checkpoint.tokenizer(), quiet=quiet)
    started = time.monotonic()
    with _full_disk_named(config.out), replacing_folder(config.out) as folder:
        with tempfile.TemporaryDirectory(prefix="states-", dir=folder) as states:
            gate = _Compression(config, checkpoint, texts, folder, Path(states)).run(quiet=quiet)
        outcome = Outcome(
            folder=config.out,
            gate=gate,
            seconds=time.monotonic() - started,
            peak_memory_bytes=_peak_memory_bytes(),
        )
        write_report(folder, config, outcome)
    return outcome


def check_out(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; choose another folder")


def written_scheme(config: QuantizeConfig) -> WeightScheme:
    """What weights are rounded to. GGUF alone is rounded to its own types, which err less."""
    scheme = config.scheme
    if config.format != "gguf":
        return scheme
    if scheme.bits == 8:
        return parse_scheme("q8_0")
    return parse_scheme("q4_0" if scheme.offset == "symmetric" else "q4_1")


class _Compression:
    """The state of one run: two or three sets of hidden states, and the writers."""

    def __init__(
        self,
        config: QuantizeConfig,
        checkpoint: Checkpoint,
        texts: Texts,
        folder: Path,
        scratch: Path,
    ) -> None:
        self._config, self._checkpoint, self._texts = config, checkpoint, texts
        self._scheme = written_scheme(config)
        self._runner = LayerRunner(checkpoint.config, config.data.sequence_length)
        self._scratch = scratch
        self._writers = self._open_writers(folder)

    def run(self, *, quiet: bool) -> GateReport:
        original, quantized, calibration = self._begin()
        errors = []
        with Progress(quiet=quiet) as progress:
            title = f"quantize to {self._scheme} by {self._config.method}"
            numbers = range(self._checkpoint.config.num_layers)
            for number in progress.track(numbers, title, total=len(numbers), unit="layers"):
                layer = read_layer(self._checkpoint, number)
                self._runner.advance(layer, original)
                rounded = self._round(layer, calibration)
                self._write_layer(number, layer, rounded)
                round_layer(layer, {name: r.weight for name, r in rounded.items()})
                if calibration is not None:
                    self._runner.advance(layer, calibration)
                self._runner.advance(layer, quantized)
                errors.append(_layer_error(number, original, quantized, rounded))
                huge_pages.trim_heap()  # else 25 MB of freed memory pile up with every layer
        return self._end(original, quantized, errors)

    def _begin(self) -> tuple[HiddenStates, HiddenStates, HiddenStates | None]:
        """The states that enter layer 0: of the original, the quantised, and for calibration."""
        table_VD = self._checkpoint.read(TABLE)
        rounded_VD = self._write_outer(TABLE, table_VD)
        held_out, texts = self._texts.held_out_SL, self._texts
        return (
            self._states("original", held_out, table_VD),
            self._states("quantized", held_out, rounded_VD),
            None
            if texts.calibration_SL is None
            else self._states("calibration", texts.calibration_SL, rounded_VD),
        )

    def _round(self, layer: Layer, calibration: HiddenStates | None) -> dict[str, RoundedWeight]:
        stats = None if calibration is None else collect(self._runner, layer, calibration)
        rounded = quantize_layer(
            layer,
            stats,
            scheme=self._scheme,
            method=self._config.method,
            damping=self._config.damping,
        )
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.copy_(parameter.to(STORED))
        return rounded

    def _end(
        self, original: HiddenStates, quantized: HiddenStates, errors: Sequence[LayerError]
    ) -> GateReport:
        norm_D = self._checkpoint.read(NORM).to(STORED)
        self._write(NORM, norm_D)
        is_tied = self._checkpoint.config.tie_embeddings
        head_VD = self._checkpoint.read(TABLE if is_tied else HEAD)
        if not is_tied:
            self._write_outer(HEAD, head_VD)
        for writer in self._writers:
            writer.finish()
        before, after = _head(head_VD, None), _head(head_VD, self._outer_scheme)
        eps = self._checkpoint.config.rms_norm_eps
        divergence = Divergence()
        for index, tokens_L in enumerate(self._texts.held_out_SL):
            divergence.add(
                rms_norm(original.x_SLD[index].clone(), norm_D, eps),
                rms_norm(quantized.x_SLD[index].clone(), norm_D, eps),
                tokens_L,
                logits_before=before,
                logits_after=after,
            )
        return divergence.report(
            text=self._texts.held_out_name,
            max_perplexity_increase=self._config.max_perplexity_increase,
            limits=self._config.limits,
            layers=errors,
        )

    @property
    def _outer_scheme(self) -> WeightScheme | None:
        """Of token table and last projection; None leaves them in bf16."""
        return parse_scheme(TABLE_SCHEME) if self._config.format == "gguf" else None

    def _states(self, name: str, tokens_SL: Tensor, table_VD: Tensor) -> HiddenStates:
        return HiddenStates.of_tokens(self._scratch / name, tokens_SL, table_VD, COMPUTE)

    def _open_writers(self, folder: Path) -> list[WeightWriter]:
        config, checkpoint = self._config, self._checkpoint
        writers: list[WeightWriter] = []
        if config.format != "gguf":
            writers.append(CompressedTensorsWriter(folder, checkpoint, self._scheme))
        if config.format != "compressed-tensors":
            path = folder / "model.gguf"
            names = _names_in_order(checkpoint)
            writers.append(GgufModelWriter(path, checkpoint, self._scheme, names))
        return writers

    def _write(self, name: str, value: Tensor | QuantizedWeight) -> None:
        for writer in self._writers:
            writer.add(name, value)

    def _write_outer(self, name: str, tensor_VD: Tensor) -> Tensor:
        """Write the token table or last projection; what it is worth in the result."""
        for writer in self._writers:
            if isinstance(writer, GgufModelWriter):
                writer.add(name, quantize_nearest(tensor_VD, parse_scheme(TABLE_SCHEME)))
            else:
                writer.add(name, tensor_VD)
        return _rounded(tensor_VD, self._outer_scheme)

    def _write_layer(self, number: int, layer: Layer, rounded: dict[str, RoundedWeight]) -> None:
        for name, parameter in layer.named_parameters():
            module = name.removesuffix(".weight")
            value = rounded[module].weight if module in rounded else parameter.data
            self._write(f"model.layers.{number}.{name}", value)


def _head(weight_VD: Tensor, scheme: WeightScheme | None) -> Logits:
    """The last projection as it is served."""
    weight: Weight = weight_VD if scheme is None else quantize_nearest(weight_VD, scheme)
    packs = PackCache()
    return lambda x_TD: linear(x_TD, weight, packs=packs, fp32_out=True)


def _rounded(tensor_VD: Tensor, scheme: WeightScheme | None) -> Tensor:
    return tensor_VD if scheme is None else quantize_nearest(tensor_VD, scheme).dequantize()


def _names_in_order(checkpoint: Checkpoint) -> Iterator[str]:
    """The tensors of a model in the order they are written in."""
    config = checkpoint.config
    yield TABLE
    for number in range(config.num_layers):
        with torch.device("meta"):
            names = [name for name, _ in Layer(config, number).named_parameters()]
        yield from (f"model.layers.{number}.{name}" for name in names)
    yield NORM
    if not config.tie_embeddings:
        yield HEAD


def _layer_error(
    number: int,
    original: HiddenStates,
    quantized: HiddenStates,
    rounded: dict[str, RoundedWeight],
) -> LayerError:
    difference = whole = 0.0
    for before, after in zip(original.x_SLD, quantized.x_SLD, strict=True):
        difference += float((after.float() - before.float()).square().sum())
        whole += float(before.float().square().sum())
    return LayerError(
        layer=number,
        output_error=(difference / whole) ** 0.5 if whole else 0.0,
        projections={name: r.relative_error for name, r in rounded.items()},
    )


def _peak_memory_bytes() -> int:
    """Of this process so far. Linux counts kilobytes, macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def _full_disk_named(out: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not _is_full_disk(error):
            raise
        raise CapacityError(
            f"the disk that holds {out} is full; nothing was left there. Free some space, or "
            "choose another --out"
        ) from error


def _is_full_disk(error: OSError | SafetensorError) -> bool:
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        return error.errno in full
    return any(f"(os error {number})" in str(error) for number in full)  # all that it tells
