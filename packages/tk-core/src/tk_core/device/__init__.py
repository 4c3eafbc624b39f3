"""Typed macros over CUDA that TileLang has no expression for: `memory` over memory.cuh, `bits` over CUDA's own."""
