"""Lockstep: post-train, evaluate and serve open-weights language models on one code path.

Importing the package imports nothing else; docs/architecture.md is the map of what lies below it.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
