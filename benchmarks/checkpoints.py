"""Each peer's file or folder of a model at a precision, made once under .benchmarks/models.

All start from the Hugging Face folder or GGUF file that `lockstep fetch` leaves, whose weights are
the shipped file's, dequantised to fp32. Each peer's own converter rounds them further:

    llama.cpp      F32 and BF16 by expand_gguf.py; Q8_0 and Q4_0 by llama.cpp's quantiser
    OpenVINO       optimum-cli; fp32 also serves bf16, which is a matter of the inference hint
    ONNX Runtime   its model builder
    the others     read the Hugging Face folder
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from expand_gguf import expand_gguf
from systems import ROOT, WORK, System
from workload import Precision

from lockstep.models.fetch import fetch_gguf, fetch_model

HERE = Path(__file__).parent
GROUP_SIZE = 64
"""Of OpenVINO's 4-bit weights; its default of 128 does not divide SmolLM2's rows of 576."""


class ConversionError(RuntimeError):
    """A peer's converter failed."""


class Checkpoints:
    """The files of one model."""

    def __init__(self, model: str) -> None:
        self.folder = fetch_model(model, quiet=True)
        self.shipped = fetch_gguf(model, quiet=True)
        self._made = WORK / "models" / model

    def of(self, system: System, precision: Precision) -> Path:
        """Raises ConversionError."""
        kind = system.formats[precision]
        if kind == "shipped":
            return self.shipped
        if system.name == "llama.cpp":
            return self._gguf(system, kind)
        if system.name == "OpenVINO":
            return self._openvino(system, "fp32" if kind == "bf16" else kind)
        if system.name == "ONNX Runtime":
            return self._onnx(system, kind)
        return self.folder

    def _gguf(self, system: System, kind: str) -> Path:
        target = self._made / f"{kind}.gguf"
        if target.exists():
            return target
        if kind in ("F32", "BF16"):
            return expand_gguf(self.shipped, target, "fp32" if kind == "F32" else "bf16")
        source = self._gguf(system, "F32")
        partial = target.with_suffix(".partial")
        command = [str(system.python), str(HERE / "quantize_gguf.py")]
        _run([*command, str(source), str(partial), kind], log=f"convert-{kind}")
        return partial.rename(target)

    def _openvino(self, system: System, kind: str) -> Path:
        options = ["--weight-format", kind]
        if kind == "int4":
            options += ["--group-size", str(GROUP_SIZE), "--ratio", "1.0"]
        command = [str(system.python.parent / "optimum-cli"), "export", "openvino"]
        command += ["--model", str(self.folder), "--task", "text-generation-with-past", *options]
        return self._folder(f"openvino-{kind}", command=command)

    def _onnx(self, system: System, kind: str) -> Path:
        command = [str(system.python), "-m", "onnxruntime_genai.models.builder"]
        command += ["-m", str(self.folder), "-p", kind, "-e", "cpu", "-o"]
        return self._folder(f"onnx-{kind}", command=command)

    def _folder(self, name: str, *, command: Sequence[str]) -> Path:
        """What a command leaves in the folder that is its last argument."""
        target = self._made / name
        if not target.exists():
            partial = self._made / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            self._made.mkdir(parents=True, exist_ok=True)
            _run([*command, str(partial)], log=f"convert-{name}")
            partial.rename(target)
        return target


def _run(command: Sequence[str], *, log: str) -> None:
    path = WORK / f"logs/{log}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with path.open("w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, check=False
        )
    if done.returncode != 0:
        last = path.read_text().strip().splitlines()[-1:] or ["it said nothing"]
        raise ConversionError(f"{command[0]} ended with {done.returncode}: {last[0]} (see {path})")
