"""Reference of interleave_gate_and_up, which is plain PyTorch itself."""

from tk_gemm.layout import interleave_gate_and_up as interleave_gate_and_up
