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
from torch import Tensor

from lockstep.core.sampling import SamplingParams
from lockstep.engine import Engine
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


def assert_parity(
    theirs: Any, prompt: list[int], *, logprobs: list[float], tokens: list[int]
) -> None:
    """`logprobs` are ours of all prompt tokens but the first, `tokens` what we decoded after it."""
    assert len(tokens) == NUM_GREEDY
    with torch.no_grad():
        whole = theirs(torch.tensor([prompt + tokens])).logits[0]
    targets = torch.tensor(prompt[1:])[:, None]
    expected = whole[: len(prompt) - 1].log_softmax(-1).gather(1, targets)[:, 0]
    assert (torch.tensor(logprobs) - expected).abs().max() < LOGPROB_TOLERANCE
    greedy = whole[len(prompt) - 1 : -1]
    gap = greedy.amax(-1) - greedy.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert gap.max() < NEAR_TIE, f"first differs at token {(gap > 0).nonzero()[0].item()}"


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_random_models(
    family: str,
    hf_model: Callable[[str], Any],
    hf_folder: Callable[[str], Path],
    logits_of: Callable[[Llama, list[int]], Tensor],
    greedy_tokens: Callable[[Llama, list[int], int], list[int]],
) -> None:
    theirs = hf_model(family)
    ours = load_model(hf_folder(family), precision="fp32", quiet=True).model
    draw = random.Random(family)
    for length in (16, 60, 300, 1000):
        prompt = [draw.randrange(theirs.config.vocab_size) for _ in range(length)]
        targets = torch.tensor(prompt[1:])[:, None]
        logprobs = logits_of(ours, prompt)[:-1].log_softmax(-1).gather(1, targets)[:, 0]
        tokens = greedy_tokens(ours, prompt, NUM_GREEDY)
        assert_parity(theirs, prompt, logprobs=logprobs.tolist(), tokens=tokens)


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
def test_smollm2_through_the_engine() -> None:
    """All prompts at once, as the server runs them."""
    from transformers import AutoModelForCausalLM

    folder = fetch_model("smollm2", quiet=True)
    loaded = load_model(folder, precision="fp32", quiet=True)
    prompts = smollm2_prompts(loaded.tokenizer)
    assert all(16 <= len(prompt) <= 1000 for prompt in prompts)
    greedy = SamplingParams(
        max_tokens=NUM_GREEDY, temperature=0.0, ignore_eos=True, prompt_logprobs=0
    )
    completions = Engine(loaded.model, loaded.tokenizer).generate(prompts, greedy)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.prompt_logprobs is not None
        logprobs = [entry.logprob for entry in completion.prompt_logprobs if entry is not None]
        tokens = list(completion.samples[0].token_ids)
        assert_parity(theirs, prompt, logprobs=logprobs, tokens=tokens)
