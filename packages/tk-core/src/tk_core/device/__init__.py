"""Typed macros over CUDA that TileLang has no expression for; `bits` has CUDA's own functions, without a header."""
