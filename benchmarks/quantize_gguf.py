"""Quantises a GGUF file with llama.cpp's own quantiser: SOURCE TARGET Q8_0|Q4_0."""

from __future__ import annotations

import sys

import llama_cpp

FILE_TYPES = {"Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}


def main() -> int:
    source, target, kind = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[kind]
    return int(llama_cpp.llama_model_quantize(source.encode(), target.encode(), params))


if __name__ == "__main__":
    sys.exit(main())
