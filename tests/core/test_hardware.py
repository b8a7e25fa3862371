from __future__ import annotations

from pathlib import Path

from lockstep import __version__
from lockstep.core.hardware import detect_hardware, detect_versions

CPUINFO = """\
processor\t: 0
model name\t: Test CPU 9000
flags\t\t: fpu sse2 avx2 fma avx512f avx512_bf16

processor\t: 1
model name\t: Another
flags\t\t: fpu
"""


def test_reads_what_linux_says(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    (tmp_path / "meminfo").write_text("MemTotal:       1024 kB\nMemFree:  1 kB\n")
    gpu = tmp_path / "driver" / "nvidia" / "gpus" / "0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   1\n")
    hardware = detect_hardware(proc=tmp_path)
    assert hardware.cpu_model == "Test CPU 9000"
    assert hardware.instruction_sets == ("avx2", "fma", "avx512f", "avx512_bf16")
    assert hardware.memory_bytes == 1024 * 1024
    assert hardware.gpus == ("NVIDIA H200",)
    assert hardware.num_cpus >= 1


def test_a_machine_that_says_nothing_is_described_all_the_same(tmp_path: Path) -> None:
    hardware = detect_hardware(proc=tmp_path)
    assert hardware.cpu_model
    assert hardware.instruction_sets == ()
    assert hardware.memory_bytes == 0
    assert hardware.gpus == ()


def test_versions_are_those_installed() -> None:
    versions = detect_versions()
    assert versions.lockstep == __version__
    assert versions.packages["torch"].startswith("2.")
