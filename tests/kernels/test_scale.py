"""factor * x: native equals torch to the bit; gradient."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.scale import scale


@pytest.mark.parametrize("n", [1, 17, 127])
@pytest.mark.parametrize("factor", [2.0, 0.3])
def test_native_is_torch(isa, dtype, normal, n, factor):
    x = normal(5, n, dtype=dtype)
    x[0, 0], x[1, 0] = torch.inf, torch.nan
    assert torch.equal(scale(x, factor).nan_to_num(7.0), (x * factor).nan_to_num(7.0))


def test_gradient(dtype, normal):
    x, dy = normal(3, 9, dtype=dtype).requires_grad_(), normal(3, 9, dtype=dtype)
    scale(x, 0.3).backward(dy)
    assert torch.equal(x.grad, dy * 0.3)
    torch.library.opcheck(torch.ops.lockstep.scale.default, (x, 0.5))
