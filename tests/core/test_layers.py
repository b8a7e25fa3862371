"""What importing costs, and that no torch-free layer pulls torch in through an outside package.

import-linter (`make check`) proves the layers' own imports; it cannot see what other packages
import.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORT_EVERY_MODULE = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
assert "torch" not in sys.modules, "torch was imported"
"""


@pytest.mark.parametrize("layer", ["core", "text", "schedule", "evaluate"])
def test_torch_free_layer_imports_no_torch(layer: str) -> None:
    command = [sys.executable, "-c", IMPORT_EVERY_MODULE, f"lockstep.{layer}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_nothing_else() -> None:
    program = (
        "import sys; before = set(sys.modules); import lockstep\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["lockstep"]
