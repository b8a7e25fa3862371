"""Names of weight schemes, what they say, and which tensors they leave alone."""

from __future__ import annotations

import pytest

from lockstep.core.errors import ConfigError
from lockstep.core.quantization import ALIASES, GGUF_NAMES, SCHEMES, names, parse_scheme


@pytest.mark.parametrize("name", names())
def test_names_parse_and_print(name: str) -> None:
    scheme = parse_scheme(name)
    assert str(scheme) == ALIASES.get(name, name)
    assert parse_scheme(str(scheme).upper()) == scheme
    assert scheme.table is None or parse_scheme(scheme.table).name == scheme.table


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(ConfigError, match=r"'int3' is unknown; use one of int4, .*fp8"):
        parse_scheme("int3")


def test_groups_and_offsets() -> None:
    int8, q4_0 = SCHEMES["int8"], SCHEMES["q4_0"]
    assert (int8.num_groups(576), int8.stored_offset) == (1, 128)
    assert (q4_0.num_groups(72), q4_0.stored_offset) == (3, 8)
    assert SCHEMES["q6_k"].stored_offset == 32
    assert SCHEMES["q4_1"].stored_offset == SCHEMES["int4-g64-asym"].stored_offset == 0


def test_only_matrices_are_quantised_and_the_table_has_a_scheme_of_its_own() -> None:
    scheme = SCHEMES["int4-g64"]
    assert scheme.of_tensor("model.norm.weight", (576,)) is None
    assert scheme.of_tensor("model.layers.0.mlp.up_proj.weight", (1536, 576)) is scheme
    assert scheme.of_tensor("lm_head.weight", (49152, 576)) == SCHEMES["int8"]
    assert SCHEMES["fp8"].of_tensor("model.embed_tokens.weight", (49152, 576)) is None


def test_float_activations() -> None:
    assert parse_scheme("int4").with_float_activations() == parse_scheme("int4-a16")
    assert SCHEMES["fp8"].with_float_activations() is SCHEMES["fp8"]
    assert set(GGUF_NAMES) <= set(SCHEMES)
