"""Kernels for Blackwell: compiled for sm_100a and sm_103a, they have not run, as there was no such GPU."""
