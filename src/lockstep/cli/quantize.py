"""`lockstep quantize`: a model's weights in fewer bits, measured before it may be used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from lockstep.cli.config_file import settings_from_file
from lockstep.compress.config import (
    METHODS,
    CalibrationConfig,
    CheckConfig,
    Format,
    Limits,
    Method,
    NarrowKVCacheDtype,
    QuantizeConfig,
    choose_scheme,
)
from lockstep.core.errors import ConfigError

command = App(name="quantize", config=settings_from_file)

EXIT_GATE_FAILED = 1
_Flat = Parameter(name="*")  # the fields are flags of their own, without a prefix


@command.default
def quantize(
    model: str,
    out: Annotated[Path, Parameter(name="--out")],
    *,
    scheme: Literal["int8", "int4", "fp8"] | None = None,
    method: Method | None = None,
    group_size: int | None = None,
    symmetric: bool = False,
    format: Format = "compressed-tensors",
    data: Annotated[CalibrationConfig, _Flat] = CalibrationConfig(),  # noqa: B008 (frozen)
    max_perplexity_increase: str | None = None,
    max_kl: float | None = None,
    min_agreement: float | None = None,
    damping: float = 0.01,
    check_only: bool = False,
    weights: str | None = None,
    kv_cache_dtype: NarrowKVCacheDtype | None = None,
    config: Path | None = None,
) -> int:
    """Quantise a model layer by layer and measure what it cost; exit 1 past a limit.

    Parameters
    ----------
    model
        A name such as smollm2, a Hugging Face folder or a GGUF file.
    out
        Folder to make; must not exist yet, or be empty. With --check-only: the folder, GGUF file or
        name to judge.
    scheme
        int8: one scale a channel, activations in 8 bits. int4: groups of inputs. fp8: e4m3 weights.
    method
        int8: smoothquant (default), gptq or rtn; int4: gptq (default), awq or rtn; fp8: gptq
        (default) or rtn.
    group_size
        int4: inputs that share a scale, 32 (default), 64 or 128.
    symmetric
        int4: no zero points.
    format
        compressed-tensors is what transformers and vLLM load, gguf what llama.cpp does.
    max_perplexity_increase
        Limit of the gate, such as 1%; by default 1% for int8 and fp8, 4% for int4.
    max_kl
        Limit on mean KL(original || quantised), in nats a token.
    min_agreement
        Least share of tokens whose likeliest successor must stay the same.
    damping
        GPTQ: share of the Hessian's mean diagonal added to it.
    check_only
        Only run the gate on OUT as a user would load it, with MODEL as its original.
    weights
        --check-only: load OUT with its weights held so, such as native or int8.
    kv_cache_dtype
        --check-only: OUT keeps keys and values as int8 or fp8.
    config
        TOML file with settings under the names of these flags; flags win.
    """
    limits = Limits(
        max_perplexity_increase=_share(max_perplexity_increase),
        max_kl=max_kl,
        min_agreement=min_agreement,
    )
    if check_only:
        if scheme is not None:
            raise ConfigError("--check-only takes OUT as it is, without --scheme")
        return _check(model, out, data, limits, weights, kv_cache_dtype)
    if weights is not None or kv_cache_dtype is not None:
        raise ConfigError("--weights and --kv-cache-dtype say how to load for --check-only; add it")
    if scheme is None:
        raise ConfigError(f"--scheme is missing; give one of {', '.join(METHODS)}")
    settings = QuantizeConfig(
        model=model,
        out=out,
        scheme=choose_scheme(scheme, group_size=group_size, symmetric=symmetric),
        method=method or METHODS[scheme][0],
        format=format,
        data=data,
        limits=limits,
        damping=damping,
    )
    from lockstep.compress import run  # torch: two seconds that --help need not pay
    from lockstep.compress.report import REPORT_NAME, summary

    outcome = run.quantize(settings)
    for line in summary(outcome.gate):
        print(line, file=sys.stderr)
    print(outcome.folder)
    if outcome.passed:
        return 0
    print(
        f"lockstep: {'; '.join(outcome.gate.failures)}; the model is kept in {outcome.folder}, "
        f"marked as failed in {REPORT_NAME}",
        file=sys.stderr,
    )
    return EXIT_GATE_FAILED


def _check(
    original: str,
    checked: Path,
    data: CalibrationConfig,
    limits: Limits,
    weights: str | None,
    kv_cache_dtype: NarrowKVCacheDtype | None,
) -> int:
    settings = CheckConfig(
        original=original,
        checked=str(checked),
        weights=weights,
        kv_cache_dtype=kv_cache_dtype,
        data=data,
        limits=limits,
    )
    from lockstep.compress.check import check
    from lockstep.compress.report import summary

    gate = check(settings)
    print("\n".join(summary(gate)))
    if not gate.failures:
        return 0
    print(f"lockstep: {checked}: {'; '.join(gate.failures)}", file=sys.stderr)
    return EXIT_GATE_FAILED


def _share(given: str | None) -> float | None:
    """`1%` or `0.01`."""
    if given is None:
        return None
    try:
        return float(given.removesuffix("%")) / (100 if given.endswith("%") else 1)
    except ValueError:
        raise ConfigError(
            f"--max-perplexity-increase must be a share such as 1% or 0.01, got {given!r}"
        ) from None
