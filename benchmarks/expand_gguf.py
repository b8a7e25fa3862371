"""Writes the shipped GGUF file again with its weights expanded, so that llama.cpp computes with
exactly the weights the others have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

FILE_TYPES = {"fp32": gguf.LlamaFileType.ALL_F32, "bf16": gguf.LlamaFileType.MOSTLY_BF16}
_WRITER_SETS = ("GGUF.", "general.architecture", "general.file_type")


def expand_gguf(source: Path, target: Path, precision: Literal["fp32", "bf16"]) -> Path:
    """`target`, made if it is not there yet. Norms stay fp32, as llama.cpp's own converter does."""
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(partial, architecture)
    for name, field in reader.fields.items():
        if not name.startswith(_WRITER_SETS):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(FILE_TYPES[precision])
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if precision == "bf16" and values.ndim > 1:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(target)
