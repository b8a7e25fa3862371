"""Packed weights kept on disk: the same bits, never a stale or a damaged file."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from lockstep import kernels
from lockstep.core.errors import ConfigError
from lockstep.core.quantization import parse_scheme
from lockstep.core.sampling import SamplingParams
from lockstep.engine import Engine, EngineConfig, Request
from lockstep.models import Llama, load_model
from lockstep.models.packed_cache import PackedFile, PackedWeights
from lockstep.models.resolve import resolve_model


@pytest.fixture
def folder(tmp_path: Path, save_tiny_model, byte_pieces) -> Path:
    save_tiny_model(tmp_path / "model", pieces=byte_pieces)
    return tmp_path / "model"


def packed_file(folder: Path) -> PackedFile:
    return PackedFile.of(resolve_model(folder), "bf16", "float")


def answer(folder: Path, *, packed: bool, weights: str | None = None) -> list[tuple[int, str]]:
    loaded = load_model(folder, packed=packed, weights=weights, quiet=True)
    return answer_of(loaded.model)


def answer_of(model: Llama) -> list[tuple[int, str]]:
    request = Request(
        request_id="1",
        prompt_token_ids=[5, 9, 2],
        params=SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True),
    )
    engine = Engine(model, None, EngineConfig(kv_cache_tokens=256))
    return [(e.token_id, e.logprob.hex()) for e in engine.run([request])[0].samples[0].logprobs]


def test_answers_are_the_same_packed_from_the_checkpoint_and_from_the_file(folder):
    plain = answer(folder, packed=False)
    assert not packed_file(folder).path.exists()
    assert answer(folder, packed=True) == plain
    assert packed_file(folder).path.exists()
    assert packed_file(folder).read() is not None
    assert answer(folder, packed=True) == plain


@pytest.mark.parametrize("weights", ["int8", "int4", "int4-g32-asym", "q8_0", "fp8"])
def test_quantised_weights_are_kept_too(folder, weights):
    plain = answer(folder, packed=False, weights=weights)
    file = PackedFile.of(resolve_model(folder), "bf16", parse_scheme(weights).name)
    for _ in range(2):  # packed anew, then from the file
        assert answer(folder, packed=True, weights=weights) == plain
        assert file.read() is not None
    assert not packed_file(folder).path.exists()
    model = load_model(folder, packed=True, weights=weights, quiet=True).model
    with pytest.raises(ConfigError, match="released to serve"), kernels.use_reference():
        answer_of(model)


def test_projections_are_in_memory_once(folder):
    for _ in range(2):  # packed anew, then from the file
        model = load_model(folder, packed=True, quiet=True).model
        assert model.model.layers[0].mlp.up_proj.weight.is_meta
        assert not model.model.embed_tokens.weight.is_meta


def test_another_checkpoint_of_the_same_size_is_not_mistaken_for_it(folder):
    answer(folder, packed=True)
    weights = folder / "model.safetensors"
    stat = weights.stat()
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert packed_file(folder).read() is None


@pytest.mark.parametrize("what", ["magic", "header", "data", "cut"])
def test_a_damaged_file_is_refused_and_replaced(folder, what, caplog):
    plain = answer(folder, packed=True)
    path = packed_file(folder).path
    damaged = bytearray(path.read_bytes())
    if what == "cut":
        del damaged[-1:]
    else:
        damaged[{"magic": 0, "header": 40, "data": 4096 * 2 + 1}[what]] ^= 1
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING, "lockstep.models"):
        assert packed_file(folder).read() is None
    assert "is not used" in caplog.text
    assert answer(folder, packed=True) == plain
    assert packed_file(folder).read() is not None


def test_a_folder_that_cannot_be_written_leaves_the_file_in_the_cache(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    answer(folder, packed=True)
    assert packed_file(folder).path.parent == tmp_path / "cache" / "packed"
    assert packed_file(folder).read() is not None


def test_tensors_come_back_as_they_were(tmp_path):
    file = PackedFile(path=tmp_path / "packed", identity={"a": [1, "b"]})
    tensors = {
        "x": torch.randn(7, 3).to(torch.bfloat16),
        "y": torch.arange(300_000, dtype=torch.int32),
        "z": torch.empty(0),
    }
    file.write(PackedWeights(tensors=tensors, quantized={"w": {"scheme": "int8"}}))
    got = file.read()
    assert got is not None
    assert got.quantized == {"w": {"scheme": "int8"}}
    for name, tensor in tensors.items():
        assert torch.equal(got.tensors[name].view(tensor.shape), tensor)
    assert PackedFile(path=file.path, identity={"a": [2]}).read() is None
