"""RMSNorm: the differentiable function and its module."""
