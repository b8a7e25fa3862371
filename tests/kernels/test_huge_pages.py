"""Tensors cut out of advised chunks: shapes, dtypes, and no overlap."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels import huge_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (0, 4), (1000, 1000), (3000, 2000, 2)])
def test_shapes_and_dtypes(shape, dtype):
    tensor = huge_pages.empty(shape, dtype)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0


def test_neighbours_do_not_overlap():
    tensors = [huge_pages.empty((number * 37 + 1,), torch.float32) for number in range(200)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert torch.all(tensor == number)


def test_a_large_tensor_has_memory_of_its_own():
    tensor = huge_pages.empty((9 << 20,), torch.float32)
    assert tensor.untyped_storage().nbytes() == tensor.numel() * 4
