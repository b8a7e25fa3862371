"""A tokenizer as GGUF metadata: the way back from `gguf_tokenizer`.

GGUF names a pre-tokenizer instead of describing it, so only those can be written whose name is
known: the split rules of a `tokenizer.json` are compared with those the names stand for.

Not done: SentencePiece vocabularies, whose scores a `tokenizer.json` no longer has.
"""

from __future__ import annotations

import json
from typing import Any

from lockstep.core.errors import CheckpointError
from lockstep.text.gguf_tokenizer import NORMALIZED_TO_NFC, PRE_TOKENIZERS, WHOLE_WORDS_FIRST
from lockstep.text.gguf_tokenizer import TokenType as Kind
from lockstep.text.tokenizer import Tokenizer

Json = dict[str, Any]

_CANDIDATES = ("smollm", "llama-bpe", "dbrx", "qwen2", "gpt-2")
"""One name for each set of rules, as llama.cpp spells it."""
_RULES = ("type", "pattern", "behavior", "invert", "individual_digits", "use_regex")
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_metadata(tokenizer: Tokenizer, vocab_size: int) -> Json:
    """`tokenizer.*` keys for a model of `vocab_size` embeddings. CheckpointError where GGUF has no
    name for how the tokenizer splits text.
    """
    whole = json.loads(tokenizer.files.tokenizer_json)
    model = whole.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise CheckpointError(
            f"a tokenizer of type {model.get('type')!r}"
            f"{' with byte fallback' if model.get('byte_fallback') else ''} cannot be written to "
            "GGUF yet, only byte-level BPE; use --format compressed-tensors"
        )
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [int(Kind.UNUSED)] * vocab_size
    for token, i in model["vocab"].items():
        tokens[i], kinds[i] = token, int(Kind.NORMAL)
    for added in whole.get("added_tokens") or []:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = int(Kind.CONTROL if added["special"] else Kind.USER_DEFINED)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges") or []]
    metadata: Json = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre_tokenizer_name(whole, model),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }
    for role, name in _ROLES.items():
        text = tokenizer.special_tokens.get(role)
        if text is not None and (token_id := tokenizer.token_id(text)) is not None:
            metadata[f"tokenizer.ggml.{name}_token_id"] = token_id
    for role in ("bos", "eos"):
        added_by_default = tokenizer.files.config.get(f"add_{role}_token")
        if isinstance(added_by_default, bool):
            metadata[f"tokenizer.ggml.add_{role}_token"] = added_by_default
    if tokenizer.files.chat_template is not None:
        metadata["tokenizer.chat_template"] = tokenizer.files.chat_template
    return metadata


def _pre_tokenizer_name(whole: Json, model: Json) -> str:
    steps = _steps(whole.get("pre_tokenizer"))
    is_nfc = _types(whole.get("normalizer")) == ["NFC"]
    ignores_merges = bool(model.get("ignore_merges"))
    for name in _CANDIDATES:
        if (
            _steps({"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[name]}) == steps
            and is_nfc == (name in NORMALIZED_TO_NFC)
            and ignores_merges == (name in WHOLE_WORDS_FIRST)
        ):
            return name
    raise CheckpointError(
        "GGUF has no name that we know for how this tokenizer splits text "
        f"({', '.join(_types(whole.get('pre_tokenizer'))) or 'no pre-tokenizer'}); "
        "use --format compressed-tensors"
    )


def _steps(pre_tokenizer: Json | None) -> list[Json]:
    """What decides where text is split, without what does not."""
    return [
        {key: step[key] for key in _RULES if key in step}
        for step in _flattened(pre_tokenizer, "pretokenizers")
    ]


def _types(part: Json | None) -> list[str]:
    return [step.get("type", "") for step in _flattened(part, "pretokenizers")]


def _flattened(part: Json | None, inner: str) -> list[Json]:
    if part is None:
        return []
    return list(part[inner]) if part.get("type") == "Sequence" and inner in part else [part]
