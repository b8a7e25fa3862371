"""Every kernel has a case in tests/native for `make sanitize`; checked here without building."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.kernels import native_library

ROOT = Path(__file__).parents[2]


def test_every_kernel_has_a_native_case():
    header = Path(native_library.__file__).parent / "native" / "lockstep_native.h"
    listed = re.search(r"#define LS_KERNELS\(X\)((?:.*\\\n)*.*)", header.read_text())
    assert listed
    kernels = set(re.findall(r"X\((\w+)\)", listed[1]))
    sources = "".join(file.read_text() for file in (ROOT / "tests" / "native").glob("*.cpp"))
    assert kernels
    assert kernels == set(re.findall(r"^void case_(\w+)\(Run& run\) \{", sources, re.MULTILINE))
