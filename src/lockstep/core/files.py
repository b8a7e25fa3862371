"""Crash-safe file writing: a temporary file in the same folder, fsync, rename, fsync of the folder.

A reader therefore sees the old content or the new, never half of one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` with `data` atomically, making its folder if need be."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Indented JSON with a closing newline; keys keep their order."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to fill; on success it is synced and renamed to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _sync(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; on success it is synced and renamed to `path`.

    An existing `path` is moved aside first and removed last, so a crash leaves the old or the new
    one (or, between two renames, both under a hidden name), never a mixture.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    old = temporary.with_suffix(".old")
    try:
        yield temporary
        for file in temporary.rglob("*"):
            _sync(file)
        temporary.chmod(0o755)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(root: Path) -> None:
    """Remove what killed processes had begun to write under `root`, where no other process writes.

    A new folder whose old one was already moved aside stays: it may be the only whole one.
    """
    for temporary in [*root.rglob(".*.tmp")]:
        if temporary.is_file():
            temporary.unlink()
        elif temporary.is_dir() and not temporary.with_suffix(".old").exists():
            shutil.rmtree(temporary)


def sha256_of(path: Path, *, on_bytes: Callable[[int], None] | None = None) -> str:
    """Hex sha256 of a file, read in 1 MiB pieces; `on_bytes` hears of each piece."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
            if on_bytes:
                on_bytes(len(piece))
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
