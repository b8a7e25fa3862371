"""What the options make of a model: adapters, defaults and limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.core.errors import ConfigError
from lockstep.core.files import write_json
from lockstep.core.sampling import SamplingParams
from lockstep.engine.engine import Engine
from lockstep.models import LoraConfig, apply_lora, load_model
from lockstep.models.export import save_adapter
from lockstep.serve.config import EngineOptions
from lockstep.serve.defaults import GenerationDefaults
from lockstep.serve.loading import add_adapter, load_served_model

BODY = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT folder whose B is not zero, so that it changes answers."""
    folder = tmp_path_factory.mktemp("adapter")
    config = LoraConfig(r=4, alpha=8.0)
    model = load_model(tiny_model, precision="fp32", quiet=True).model
    apply_lora(model, config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    save_adapter(model, folder, config, base_model=str(tiny_model))
    return folder


def test_an_adapter_is_served_with_the_bits_of_the_unmerged_model(
    tiny_model: Path, adapter: Path, start_server: Callable[..., Any], tiny_server: Any
) -> None:
    adapted = start_server(adapter=str(adapter)).http.post("/v1/completions", json=BODY).json()
    base = tiny_server.http.post("/v1/completions", json=BODY).json()
    got = adapted["choices"][0]["logprobs"]["token_logprobs"]
    assert got != base["choices"][0]["logprobs"]["token_logprobs"]
    assert got == logprobs_in_process(tiny_model, adapter)


def logprobs_in_process(tiny_model: Path, adapter: Path) -> list[float]:

    loaded = load_model(tiny_model, precision="fp32", quiet=True)
    add_adapter(loaded, adapter)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
    (completion,) = Engine(loaded.model, loaded.tokenizer).generate([[5, 6, 7]], params)
    return [entry.logprob for entry in completion.samples[0].logprobs]


@pytest.mark.parametrize(("source", "expected"), [("model", 0.3), ("none", 1.0)])
def test_the_model_says_how_it_likes_to_be_sampled(
    tiny_model: Path, tmp_path: Path, source: Any, expected: float
) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    write_json(tmp_path / "generation_config.json", {"temperature": 0.3, "top_k": 7})
    served = load_served_model(str(tmp_path), EngineOptions(generation_config=source))
    served.engine.close()
    assert served.defaults.temperature == expected
    assert (served.defaults == GenerationDefaults()) == (source == "none")


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"max_model_len": 257}, "257.*256"),
        ({"kv_cache_tokens": 64}, "64.*256"),
        ({"kv_cache_tokens": 64, "max_model_len": 80}, "64.*80"),
    ],
)
def test_limits_that_contradict_each_other_are_refused_with_the_numbers(
    tiny_model: Path, options: dict[str, int], numbers: str
) -> None:
    with pytest.raises(ConfigError, match=numbers):
        load_served_model(str(tiny_model), EngineOptions(**options))


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "kv_cache_tokens", "threads"])
def test_an_option_below_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name.replace("_", "-")):
        EngineOptions(**{name: 0})
