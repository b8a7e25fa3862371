"""Settings every test shares, and the tiny model that whole commands are tried on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

# Wall-clock deadlines fail on a busy machine. In CI the examples are the same at every run, so that
# a change is judged by what it changed; elsewhere they are fresh.
settings.register_profile(
    "lockstep", deadline=None, derandomize="CI" in os.environ, print_blob=True
)
settings.load_profile("lockstep")


@pytest.fixture(scope="session")
def save_tiny_model() -> Callable[..., None]:
    """save_tiny_model(folder, pieces=...) writes a Hugging Face folder: two layers, random weights,
    a token for each piece. The imports are inside: most tests need no torch.
    """

    def save(
        folder: Path,
        *,
        pieces: Sequence[str],
        specials: Sequence[str] = ("<end>",),
        end: str = "<end>",
        begin: str | None = None,
        chat_template: str | None = None,
        max_position: int = 128,
    ) -> None:
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Library

        from lockstep.core.model_config import ModelConfig
        from lockstep.models.export import save_hf_folder
        from lockstep.models.llama import Llama
        from lockstep.text.tokenizer import Tokenizer, TokenizerFiles

        vocabulary = [*specials, *pieces]
        library = Library(models.BPE({piece: i for i, piece in enumerate(vocabulary)}, []))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens([AddedToken(text, special=True) for text in specials])
        names = {"eos_token": end} | ({"bos_token": begin} if begin else {})
        files = TokenizerFiles(
            tokenizer_json=library.to_str(), config=names, chat_template=chat_template
        )
        model = Llama(
            ModelConfig(
                vocab_size=len(vocabulary),
                hidden_size=32,
                intermediate_size=64,
                num_layers=2,
                num_heads=2,
                num_kv_heads=1,
                head_dim=16,
                max_position=max_position,
                tie_embeddings=True,
                eos_token_ids=(vocabulary.index(end),),
                initializer_range=0.1,
            )
        )
        model.initialise(seed=0)
        save_hf_folder(model, folder, tokenizer=Tokenizer(files), dtype="float32", quiet=True)

    return save


@pytest.fixture(scope="session")
def byte_pieces() -> list[str]:
    """A token for every byte, as byte-level tokenizers spell them."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())
