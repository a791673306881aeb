"""Layer 1: the mathematics of attention on packed tensors."""
