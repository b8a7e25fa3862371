"""Compression: weights in fewer bits, layer by layer, with a gate that measures what it cost."""
