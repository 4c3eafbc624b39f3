"""Engram hash and gate kernels. Empty for now."""

__all__: list[str] = []
