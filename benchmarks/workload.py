"""What every system is asked to do, and the text it is asked about. No third-party imports.

Prompts are windows of the repository's LICENSE: real text, the same at every commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "bf16", "q4_1"]

PREFILL_TOKENS = 512
DECODE_BATCHES = (1, 8, 32)
PROMPT_TOKENS = 128
GENERATED_TOKENS = 64
SFT_DOCUMENTS = 4
SFT_DOCUMENT_TOKENS = 512
LORA_RANK = 16
LORA_ALPHA = 32.0
LEARNING_RATE = 1e-4
SEED = 0

_PREFILL_STRIDE = 41
_DECODE_STRIDE = 61
_FIRST_OWN_TOKEN = 1000


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    kind: Literal["prefill", "decode", "lora", "full"]
    precision: Precision
    batch: int = 1

    @property
    def title(self) -> str:
        if self.kind == "prefill":
            return f"prefill, {PREFILL_TOKENS} tokens"
        if self.kind == "decode":
            return f"decode, {self.batch} stream{'s' if self.batch > 1 else ''}"
        method = f"LoRA r={LORA_RANK}" if self.kind == "lora" else "full"
        return f"SFT {method}, {SFT_DOCUMENTS} x {SFT_DOCUMENT_TOKENS}"

    @property
    def is_training(self) -> bool:
        return self.kind in ("lora", "full")


def inference_cases() -> list[Case]:
    """Q4_1 (the weights as shipped) is for information; 32 streams of it would take a minute."""
    cases = [
        case
        for precision in ("bf16", "fp32")
        for case in [
            Case(kind="prefill", precision=precision),
            *(Case(kind="decode", precision=precision, batch=batch) for batch in DECODE_BATCHES),
        ]
    ]
    shipped = [Case(kind="prefill", precision="q4_1")]
    shipped += [Case(kind="decode", precision="q4_1", batch=b) for b in DECODE_BATCHES if b < 32]
    return cases + shipped


def prefill_prompt(text: Sequence[int], serial: int) -> list[int]:
    """A prompt that shares no beginning with any other, so that no cache can help."""
    start = serial * _PREFILL_STRIDE % (len(text) - PREFILL_TOKENS)
    return [_FIRST_OWN_TOKEN + serial, *text[start : start + PREFILL_TOKENS - 1]]


def decode_prompts(text: Sequence[int], batch: int) -> list[list[int]]:
    """The first `batch` streams; the same in every round."""
    starts = [number * _DECODE_STRIDE for number in range(batch)]
    return [list(text[start : start + PROMPT_TOKENS]) for start in starts]


def sft_documents(text: Sequence[int]) -> list[list[int]]:
    size = SFT_DOCUMENT_TOKENS
    return [list(text[size * number : size * (number + 1)]) for number in range(SFT_DOCUMENTS)]
