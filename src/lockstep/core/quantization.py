"""How a weight is held in fewer bits, as plain data: the schemes users name and what each means.

A weight (N outputs, K inputs) is cut along K into groups, each with a scale and perhaps an offset:
value = scale * (q - zero_point), or scale * q + minimum. Products take activations quantised to 8
bits per token and block of ACTIVATION_BLOCK inputs, or as they are (`activation_bits` 16). What
lies in memory is `lockstep.kernels.linear.formats`' affair; nothing here imports torch.

Names: `int8`, `int4`, `int4-g64`, `int4-g64-asym`, `int4-g64-a16`, `fp8`, and GGUF's `q8_0`,
`q5_0`, `q5_1`, `q4_0`, `q4_1`, `q4_k`, `q6_k`. GGUF types: ggml-common.h of
https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lockstep.core.errors import ConfigError

ACTIVATION_BLOCK = 64
"""Inputs that share one activation scale; a tensor-parallel cut at a multiple changes nothing."""

Kind = Literal["int", "float"]
Offset = Literal["symmetric", "zero_point", "minimum"]

_OUTER_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")

KVCacheDtype = Literal["auto", "fp32", "bf16", "int8", "fp8"]
"""How keys and values are kept; auto: in what the model computes in."""


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """One way to hold weights."""

    name: str
    """What users type; `parse_scheme(scheme.name) == scheme`."""
    kind: Kind = "int"
    bits: int = 8
    group_size: int | None = None
    """Inputs that share a scale; None is one scale for each output channel. The last group of a row
    may be shorter."""
    offset: Offset = "symmetric"
    """zero_point: an integer subtracted from q; minimum: a float added to scale * q."""
    activation_bits: Literal[8, 16] = 8
    """16 leaves activations in the compute dtype."""
    super_group_size: int | None = None
    """k-quants: inputs that share a second, floating scale; scales of groups are integers."""
    table: str | None = None
    """Scheme of the token table and the last projection; None leaves them in the compute dtype."""

    def __str__(self) -> str:
        return self.name

    @property
    def stored_offset(self) -> int:
        """What is added to a symmetric q so that it is stored unsigned."""
        return 1 << (self.bits - 1) if self.kind == "int" and self.offset == "symmetric" else 0

    @property
    def is_gguf(self) -> bool:
        return self.name in GGUF_NAMES

    def num_groups(self, k: int) -> int:
        """Groups in a row of `k` inputs."""
        return 1 if self.group_size is None else -(-k // self.group_size)

    def of_tensor(self, name: str, shape: tuple[int, ...]) -> WeightScheme | None:
        """The scheme of one tensor of a model, by its Hugging Face name; None: left in float."""
        if len(shape) != 2:
            return None
        if name in _OUTER_TENSORS:
            return None if self.table is None else parse_scheme(self.table)
        return self

    def with_float_activations(self) -> WeightScheme:
        """The same weights for activations in the compute dtype."""
        if self.activation_bits == 16:
            return self
        return parse_scheme(f"{self.name}-a16")


def _int4(group_size: int, offset: Offset) -> WeightScheme:
    return WeightScheme(
        name=f"int4-g{group_size}{'' if offset == 'symmetric' else '-asym'}",
        bits=4,
        group_size=group_size,
        offset=offset,
        table="int8",
    )


_BASES = (
    WeightScheme(name="int8", table="int8"),
    *(_int4(group, offset) for group in (32, 64, 128) for offset in ("symmetric", "zero_point")),
    WeightScheme(name="q8_0", group_size=32, table="q8_0"),
    WeightScheme(name="q4_0", bits=4, group_size=32, table="q8_0"),
    WeightScheme(name="q4_1", bits=4, group_size=32, offset="minimum", table="q8_0"),
    WeightScheme(name="q5_0", bits=5, group_size=32, table="q8_0"),
    WeightScheme(name="q5_1", bits=5, group_size=32, offset="minimum", table="q8_0"),
    WeightScheme(
        name="q4_k", bits=4, group_size=32, offset="minimum", super_group_size=256, table="q8_0"
    ),
    WeightScheme(name="q6_k", bits=6, group_size=16, super_group_size=256, table="q6_k"),
)
_FP8 = WeightScheme(name="fp8", kind="float", activation_bits=16)

SCHEMES: dict[str, WeightScheme] = {
    scheme.name: scheme
    for base in _BASES
    for scheme in (base, replace(base, name=f"{base.name}-a16", activation_bits=16))
} | {"fp8": _FP8}
"""Every scheme by its name."""

ALIASES = {"int4": "q4_1", "int4-a16": "q4_1-a16"}
"""Short names, for what measured best (docs/decisions/012)."""

GGUF_NAMES = ("q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "q4_k", "q6_k")
"""Schemes that are GGUF tensor types, read from and written to such files as they are."""

NATIVE = "native"
"""Not a scheme: weights stay as their checkpoint holds them."""

FLOAT = "float"
"""Not a scheme: weights become floats whatever their checkpoint holds."""


def parse_scheme(name: str) -> WeightScheme:
    """The scheme of a name, upper or lower case. ConfigError lists the names there are."""
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key not in SCHEMES:
        raise ConfigError(f"weight scheme {name!r} is unknown; use one of {', '.join(names())}")
    return SCHEMES[key]


def check_weights(name: str) -> None:
    """ConfigError unless it is a scheme, `native` or `float`: what loading a model takes."""
    if name not in (NATIVE, FLOAT):
        try:
            parse_scheme(name)
        except ConfigError as error:
            raise ConfigError(f"{error}, or {NATIVE} or {FLOAT}") from None


def names() -> list[str]:
    """All names that `parse_scheme` takes, short ones first."""
    return [*ALIASES, *SCHEMES]
