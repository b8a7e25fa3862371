"""What a result was computed on: processor, memory, and the versions of what computed it.

Read from the operating system and package metadata alone, so it costs milliseconds and imports no
torch. Accelerators are therefore named only by what their driver says in /proc.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lockstep import __version__

# The instruction sets our kernels are compiled for or may want next, as Linux spells them.
INSTRUCTION_SETS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "sve",
)
PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "reasoning-gym")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One machine. `num_cpus` counts what this process may use, not what the machine has."""

    cpu_model: str
    architecture: str
    num_cpus: int
    instruction_sets: tuple[str, ...]
    memory_bytes: int
    gpus: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The software behind a result; a package that is not installed has no entry."""

    lockstep: str
    python: str
    operating_system: str
    packages: dict[str, str]


def detect_hardware(proc: Path = Path("/proc")) -> Hardware:
    """Describe this machine; `proc` is where Linux keeps what it knows of itself."""
    cpu = _first_record(proc / "cpuinfo")
    flags = set((cpu.get("flags") or cpu.get("Features") or "").split())
    return Hardware(
        cpu_model=cpu.get("model name") or platform.processor() or "unknown",
        architecture=platform.machine(),
        num_cpus=len(os.sched_getaffinity(0)),
        instruction_sets=tuple(name for name in INSTRUCTION_SETS if name in flags),
        memory_bytes=_memory_bytes(proc),
        gpus=_gpus(proc),
    )


def detect_versions() -> Versions:
    """The versions of Lockstep, Python and the packages whose code shapes a result."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Versions(
        lockstep=__version__,
        python=platform.python_version(),
        operating_system=platform.platform(),
        packages=packages,
    )


def _first_record(path: Path) -> dict[str, str]:
    """The `key : value` lines of a /proc file, up to its first empty line."""
    if not path.is_file():
        return {}
    record = {}
    for line in path.read_text().splitlines():
        if not line.strip():
            break
        key, _, value = line.partition(":")
        record[key.strip()] = value.strip()
    return record


def _memory_bytes(proc: Path) -> int:
    total_kib = _first_record(proc / "meminfo").get("MemTotal", "0 kB").split()[0]
    return int(total_kib) * 1024


def _gpus(proc: Path) -> tuple[str, ...]:
    records = sorted((proc / "driver/nvidia/gpus").glob("*/information"))
    return tuple(_first_record(path).get("Model", "unknown GPU") for path in records)
