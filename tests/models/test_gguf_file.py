"""The container: every type against its definition, and damage of any kind."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.core.errors import CheckpointError
from lockstep.models.gguf_file import SUPPORTED_TYPES, GgufFile
from lockstep.models.gguf_model import GgufModel

CLASSIC = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


def write_tensor(path: Path, data: np.ndarray, kind: str) -> GgufFile:
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("w", data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.parametrize("kind", CLASSIC)
def test_values_survive_to_the_types_precision(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    stored = quants.quantize(values, GGMLQuantizationType[kind])
    file = write_tensor(tmp_path / "a.gguf", stored, kind)
    assert file.tensors["w"].shape == (6, 64)
    got = file.read("w")
    assert got.dtype == np.float32
    steps = {"F32": 0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 1 / 127}
    bits = {"Q4_0": 1 / 8, "Q4_1": 1 / 15, "Q5_0": 1 / 16, "Q5_1": 1 / 31}
    spread = np.abs(values).reshape(6, 2, 32).max(-1, keepdims=True).repeat(32, -1).reshape(6, 64)
    allowed = {**steps, **bits}[kind] * (2 * spread if kind in bits else spread)
    assert (np.abs(got - values) <= allowed + 1e-9).all()
    assert kind == "F32" or not np.array_equal(got, values)


def six_bit_pairs(packed: bytes) -> tuple[list[int], list[int]]:
    """The eight scales and eight minima that the K types pack into twelve bytes."""
    scales = [byte & 63 for byte in packed[:4]]
    minima = [byte & 63 for byte in packed[4:8]]
    scales += [(packed[8 + i] & 15) | (packed[i] >> 6) << 4 for i in range(4)]
    minima += [(packed[8 + i] >> 4) | (packed[4 + i] >> 6) << 4 for i in range(4)]
    return scales, minima


def reference_q4_k(block: bytes) -> list[float]:
    d, dmin = np.frombuffer(block[:4], np.float16).astype(np.float64)
    scales, minima = six_bit_pairs(block[4:16])
    nibbles = block[16:]
    return [
        d * scales[i // 32] * ((nibbles[i // 64 * 32 + i % 32] >> (4 * (i // 32 % 2))) & 15)
        - dmin * minima[i // 32]
        for i in range(256)
    ]


def reference_q5_k(block: bytes) -> list[float]:
    d, dmin = np.frombuffer(block[:4], np.float16).astype(np.float64)
    scales, minima = six_bit_pairs(block[4:16])
    high, nibbles = block[16:48], block[48:]
    values = []
    for i in range(256):
        group = i // 32
        low = (nibbles[i // 64 * 32 + i % 32] >> (4 * (group % 2))) & 15
        values.append(d * scales[group] * (low + 16 * (high[i % 32] >> group & 1)))
        values[-1] -= dmin * minima[group]
    return values


def reference_q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    d = float(np.frombuffer(block[208:], np.float16)[0])
    values = []
    for i in range(256):
        half, quarter, place = i // 128, i % 128 // 32, i % 32
        nibble = low[64 * half + 32 * (quarter % 2) + place] >> (4 * (quarter // 2)) & 15
        top = high[32 * half + place] >> (2 * quarter) & 3
        values.append(d * int(scales[i // 16]) * ((nibble | top << 4) - 32))
    return values


@pytest.mark.parametrize(
    ("kind", "num_bytes", "scale_at", "reference"),
    [
        ("Q4_K", 144, (0, 2), reference_q4_k),
        ("Q5_K", 176, (0, 2), reference_q5_k),
        ("Q6_K", 210, (208,), reference_q6_k),
    ],
)
def test_k_types_by_their_definition(
    kind: str,
    num_bytes: int,
    scale_at: tuple[int, ...],
    reference: Callable[[bytes], list[float]],
    tmp_path: Path,
) -> None:
    draw = np.random.default_rng(1)
    rows = draw.integers(0, 256, (5, 2 * num_bytes), dtype=np.uint8)
    for start in (0, num_bytes):
        for at in scale_at:
            scale = draw.standard_normal(5).astype(np.float16).view(np.uint8).reshape(5, 2)
            rows[:, start + at : start + at + 2] = scale
    file = write_tensor(tmp_path / "a.gguf", rows, kind)
    assert file.tensors["w"].shape == (5, 512)
    blocks = [row[start : start + num_bytes].tobytes() for row in rows for start in (0, num_bytes)]
    expected = np.array([reference(block) for block in blocks]).reshape(5, 512)
    np.testing.assert_allclose(file.read("w"), expected, rtol=1e-5, atol=1e-5)


def test_every_supported_type_is_tested() -> None:
    assert {kind.name for kind in SUPPORTED_TYPES} == {*CLASSIC, "Q4_K", "Q5_K", "Q6_K"}


@pytest.fixture(scope="module")
def good(
    hf_model: Callable[..., Any],
    write_gguf: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    return write_gguf(hf_model("llama"), path, arch="llama", kind="Q8_0")


def test_the_header_reads_as_the_library_reads_it(good: Path) -> None:
    ours, theirs = GgufFile(good), GGUFReader(good)
    for key, value in ours.metadata.items():
        assert value == theirs.fields[key].contents()
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        expected = quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.read(tensor.name), expected)


def load_all(path: Path) -> None:
    model = GgufModel(path)
    for name in model.shapes:
        model.read(name)
    model.tokenizer()


def header_size(path: Path) -> int:
    return min(info.offset for info in GgufFile(path).tensors.values())


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_truncated_file_is_one_sentence(good: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = good.read_bytes()
    size = data.draw(st.integers(0, len(whole) - 1) | st.integers(0, header_size(good)))
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:size])
    with pytest.raises(CheckpointError) as caught:
        load_all(path)
    assert "\n" not in str(caught.value)


@given(data=st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bytes_are_one_sentence_or_harmless(
    good: Path, tmp_path: Path, data: st.DataObject
) -> None:
    whole = bytearray(good.read_bytes())
    places = st.integers(0, 23) | st.integers(0, header_size(good) - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        whole[place] = data.draw(st.integers(0, 255))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(whole)
    with suppress(CheckpointError):
        load_all(path)


KEY = struct.pack("<Q1s", 1, b"k")
HUGE = struct.pack("<Q", 2**61)
NESTED = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"GGML" + bytes(60), "not a GGUF file: it begins with b'GGML'"),
        (b"GGUF", "damaged or truncated"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1; supported are 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"GGUF" + struct.pack("<I", 3) + HUGE + HUGE, "claims 2305843009213693952 tensors"),
        (b"GGUF" + struct.pack("<IQ", 3, 0) + HUGE, "metadata keys, more than its"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + KEY + struct.pack("<II", 9, 0) + HUGE,
            "array items, more than its",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + KEY + struct.pack("<I", 8) + HUGE,
            "bytes of text, more than its",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + KEY + NESTED,
            "nested more than 4 deep",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + KEY + struct.pack("<IQ", 77, 0), "type 77"),
    ],
)
def test_absurd_headers_cost_nothing(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message):
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_unsupported_types_are_named(tmp_path: Path) -> None:
    rows = np.zeros((1, 66), np.uint8)
    with pytest.raises(CheckpointError, match=r"'w' is of type IQ2_XXS; supported are F32, F16"):
        write_tensor(tmp_path / "a.gguf", rows, "IQ2_XXS")


def test_a_folder_or_nothing_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        GgufFile(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        GgufFile(tmp_path / "none.gguf")
