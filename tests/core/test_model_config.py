from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.errors import CheckpointError
from lockstep.core.model_config import ARCHITECTURES, ModelConfig, RopeConfig

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KINDS = {kind: architecture for architecture, kind in ARCHITECTURES.items()}

ROPES = [
    RopeConfig(),
    RopeConfig(theta=500_000.0),
    RopeConfig(kind="linear", factor=4.0),
    RopeConfig(
        kind="llama3", factor=8.0, original_max_position=8192, low_freq_factor=1.0, theta=5e5
    ),
    RopeConfig(kind="yarn", factor=4.0, original_max_position=32, beta_fast=16.0, truncate=False),
    RopeConfig(kind="yarn", factor=4.0, original_max_position=32, attention_factor=1.5),
]


@st.composite
def model_configs(draw: st.DrawFn) -> ModelConfig:
    """Any model that config.json can describe."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    num_kv_heads = draw(st.integers(1, 4))
    num_layers = draw(st.integers(1, 4))
    window, window_layers = None, ()
    if kind != "llama":
        window = draw(st.none() | st.integers(1, 100))
    if kind in ("qwen2", "qwen3") and window is not None:
        bound = tuple(draw(st.lists(st.booleans(), min_size=num_layers, max_size=num_layers)))
        window, window_layers = (window if any(bound) else None), bound if any(bound) else ()
        window_layers = () if all(window_layers) else window_layers
    attention_bias = kind in ("llama", "qwen3") and draw(st.booleans())
    return ModelConfig(
        architecture=KINDS[kind],
        vocab_size=draw(st.integers(1, 1000)),
        hidden_size=draw(st.integers(1, 512)),
        intermediate_size=draw(st.integers(1, 512)),
        num_layers=num_layers,
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_dim=2 * draw(st.integers(1, 64)),
        max_position=draw(st.integers(1, 10_000)),
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        rope=draw(st.sampled_from(ROPES)),
        tie_embeddings=draw(st.booleans()),
        qkv_bias=kind == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=kind == "llama" and draw(st.booleans()),
        qk_norm=kind == "qwen3",
        sliding_window=window,
        window_layers=window_layers,
        bos_token_id=draw(st.none() | st.integers(0, 10)),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, 10), max_size=3, unique=True))),
    )


@given(model_configs())
def test_what_is_written_is_read_back(config: ModelConfig) -> None:
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_transformers_reads_what_we_write_and_we_read_what_it_writes(kind: str) -> None:
    from transformers import AutoConfig

    config = ModelConfig.from_hf(SMALL | {"architectures": [KINDS[kind]], "head_dim": 8})
    written = config.to_hf()
    theirs = AutoConfig.for_model(kind, **{k: v for k, v in written.items() if k != "model_type"})
    assert theirs.num_key_value_heads == config.num_kv_heads
    assert theirs.head_dim == config.head_dim
    assert theirs.max_position_embeddings == config.max_position
    back = ModelConfig.from_hf(theirs.to_dict())
    assert back == config


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_silence_means_what_transformers_takes_it_to_mean(kind: str) -> None:
    from transformers import AutoConfig

    given_keys = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
    given_keys |= {"num_attention_heads": 32, "hidden_size": 64, "architectures": [KINDS[kind]]}
    ours = ModelConfig.from_hf(given_keys)
    theirs = AutoConfig.for_model(kind, **given_keys)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 32)
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM' is not supported; supported"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq'"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"vocab_size": 0}, "vocab_size must be an integer from 1 to .*, got 0"),
        ({"vocab_size": True}, "vocab_size must be an integer from 1 to .*, got True"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number"),
        ({"num_key_value_heads": 3}, "3 key/value heads do not divide 4 attention heads"),
        ({"head_dim": 7}, "head dimension 7 is odd"),
        ({"hidden_size": 33}, "has no head_dim"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": [1, -2]}, "eos_token_id must be a token id or a list of them"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "has no factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "by layer type"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 10000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelConfig.from_hf(SMALL | change)
    assert "\n" not in str(caught.value)


def test_rope_in_the_spelling_of_both_versions_of_transformers() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    older = SMALL | {"rope_theta": 1e6, "rope_scaling": scaling}
    newer = SMALL | {"rope_parameters": scaling | {"rope_theta": 1e6}}
    assert ModelConfig.from_hf(older).rope == ModelConfig.from_hf(newer).rope
    assert ModelConfig.from_hf(older).rope == RopeConfig(theta=1e6, kind="linear", factor=4.0)


def test_windows_bind_the_layers_they_name() -> None:
    qwen = SMALL | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 5}
    types = ["full_attention", "sliding_attention", "full_attention"]
    config = ModelConfig.from_hf(qwen | {"use_sliding_window": True, "layer_types": types})
    assert [config.window_of_layer(i) for i in range(3)] == [None, 5, None]
    config = ModelConfig.from_hf(qwen | {"use_sliding_window": True, "max_window_layers": 1})
    assert [config.window_of_layer(i) for i in range(3)] == [None, 5, 5]
    config = ModelConfig.from_hf(qwen | {"use_sliding_window": False})
    assert config.sliding_window is None
    mistral = SMALL | {"architectures": ["MistralForCausalLM"], "sliding_window": 5}
    assert ModelConfig.from_hf(mistral).window_of_layer(2) == 5


def test_sizes_follow_from_heads() -> None:
    config = ModelConfig.from_hf(SMALL | {"head_dim": 16})
    assert (config.q_size, config.kv_size) == (64, 32)


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
    config = ModelConfig.from_hf(SMALL | {"architectures": [architecture]} | changes)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
    assert config.qk_norm == (architecture == "Qwen3ForCausalLM")


def test_yarn() -> None:
    def rope_of(**scaling: Any) -> RopeConfig:
        return ModelConfig.from_hf(
            SMALL | {"max_position_embeddings": 2048, "rope_scaling": {"type": "yarn", **scaling}}
        ).rope

    rope = rope_of(factor=4.0)
    assert (rope.factor, rope.original_max_position) == (4.0, 2048)
    assert (rope.beta_fast, rope.beta_slow, rope.attention_factor) == (32.0, 1.0, None)
    rope = rope_of(original_max_position_embeddings=512, attention_factor=1.5)
    assert (rope.factor, rope.attention_factor) == (4.0, 1.5)
    deepseek = rope_of(factor=40, mscale=1.0, mscale_all_dim=1.0)
    assert deepseek.attention_factor == 1.0


def test_end_tokens_may_be_one_or_several() -> None:
    assert ModelConfig.from_hf(SMALL | {"eos_token_id": [5, 7, 5]}).eos_token_ids == (5, 7)
    assert ModelConfig.from_hf(SMALL | {"eos_token_id": 3}).eos_token_ids == (3,)
    assert ModelConfig.from_hf(SMALL | {"eos_token_id": None}).eos_token_ids == ()


JSON = st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=3)
JSON = st.recursive(
    JSON,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "factor", "rope_theta", "x"]), inner, max_size=2)
    ),
)
KEYS = [
    *SMALL,
    *("head_dim", "rope_scaling", "rope_parameters", "attention_bias", "tie_word_embeddings"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("quantization_config", "initializer_range", "partial_rotary_factor"),
    "original_max_position_embeddings",
    *("max_position_embeddings", "rms_norm_eps", "hidden_act", "bos_token_id", "eos_token_id"),
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
        config = ModelConfig.from_hf({**SMALL, **window, **changes})
    except CheckpointError:
        return
    assert ModelConfig.from_hf(config.to_hf()) == config
