"""Text to token ids and back, from a Hugging Face `tokenizer.json`.

A thin layer over the `tokenizers` library that adds what serving and training need: the bytes of
every token (so that text can be streamed without ever cutting a character), which tokens are
special, and the chat template. Decoding is defined here, not by the library: the UTF-8 reading of
the tokens' concatenated bytes, with U+FFFD for what is not UTF-8. So decoding a prefix of the
tokens gives a prefix of the bytes, always.

Knows byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece-style BPE with byte fallback
(Llama 2, Mistral).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from lockstep.core.errors import CheckpointError
from lockstep.core.files import write_json, write_text
from lockstep.text.chat_template import ChatTemplate
from lockstep.text.token_bytes import TokenBytes

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
"""The keys of `tokenizer_config.json` that chat templates may name."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer as it lies in a checkpoint folder; kept verbatim, so that export copies it
    unchanged.
    """

    tokenizer_json: str
    config: Mapping[str, Any]
    """`tokenizer_config.json`, without the chat template."""
    chat_template: str | None = None

    @classmethod
    def read(cls, folder: Path) -> TokenizerFiles:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json; convert its slow tokenizer with "
                "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        config = _read_json(folder / "tokenizer_config.json")
        template = _default_template(config.pop("chat_template", None))
        # Older folders keep the special tokens in a file of their own.
        config = {**_read_json(folder / "special_tokens_map.json"), **config}
        if (file := folder / "chat_template.jinja").is_file():
            template = _read_text(file)
        elif template is None:
            template = _default_template(
                _read_json(folder / "chat_template.json").get("chat_template")
            )
        return cls(tokenizer_json=_read_text(path), config=config, chat_template=template)

    def write(self, folder: Path) -> None:
        write_text(folder / "tokenizer.json", self.tokenizer_json)
        write_json(folder / "tokenizer_config.json", dict(self.config))
        if self.chat_template is not None:
            write_text(folder / "chat_template.jinja", self.chat_template)


@dataclass(frozen=True, kw_only=True)
class TokenizedText:
    """Token ids and, for each, the half-open range of characters it came from."""

    token_ids: list[int]
    char_spans: list[tuple[int, int]]


class Tokenizer:
    """Encodes, decodes, and knows the special tokens of one model. Immutable and safe to share
    between threads.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self.files = files
        self._library = _load(files.tokenizer_json)
        # It would trim the spaces off the character ranges; `_with_post_processor` keeps it.
        self._library.post_processor = None
        added = self._library.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        pieces: dict[int, str] = {
            i: piece for piece, i in self._library.get_vocab(with_added_tokens=True).items()
        }
        self.vocab_size = 1 + max(pieces, default=-1)
        """One more than the largest token id; a model's embedding may be padded beyond it."""
        self._bytes = TokenBytes(
            pieces,
            literal={i: token.content for i, token in added.items()},
            decoder=json.loads(files.tokenizer_json).get("decoder"),
        )
        self.special_tokens = self._named_special_tokens()
        """Role (`bos_token`, ...) to text, for the roles this tokenizer has."""
        self.bos_token_id = self._id_of_role("bos_token")
        self.eos_token_id = self._id_of_role("eos_token")
        self.pad_token_id = self._id_of_role("pad_token")
        self.chat_template: ChatTemplate | None = (
            ChatTemplate(files.chat_template, special_tokens=self.special_tokens)
            if files.chat_template is not None
            else None
        )

    @classmethod
    def from_folder(cls, folder: Path | str) -> Tokenizer:
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template of a checkpoint
        folder.
        """
        return cls(TokenizerFiles.read(Path(folder)))

    def save(self, folder: Path) -> None:
        """Write the files this tokenizer was read from into `folder`, unchanged."""
        self.files.write(folder)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; special tokens spelled out in it become their ids.

        `add_special_tokens` adds what the tokenizer's post-processor adds, usually a leading bos.
        """
        library = self._with_post_processor if add_special_tokens else self._library
        ids: list[int] = library.encode(_encodable(text)).ids
        return ids

    def encode_with_spans(self, text: str) -> TokenizedText:
        """Like `encode`, with each token's character range; a character cut into tokens spans
        each of them.
        """
        encoding = self._library.encode(_encodable(text))
        return TokenizedText(token_ids=encoding.ids, char_spans=encoding.offsets)

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
        is_continuation: bool = False,
    ) -> str:
        """Text of `token_ids`. Ids outside the vocabulary (padding of the embedding) are empty.

        SentencePiece-style tokenizers put a space before the first word, which decoding takes off
        again, except of a continuation: what follows other text.
        """
        data = self.decode_bytes(token_ids, skip_special_tokens=skip_special_tokens)
        if self.strips_first_space and not is_continuation:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def decode_bytes(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> bytes:
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return b"".join(self._bytes[i] for i in token_ids if i not in skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to the text, special or not; may be part of a character."""
        return self._bytes[token_id]

    def token_id(self, text: str) -> int | None:
        """Id of the token whose vocabulary entry is `text`, such as `<|im_end|>`; None if there
        is none.
        """
        found: int | None = self._library.token_to_id(text)
        return found

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def strips_first_space(self) -> bool:
        """Whether decoding takes a leading space off, as SentencePiece-style tokenizers do."""
        return self._bytes.strips_first_space

    @cached_property
    def _with_post_processor(self) -> tokenizers.Tokenizer:
        return _load(self.files.tokenizer_json)

    def _named_special_tokens(self) -> dict[str, str]:
        named = {}
        for role in SPECIAL_ROLES:
            value = self.files.config.get(role)
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                named[role] = text
        return named

    def _id_of_role(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self.token_id(text)


def _load(tokenizer_json: str) -> tokenizers.Tokenizer:
    try:
        library = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises bare Exception for whatever it cannot read
        raise CheckpointError(f"tokenizer.json cannot be read: {error}") from error
    library.no_padding()
    library.no_truncation()
    return library


def _encodable(text: str) -> str:
    """Lone surrogates, which JSON can carry but UTF-8 cannot, become U+FFFD."""
    return text.encode("utf-8", errors="surrogatepass").decode("utf-8", errors="replace")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _default_template(value: object) -> str | None:
    """A template, or the one named `default` of a list of named ones."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
