"""Casts to and from e4m3, e2m1 and e5m6 with scale factors of blocks."""
