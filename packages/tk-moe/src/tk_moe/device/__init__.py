"""CUDA that TileLang has no expression for, in *.cuh files by purpose, each beside a module of typed macros."""
