"""Runs requests: continuous batching of the scheduler's steps over a model and its KV cache."""
