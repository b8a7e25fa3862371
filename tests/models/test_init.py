from __future__ import annotations

import subprocess
import sys

import pytest

import lockstep.models


def test_every_public_name_is_there() -> None:
    assert list(lockstep.models.__all__) == sorted(lockstep.models.__all__)
    for name in lockstep.models.__all__:
        assert getattr(lockstep.models, name).__name__ == name


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        lockstep.models.nonsense  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, lockstep.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
