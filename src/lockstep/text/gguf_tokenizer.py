"""A `tokenizer.json` out of a GGUF file's metadata.

GGUF stores the vocabulary and the *name* of the pre-tokenizer (`tokenizer.ggml.pre`); what the
name stands for is knowledge, written down here as the split rules of the models' own
`tokenizer.json` files. A pre-tokenizer we do not know is an error: guessing would give a model
that almost works.

Not done: WordPiece (BERT), Unigram (T5) and RWKV vocabularies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from lockstep.core.errors import CheckpointError
from lockstep.text.token_bytes import SPACE_MARK
from lockstep.text.tokenizer import TokenizerFiles

Json = dict[str, Any]

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _byte_level(*, split_by_rule: bool) -> Json:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": split_by_rule,
    }


def _split_by(pattern: str) -> list[Json]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return [split, _byte_level(split_by_rule=False)]


_GPT2_STEPS = [_byte_level(split_by_rule=True)]
_DIGIT_STEPS = [{"type": "Digits", "individual_digits": True}, *_GPT2_STEPS]

PRE_TOKENIZERS: Mapping[str, list[Json]] = {
    "gpt-2": _GPT2_STEPS,
    "default": _GPT2_STEPS,
    "smollm": _DIGIT_STEPS,
    "starcoder": _DIGIT_STEPS,
    "refact": _DIGIT_STEPS,
    "llama-bpe": _split_by(_LLAMA3),
    "llama3": _split_by(_LLAMA3),
    "llama-v3": _split_by(_LLAMA3),
    "smaug-bpe": _split_by(_LLAMA3),
    "dbrx": _split_by(_LLAMA3),
    "qwen2": _split_by(_QWEN2),
    "deepseek-r1-qwen": _split_by(_QWEN2),
}
NORMALIZED_TO_NFC = {"qwen2", "deepseek-r1-qwen"}
WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3"}
"""A piece that is in the vocabulary is one token, whatever the merges say."""


def tokenizer_files(metadata: Mapping[str, Any]) -> TokenizerFiles:
    """Build the tokenizer of a GGUF file. Raises CheckpointError, naming what is missing or not
    supported.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = _list_of(str, metadata, "tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens lists a token twice; the file is damaged")
    types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    if model == "gpt2":
        parts = _byte_level_parts(metadata, tokens, types)
    elif model == "llama":
        parts = _sentencepiece_parts(metadata, tokens, types)
    else:
        raise CheckpointError(
            f"tokenizer.ggml.model is {model!r}; supported are 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece BPE)"
        )
    roles = _special_roles(metadata, tokens)
    adds_bos = model == "llama" or metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS_FIRST
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    whole: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        **parts,
        "post_processor": _post_processor(
            tokens,
            before=roles.get("bos_token") if add_bos else None,
            after=roles.get("eos_token") if add_eos else None,
        ),
    }
    template = metadata.get("tokenizer.chat_template")
    return TokenizerFiles(
        tokenizer_json=json.dumps(whole, ensure_ascii=False, indent=1),
        config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": add_bos,
            "add_eos_token": add_eos,
            **roles,
            "clean_up_tokenization_spaces": False,
            **_context_length(metadata),
        },
        chat_template=template if isinstance(template, str) else None,
    )


def _byte_level_parts(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> Json:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    # Unused entries ("[PAD151936]") only fill the table up to the embedding's size.
    vocabulary = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != TokenType.UNUSED
    }
    merges = []
    for merge in _list_of(str, metadata, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space or not {left, right, left + right} <= vocabulary.keys():
            raise CheckpointError(
                f"tokenizer.ggml.merges joins {merge!r}, which the vocabulary does not have"
            )
        merges.append([left, right])
    return {
        "normalizer": {"type": "NFC"} if name in NORMALIZED_TO_NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[name]},
        "decoder": _byte_level(split_by_rule=True),
        "model": _bpe(vocabulary, merges, ignore_merges=name in WHOLE_WORDS_FIRST),
    }


def _sentencepiece_parts(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> Json:
    """SentencePiece joins, again and again, the pair that makes the piece of the highest score.

    Which is BPE, with every way to cut a piece in two as a merge, ranked by the piece's score.
    """
    scores = _list_of(float, metadata, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    ranked = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind != TokenType.NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, vocabulary[left], vocabulary[right], [left, right]))
    ranked.sort()
    unknown = _token_of(metadata, "unknown", tokens)
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    prepend = [{"type": "Prepend", "prepend": SPACE_MARK}] if has_prefix else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    restore = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": _bpe(
            vocabulary,
            [merge for *_, merge in ranked],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _bpe(vocabulary: Mapping[str, int], merges: list[list[str]], **options: Any) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocabulary,
        "merges": merges,
    }


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[Json]:
    """Tokens found in text before any other rule; all but the user's own are special."""
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != TokenType.USER_DEFINED,
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN) and token
    ]


def _post_processor(tokens: Sequence[str], *, before: str | None, after: str | None) -> Json | None:
    if before is None and after is None:
        return None
    added = [token for token in (before, after) if token is not None]
    text: Json = {"Sequence": {"id": "A", "type_id": 0}}
    start = [{"SpecialToken": {"id": before, "type_id": 0}}] if before is not None else []
    end = [{"SpecialToken": {"id": after, "type_id": 0}}] if after is not None else []
    second: Json = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [*start, text, *end],
        "pair": [*start, text, *end, *start, second, *end],
        "special_tokens": {
            token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in added
        },
    }


def _special_roles(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {f"{role}_token": _token_of(metadata, name, tokens) for name, role in names.items()}
    return {role: token for role, token in found.items() if token is not None}


def _token_of(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> str | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.get(key)
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise CheckpointError(f"{key} is {token_id!r}; the vocabulary has {len(tokens)} tokens")
    return tokens[token_id]


def _list_of(kind: type, metadata: Mapping[str, Any], key: str) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise CheckpointError(f"the GGUF metadata has no list of {kind.__name__} at {key}")
    return value


def _context_length(metadata: Mapping[str, Any]) -> dict[str, int]:
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return {"model_max_length": length} if isinstance(length, int) else {}
