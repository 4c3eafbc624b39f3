"""Sizes of real models that the cases of several ops share."""

MODEL_EXPERTS = (8, 16, 32, 36, 64, 72, 96, 108, 128, 144, 256, 288, 384, 512)
"""Numbers of experts."""
