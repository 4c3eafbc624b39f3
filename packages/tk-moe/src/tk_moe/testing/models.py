"""What the named cases of several ops take from real models."""

MODEL_EXPERTS = (8, 16, 32, 36, 64, 72, 96, 108, 128, 144, 256, 288, 384, 512)
"""Numbers of experts."""
