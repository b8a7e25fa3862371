"""Models of each family, requests, and what is compared bit for bit.

Everything here goes through the public interfaces of engine and trainer: what is compared is what a
user gets.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
import torch

from lockstep import kernels
from lockstep.core.model_config import ModelConfig, RopeConfig
from lockstep.core.quantization import parse_scheme
from lockstep.core.records import Completion
from lockstep.core.sampling import SamplingParams
from lockstep.engine import Engine, EngineConfig, Request
from lockstep.models import Llama
from lockstep.models.layers import quantize_weights

VOCAB = 331
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
    "int4-g32-asym-a16": torch.float32,
    "fp8": torch.bfloat16,
}
"""Compute dtype by precision; all but the first two are weight schemes."""

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {
        "rope": RopeConfig(
            theta=10_000.0,
            kind="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=128,
        )
    },
    "qwen2": {"architecture": "Qwen2ForCausalLM", "qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "qk_norm": True, "head_dim": 24},
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": 50},
}

ModelOf = Callable[..., Llama]
Bits = tuple[object, ...]


def build_model(
    family: str, precision: str, *, param_dtype: torch.dtype | None = None, seed: int = 1
) -> Llama:
    """A random model with parameters in `param_dtype`, by default the compute dtype.

    The weights are those of the same seed in fp32, rounded. Biases and norms are random too. Where
    `precision` is a weight scheme, matrices are rounded to it: before each product where
    `param_dtype` is given, as quantisation-aware training has it, else once.
    """
    fields: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 72,
        "intermediate_size": 176,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position": 512,
        "initializer_range": 0.15,
    }
    config = ModelConfig(**(fields | FAMILIES[family]))  # type: ignore[arg-type]
    model = Llama(config, compute_dtype=DTYPES[precision])
    model.initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    if precision not in ("fp32", "bf16"):
        quantize_weights(model, parse_scheme(precision), on_the_fly=param_dtype is not None)
    return model.to(param_dtype or DTYPES[precision])


@pytest.fixture(scope="session")
def shared_model() -> ModelOf:
    """`shared_model(family, precision)`: built once; a test must not change it."""
    return cache(lambda family, precision: build_model(family, precision))


@pytest.fixture(scope="session")
def fresh_model() -> ModelOf:
    """The same model anew, for tests that change it."""
    return build_model


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=list(DTYPES))
def precision(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = kernels.num_threads()
    kernels.set_num_threads(request.param)
    yield request.param
    kernels.set_num_threads(before)


@pytest.fixture(scope="session")
def engine_of() -> Callable[..., Engine]:
    def build(model: Llama, **config: object) -> Engine:
        return Engine(model, None, EngineConfig(**{"kv_cache_tokens": 16_384, **config}))  # type: ignore[arg-type]

    return build


@pytest.fixture(scope="session")
def requests_of() -> Callable[..., list[Request]]:
    """`requests_of(count, seed)`: prompts of 1 to 300 tokens and all kinds of sampling."""

    def build(
        count: int, *, seed: int = 0, longest: int = 300, max_tokens: int = 12
    ) -> list[Request]:
        rng = random.Random(seed)
        kinds: Sequence[dict[str, object]] = (
            {"temperature": 1.0},
            {"temperature": 0.7},
            {"temperature": 0.0, "logprobs": 2},
            {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
            {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {7: 2.0}},
        )
        requests = []
        for number in range(count):
            length = rng.choice([rng.randint(1, 20), rng.randint(1, longest)])
            options = {
                "max_tokens": rng.randint(1, max_tokens),
                "seed": rng.getrandbits(63),
                "prompt_logprobs": rng.choice([None, 0, 2]),
                **kinds[number % len(kinds)],
            }
            requests.append(
                Request(
                    request_id=str(number),
                    prompt_token_ids=[rng.randrange(VOCAB) for _ in range(length)],
                    params=SamplingParams(**options),  # type: ignore[arg-type]
                    priority=rng.randint(0, 2),
                )
            )
        return requests

    return build


@pytest.fixture(scope="session")
def bits_of() -> Callable[[Completion], Bits]:
    """Tokens and every logprob of a completion, spelled so that equal means the same bits."""

    def describe(completion: Completion) -> Bits:
        entries = [completion.prompt_logprobs or ()]
        entries += [sample.logprobs for sample in completion.samples]
        return tuple(
            (
                entry.token_id,
                entry.logprob.hex(),
                None if entry.sampling_logprob is None else entry.sampling_logprob.hex(),
                entry.rank,
                tuple((token, logprob.hex()) for token, logprob in entry.top),
            )
            for group in entries
            for entry in group
            if entry is not None
        )

    return describe


@pytest.fixture(scope="session")
def answers_of(engine_of, bits_of) -> Callable[..., list[Bits]]:
    """Bits of the answers to some requests, run together on a fresh engine of a model."""

    def run(model: Llama, requests: Sequence[Request], **config: object) -> list[Bits]:
        return [bits_of(completion) for completion in engine_of(model, **config).run(requests)]

    return run
