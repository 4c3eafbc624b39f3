"""Differentiable rotary position embedding."""
