"""Typed macros over CUDA that TileLang has no expression for: memory that several GPUs, or the host, read and write."""
