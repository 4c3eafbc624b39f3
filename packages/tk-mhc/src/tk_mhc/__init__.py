"""Manifold-constrained hyper-connection kernels. Empty for now."""

__all__: list[str] = []
