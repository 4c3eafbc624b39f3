"""Trainable layers over the domain packages. Empty for now."""

__all__: list[str] = []
