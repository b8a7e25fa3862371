from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.errors import CheckpointError
from lockstep.core.model_config import ARCHITECTURES, ModelConfig

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**BASE, **changes})


def read_as(architecture: str, **changes: Any) -> ModelConfig:
    return read(architectures=[architecture], model_type=ARCHITECTURES[architecture], **changes)


def test_plain_llama() -> None:
    config = read()
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (4, 4, 2)
    assert config.head_dim == 16
    assert config.rope.theta == 500_000.0
    assert config.rope.kind == "default"
    assert config.eos_token_ids == (2,)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (False, False, False)
    assert not config.qk_norm


def test_head_dim_may_be_given_or_derived() -> None:
    assert read(head_dim=32).head_dim == 32
    assert read(head_dim=None).head_dim == 16
    assert read_as("Qwen3ForCausalLM").head_dim == 128
    with pytest.raises(CheckpointError, match="no head_dim"):
        read(num_attention_heads=5, num_key_value_heads=5)


def test_silence_about_kv_heads_is_not_null() -> None:
    silent = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_hf(silent).num_kv_heads == 4
    assert read(num_key_value_heads=None).num_kv_heads == 4
    mistral = {**silent, "architectures": ["MistralForCausalLM"], "num_attention_heads": 16}
    assert ModelConfig.from_hf(mistral).num_kv_heads == 8


@pytest.mark.parametrize(
    ("architecture", "changes", "biases"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True, False)),
        ("LlamaForCausalLM", {"mlp_bias": True}, (False, False, True)),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases(architecture: str, changes: dict[str, Any], biases: tuple[bool, ...]) -> None:
    config = read_as(architecture, **changes)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
    assert config.qk_norm == (architecture == "Qwen3ForCausalLM")


def test_sliding_windows() -> None:
    assert read(sliding_window=8).sliding_window is None
    assert read_as("MistralForCausalLM", sliding_window=None).sliding_window is None
    mistral = read_as("MistralForCausalLM", sliding_window=8)
    assert [mistral.window_of_layer(i) for i in range(4)] == [8] * 4
    off = read_as("Qwen2ForCausalLM", sliding_window=8, use_sliding_window=False)
    assert off.sliding_window is None
    on = {"sliding_window": 8, "use_sliding_window": True}
    upper = read_as("Qwen2ForCausalLM", **on, max_window_layers=3)
    assert [upper.window_of_layer(i) for i in range(4)] == [None, None, None, 8]
    none = read_as("Qwen2ForCausalLM", **on, max_window_layers=28)
    assert none.sliding_window is None
    types = ["sliding_attention", "full_attention"] * 2
    mixed = read_as("Qwen3ForCausalLM", **on, max_window_layers=0, layer_types=types)
    assert [mixed.window_of_layer(i) for i in range(4)] == [8, None, 8, None]


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_of_transformers_4(key: str) -> None:
    rope = read(rope_scaling={key: "llama3", **LLAMA3}).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("llama3", 32.0, 8192)
    assert (rope.theta, rope.low_freq_factor, rope.high_freq_factor) == (500_000.0, 1.0, 4.0)


def test_rope_of_transformers_5() -> None:
    config = {key: value for key, value in BASE.items() if key != "rope_theta"}
    parameters = {"rope_type": "llama3", "rope_theta": 7.0, **LLAMA3}
    read_back = ModelConfig.from_hf({**config, "rope_parameters": parameters, "dtype": "bfloat16"})
    assert (read_back.rope.kind, read_back.rope.theta) == ("llama3", 7.0)
    plain = {"rope_type": "default", "rope_theta": 9.0}
    assert ModelConfig.from_hf({**config, "rope_parameters": plain}).rope.theta == 9.0


def test_yarn() -> None:
    rope = read(rope_scaling={"type": "yarn", "factor": 4.0}).rope
    assert (rope.factor, rope.original_max_position) == (4.0, 2048)
    assert (rope.beta_fast, rope.beta_slow, rope.attention_factor) == (32.0, 1.0, None)
    scaled = {"type": "yarn", "original_max_position_embeddings": 512, "attention_factor": 1.5}
    rope = read(rope_scaling=scaled).rope
    assert (rope.factor, rope.attention_factor) == (4.0, 1.5)
    deepseek = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert read(rope_scaling=deepseek).rope.attention_factor == 1.0


def test_end_tokens_may_be_one_or_several() -> None:
    assert read(eos_token_id=[5, 7, 5]).eos_token_ids == (5, 7)
    assert read(eos_token_id=None).eos_token_ids == ()


CASES = [
    read(),
    read(rope_scaling={"rope_type": "llama3", **LLAMA3}, attention_bias=True, mlp_bias=True),
    read(rope_scaling={"rope_type": "linear", "factor": 2.0}, eos_token_id=[2, 3]),
    read(rope_scaling={"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25}),
    read_as("MistralForCausalLM", sliding_window=16, head_dim=32),
    read_as("Qwen2ForCausalLM", tie_word_embeddings=True),
    read_as("Qwen2ForCausalLM", sliding_window=16, use_sliding_window=True, max_window_layers=2),
    read_as("Qwen3ForCausalLM", head_dim=32, attention_bias=True),
]


@pytest.mark.parametrize("config", CASES)
def test_writing_and_reading_gives_the_same(config: ModelConfig) -> None:
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; supported"),
        ({"architectures": None, "model_type": "mamba"}, "'mamba' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; it must be 'silu'"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope' is not supported; supported are def"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "by layer type"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "no low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with 'gptq'"),
        ({"num_key_value_heads": 3}, "3 key/value heads do not divide 4"),
        ({"head_dim": 15}, "head dimension 15 is odd"),
        ({"vocab_size": "many"}, "vocab_size must be an integer from 1 to .*, got 'many'"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"eos_token_id": -1}, "eos_token_id must be a token id"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)


JSON = st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=3)
JSON = st.recursive(
    JSON,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "factor", "rope_theta", "x"]), inner, max_size=2)
    ),
)
KEYS = [
    *BASE,
    *("head_dim", "rope_scaling", "rope_parameters", "attention_bias", "tie_word_embeddings"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("quantization_config", "initializer_range", "partial_rotary_factor"),
    "original_max_position_embeddings",
]


@given(
    changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3),
    architecture=st.sampled_from(list(ARCHITECTURES)),
)
def test_any_json_gives_a_config_or_one_sentence(
    changes: dict[str, Any], architecture: str
) -> None:
    window = {"sliding_window": 8, "use_sliding_window": True, "architectures": [architecture]}
    try:
        config = ModelConfig.from_hf({**BASE, **window, **changes})
    except CheckpointError:
        return
    assert ModelConfig.from_hf(config.to_hf()) == config
