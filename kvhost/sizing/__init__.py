"""Bytes of KV cache of a model, and what fits and pays. Pure."""
