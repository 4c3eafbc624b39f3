"""What the references of the packages share: plain PyTorch, for any device."""
