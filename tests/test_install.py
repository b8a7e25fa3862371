"""What `pip install` makes of the repository, with a C++ compiler and without one."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = "lockstep/kernels/liblockstep_native.so"


def build_wheel(folder: Path, environment: dict[str, str]) -> zipfile.ZipFile:
    """The wheel of this repository, built by pip as a user's machine would."""
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--wheel-dir"]
    done = subprocess.run(
        [*command, str(folder)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.startswith("lockstep_llm-")
    assert "-py3-none-linux_" in wheel.name
    return zipfile.ZipFile(wheel)


def test_cmake_configures_without_a_compiler_and_says_what_follows(tmp_path: Path) -> None:
    cmake = Path(sys.executable).with_name("cmake")
    done = subprocess.run(
        [cmake, "-S", ROOT, "-B", tmp_path, "-G", "Ninja"],
        env=os.environ
        | {"CXX": "/nonexistent/c++", "PATH": f"{cmake.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "No working C++ compiler" in done.stderr
    assert "lockstep_native" not in (tmp_path / "build.ninja").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_holds_the_library_and_no_sources(tmp_path: Path) -> None:
    names = build_wheel(tmp_path, {}).namelist()
    assert LIBRARY in names
    assert not [name for name in names if name.endswith((".cpp", ".h"))]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_compiler_the_wheel_still_builds(tmp_path: Path) -> None:
    names = build_wheel(tmp_path, {"CXX": "/nonexistent/c++"}).namelist()
    assert LIBRARY not in names
    assert "lockstep/kernels/__init__.py" in names
