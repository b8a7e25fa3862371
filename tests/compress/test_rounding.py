"""Grids and GPTQ: levels cover the weight, codes are within range, errors are what is claimed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from lockstep.compress.descent import descend, improve
from lockstep.compress.gptq import gptq, output_error, refit_scales
from lockstep.compress.grid import fit_grid, groups_of
from lockstep.compress.methods import quantize_nearest
from lockstep.compress.statistics import InputStatistics
from lockstep.core.quantization import parse_scheme

SCHEMES = ["int8", "int4-g32", "int4-g32-asym", "int4-g64-asym", "fp8", "q8_0", "q4_0", "q4_1"]
Inputs = Callable[[int], InputStatistics]


def weight(outputs: int = 24, inputs: int = 96) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) * 0.1


@pytest.mark.parametrize("name", SCHEMES)
def test_rounding_is_within_the_format_and_near_the_weight(name: str) -> None:
    scheme, w = parse_scheme(name), weight(inputs=100 if name.startswith("int") else 96)
    quantized = quantize_nearest(w, scheme)
    codes = quantized.values_NK
    assert codes.shape == w.shape
    if scheme.kind == "int":
        assert int(codes.max()) <= (1 << scheme.bits) - 1
    error = (quantized.dequantize() - w).norm() / w.norm()
    assert error < {4: 0.13, 8: 0.035}[scheme.bits]


@pytest.mark.parametrize("name", SCHEMES)
def test_the_search_never_errs_more_than_the_whole_range(
    name: str, correlated_inputs: Inputs
) -> None:
    scheme, w, inputs = parse_scheme(name), weight(), correlated_inputs(96)
    groups = groups_of(scheme, 96)

    def error(*, search: bool) -> float:
        grid = fit_grid(w, scheme, importance_K=inputs.importance_K, search=search)
        delta = grid.values(grid.round(w, groups), groups) - w
        return float((delta.square() * inputs.importance_K).sum())

    assert error(search=True) <= error(search=False) * (1 + 1e-3)


def test_weights_born_on_a_grid_come_back_exactly() -> None:
    codes = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(0)).float()
    codes[:, ::32], codes[:, 1::32] = 0, 15
    w = codes * 0.125 - 0.75
    assert torch.equal(quantize_nearest(w, parse_scheme("q4_1")).dequantize(), w)


@pytest.mark.parametrize("name", SCHEMES)
def test_gptq_errs_less_than_rounding_to_nearest(name: str, correlated_inputs: Inputs) -> None:
    scheme, w, inputs = parse_scheme(name), weight(), correlated_inputs(96)
    grid, groups = fit_grid(w, scheme), groups_of(scheme, 96)
    nearest = grid.values(grid.round(w, groups), groups)
    codes = gptq(w, grid, inputs.hessian_KK)
    assert torch.equal(codes, grid.round(grid.values(codes, groups), groups))
    fed = output_error(grid.values(codes, groups) - w, inputs.hessian_KK)
    assert fed < 0.7 * output_error(nearest - w, inputs.hessian_KK)


def test_gptq_of_independent_inputs_rounds_to_nearest() -> None:
    scheme, w = parse_scheme("int4-g32-asym"), weight()
    grid, groups = fit_grid(w, scheme), groups_of(scheme, 96)
    assert torch.equal(gptq(w, grid, torch.eye(96)), grid.round(w, groups))
    assert torch.equal(gptq(w, grid, torch.zeros(96, 96)), grid.round(w, groups))


@pytest.mark.parametrize("name", ["int8", "int4-g32", "int4-g32-asym"])
def test_refitted_scales_err_less(name: str, correlated_inputs: Inputs) -> None:
    scheme, w, inputs = parse_scheme(name), weight(), correlated_inputs(96)
    grid, groups = fit_grid(w, scheme), groups_of(scheme, 96)
    codes = grid.round(w, groups)
    refitted = refit_scales(w, grid, codes, inputs.hessian_KK, torch.float32)
    before = output_error(grid.values(codes, groups) - w, inputs.hessian_KK)
    assert output_error(refitted.values(codes, groups) - w, inputs.hessian_KK) < before


@pytest.mark.parametrize("name", SCHEMES)
def test_descent_errs_less_than_gptq_and_ends_where_no_code_can_move(
    name: str, correlated_inputs: Inputs
) -> None:
    scheme, w, inputs = parse_scheme(name), weight(inputs=160), correlated_inputs(160)
    h_KK = inputs.hessian_KK + torch.eye(160) * inputs.hessian_KK.diagonal().mean() * 0.01
    grid, groups = fit_grid(w, scheme), groups_of(scheme, 160)
    codes = gptq(w, grid, inputs.hessian_KK)

    def error(codes: torch.Tensor) -> float:
        return output_error(grid.values(codes, groups) - w, h_KK)

    errors = [error(codes)]
    for _ in range(15):
        codes = descend(w, grid, codes, h_KK)
        errors.append(error(codes))
    assert errors[1] < errors[0]
    assert all(after <= before * (1 + 1e-5) for before, after in itertools.pairwise(errors))
    for step in (-1.0, 1.0):
        if scheme.kind != "int":
            continue
        for k in (3, 50, 159):
            moved = codes.clone()
            moved[:, k] = grid.round(
                grid.values(moved, groups) + step * grid.scale_NG[:, groups], groups
            )[:, k]
            assert error(moved) >= errors[-1] * (1 - 1e-5)


@pytest.mark.parametrize("name", SCHEMES)
def test_improved_levels_err_no_more(name: str, correlated_inputs: Inputs) -> None:
    scheme, w, inputs = parse_scheme(name), weight(), correlated_inputs(96)
    grid, groups = fit_grid(w, scheme), groups_of(scheme, 96)
    codes = gptq(w, grid, inputs.hessian_KK)
    better, better_codes = improve(
        w, grid, codes, inputs.hessian_KK, damping=0.01, scale_dtype=torch.bfloat16
    )
    before = output_error(grid.values(codes, groups) - w, inputs.hessian_KK)
    after = output_error(better.values(better_codes, groups) - w, inputs.hessian_KK)
    assert after < 0.97 * before
    if better.offset_NG is not None and scheme.offset == "zero_point":
        assert better.offset_NG.min() >= 0
        assert better.offset_NG.max() <= 15
