"""A process masked to another instruction set (LOCKSTEP_ISA) answers with the same bits.

The contract is per machine type; that it also holds across instruction sets lets a run be repeated
on another CPU. Every process here is a fresh one, so what is tested is what a server does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lockstep import kernels
from lockstep.core.errors import ConfigError
from lockstep.kernels import native_library

GENERATE = """
import json, torch
from lockstep import kernels
from lockstep.core.model_config import ModelConfig
from lockstep.core.sampling import SamplingParams
from lockstep.engine import Engine, EngineConfig, Request
from lockstep.models import Llama

answers = []
for dtype in (torch.float32, torch.bfloat16):
    config = ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=331, hidden_size=72, intermediate_size=1500,
        num_layers=2, num_heads=4, num_kv_heads=2, head_dim=24, max_position=512, qk_norm=True,
        initializer_range=0.15,
    )
    model = Llama(config, compute_dtype=dtype, param_dtype=dtype)
    model.initialise(seed=1)
    requests = [
        Request(
            request_id=str(number),
            prompt_token_ids=[(7 * number + 3 * i) % 331 for i in range(1 + 60 * number)],
            params=SamplingParams(
                max_tokens=12, temperature=0.9 * (number % 2), seed=number, prompt_logprobs=0,
                logprobs=2, ignore_eos=True,
            ),
        )
        for number in range(4)
    ]
    for answer in Engine(model, None, EngineConfig(kv_cache_tokens=4096)).run(requests):
        entries = [*(answer.prompt_logprobs or ()), *answer.samples[0].logprobs]
        answers.append([(e.token_id, e.logprob.hex()) for e in entries if e is not None])
print(json.dumps({"isa": kernels.isa(), "answers": answers}))
"""


def generate(isa: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", GENERATE],
        env=os.environ | {native_library.ISA_VARIABLE: isa},
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def portable() -> dict[str, object]:
    return generate("portable")


@pytest.mark.parametrize("isa", [name for name in native_library.ISAS if name != "portable"])
def test_a_masked_process_generates_the_same_bits(isa, portable):
    lacking = kernels.isas().get(isa, ("it in this build",))
    if lacking:
        pytest.skip(f"{isa} does not run here: lacks {' '.join(lacking)}")
    masked = generate(isa)
    assert masked["isa"] == isa
    assert masked["answers"] == portable["answers"]
    assert sum(len(answer) for answer in masked["answers"]) > 700


def test_an_instruction_set_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv(native_library.ISA_VARIABLE, "avx1024")
    native_library._load.cache_clear()
    with pytest.raises(ConfigError, match=r"LOCKSTEP_ISA=avx1024 .* use one of .*portable"):
        kernels.missing_reason()
    monkeypatch.undo()
    native_library._load.cache_clear()
    assert kernels.missing_reason() is None
