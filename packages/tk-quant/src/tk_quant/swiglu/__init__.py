"""SwiGLU, forward and backward, alone and fused with casts of its results."""
