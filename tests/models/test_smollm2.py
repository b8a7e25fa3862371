"""The embedded default itself: its tokenizer and its weights, where it has been fetched."""

from __future__ import annotations

import pytest
import torch

from lockstep.models.fetch import fetch_gguf, fetch_model
from lockstep.models.gguf_model import GgufModel
from lockstep.models.hf_folder import HfFolder
from lockstep.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(fetch_model("smollm2", quiet=True))


@pytest.mark.parametrize(
    ("text", "token_ids"),
    [  # ids that SmolLM2's own tokenizer gives
        ("Hello, we can use", [19556, 28, 392, 416, 722]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
        ("\n", [198]),
        ("<|im_start|>user\n", [1, 4093, 198]),
    ],
)
def test_known_token_ids(tokenizer: Tokenizer, text: str, token_ids: list[int]) -> None:
    assert tokenizer.encode(text) == token_ids
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text",
    [
        "1234567890 3.14159 1,000,000 ½ ² ٣ 四",
        "tabs\t\tand\r\nnewlines\n\n\n   and trailing   ",
        "🙂👩‍👩‍👧‍👦 \u0301 é é \u200b\ufeff\x00",
        "<|im_start|>system\n<|im_end|><|endoftext|><repo_name>",
        "def f(x):\n\treturn x ** 2  # naïve\n" * 3,
    ],
)
def test_texts_come_back(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


def test_every_digit_is_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode("x = 90210 + 7")]
    assert [p for p in pieces if any(chr(c).isdigit() for c in p)] == [
        b"9",
        b"0",
        b"2",
        b"1",
        b"0",
        b"7",
    ]


def test_special_tokens_and_template(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 49_152)
    assert sorted(tokenizer.special_ids) == list(range(17))
    assert tokenizer.chat_template is not None
    prompt = tokenizer.chat_template.render(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_folder_holds_what_the_file_holds() -> None:
    folder, gguf = HfFolder(fetch_model("smollm2")), GgufModel(fetch_gguf("smollm2"))
    assert folder.config == gguf.config
    assert folder.shapes == gguf.shapes
    for name in ("model.norm.weight", "model.layers.29.self_attn.q_proj.weight"):
        assert torch.equal(folder.read(name), gguf.read(name))
