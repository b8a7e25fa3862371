"""Our models against transformers' in fp32: prompt logprobs, and the tokens greedy decoding gives.

We decode, and transformers reads prompt and tokens in one pass: at each token its largest logit
must be our token. By induction its own greedy decoding gives the same sequence.
"""

from __future__ import annotations

import decimal
import random
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.models.fetch import fetch_model
from lockstep.models.llama import Llama
from lockstep.models.loading import load_model
from lockstep.text.tokenizer import Tokenizer

LOGPROB_TOLERANCE = 2e-3
NEAR_TIE = 5e-3
NUM_GREEDY = 64
FAMILIES = [
    "llama",
    "llama-biases",
    "llama3-rope",
    "linear-rope",
    "yarn-rope",
    "mistral",
    "qwen2",
    "qwen2-window",
    "qwen3",
]

AssertParity = Callable[[Any, Llama, list[int]], None]


@pytest.fixture
def assert_parity(logits_of: Any, greedy_tokens: Any) -> AssertParity:
    def check(theirs: Any, ours: Llama, prompt: list[int]) -> None:
        tokens = greedy_tokens(ours, prompt, NUM_GREEDY)
        assert len(tokens) == NUM_GREEDY
        with torch.no_grad():
            whole = theirs(torch.tensor([prompt + tokens])).logits[0]
        targets = torch.tensor(prompt[1:])[:, None]
        expected = whole[: len(prompt) - 1].log_softmax(-1).gather(1, targets)
        got = logits_of(ours, prompt)[:-1].log_softmax(-1).gather(1, targets)
        assert (got - expected).abs().max() < LOGPROB_TOLERANCE
        greedy = whole[len(prompt) - 1 : -1]
        gap = greedy.amax(-1) - greedy.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert gap.max() < NEAR_TIE, f"first differs at token {(gap > 0).nonzero()[0].item()}"

    return check


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_random_models(
    family: str,
    hf_model: Callable[[str], Any],
    hf_folder: Callable[[str], Path],
    assert_parity: AssertParity,
) -> None:
    theirs = hf_model(family)
    ours = load_model(hf_folder(family), precision="fp32", quiet=True).model
    draw = random.Random(family)
    for length in (16, 60, 300, 1000):
        prompt = [draw.randrange(theirs.config.vocab_size) for _ in range(length)]
        assert_parity(theirs, ours, prompt)


def smollm2_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Twenty: prose, code and chat, of 16 to 1,000 tokens."""
    template = tokenizer.chat_template
    assert template is not None
    prose = (
        textwrap.dedent(decimal.__doc__ or "") + (random.__doc__ or "") + (textwrap.__doc__ or "")
    )
    code = Path(random.__file__).read_text()
    questions = [
        "What is the capital of France?",
        "Write a haiku about 12345 birds.",
        "你好 🙂 ?",
        "2+2=",
    ]
    chats = [
        template.render([{"role": "user", "content": q}], add_generation_prompt=True)
        for q in questions
    ]
    prompts = [tokenizer.encode(chat) for chat in chats]
    lengths = [16, 24, 40, 64, 100, 150, 256, 400]
    prompts += [tokenizer.encode(prose)[:n] for n in lengths]
    prompts += [tokenizer.encode(code)[1000 : 1000 + n] for n in [*lengths[:-1], 1000]]
    assert len(prompts) == 20
    return prompts


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_smollm2(assert_parity: AssertParity) -> None:
    from transformers import AutoModelForCausalLM

    folder = fetch_model("smollm2", quiet=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    loaded = load_model(folder, precision="fp32", quiet=True)
    for prompt in smollm2_prompts(loaded.tokenizer):
        assert 16 <= len(prompt) <= 1000
        assert_parity(theirs, loaded.model, prompt)
