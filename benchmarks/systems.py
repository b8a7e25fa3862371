"""What is measured: each system, its worker, its virtual environment and what it calls a precision.

Peers' weights of a precision come from the same dequantised file; how each rounds them further is
its own (checkpoints.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from results import OURS
from workload import Case, Precision

ROOT = Path(__file__).parent.parent
WORK = ROOT / ".benchmarks"
_SAME: dict[Precision, str] = {"fp32": "fp32", "bf16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class System:
    """One column of the table."""

    name: str
    script: str
    venv: str | None
    """In .benchmarks/venvs, from the requirements in benchmarks/peers; None for our own."""
    formats: Mapping[Precision, str]
    """Its name for each precision it has, as its worker and checkpoints.py know it."""
    infers: bool = True
    trains: bool = False

    @property
    def python(self) -> Path:
        if self.venv is None:
            return Path(sys.executable)
        return WORK / "venvs" / self.venv / "bin/python"

    @property
    def is_installed(self) -> bool:
        return os.access(self.python, os.X_OK)

    def measures(self, case: Case) -> bool:
        return case.precision in self.formats and (self.trains if case.is_training else self.infers)


SYSTEMS = (
    System(
        name=OURS,
        script="ours_worker",
        venv=None,
        formats=_SAME | {"int8": "int8", "int4": "int4", "shipped": "shipped"},
        trains=True,
    ),
    System(
        name="llama.cpp",
        script="llama_cpp_worker",
        venv="llama_cpp",
        formats={
            "fp32": "F32",
            "bf16": "BF16",
            "int8": "Q8_0",
            "int4": "Q4_0",
            "shipped": "shipped",
        },
    ),
    System(
        name="OpenVINO",
        script="openvino_worker",
        venv="openvino",
        formats=_SAME | {"int8": "int8", "int4": "int4"},
    ),
    System(
        name="ONNX Runtime",
        script="onnxruntime_worker",
        venv="onnxruntime",
        formats={"int8": "int8", "int4": "int4"},
    ),
    System(name="vLLM", script="vllm_worker", venv="vllm", formats=_SAME),
    System(
        name="transformers",
        script="transformers_worker",
        venv="trl",
        formats=_SAME,
        trains=True,
    ),
    System(
        name="TRL",
        script="trl_worker",
        venv="trl",
        formats={"fp32": "fp32", "bf16": "mixed"},
        infers=False,
        trains=True,
    ),
    System(
        name="TRL, pure bf16",
        script="trl_worker",
        venv="trl",
        formats={"bf16": "pure"},
        infers=False,
        trains=True,
    ),
)

COLUMNS = tuple(system.name for system in SYSTEMS)


def systems_named(names: Sequence[str]) -> list[System]:
    """Ours and those peers; every peer if none is named."""
    known = {system.name.lower(): system for system in SYSTEMS}
    if unknown := [name for name in names if name.lower() not in known]:
        raise ValueError(f"no peer is named {unknown[0]!r}; there are {', '.join(known)}")
    wanted = {name.lower() for name in names} | {OURS.lower()}
    return [s for s in SYSTEMS if not names or s.name.lower() in wanted]
