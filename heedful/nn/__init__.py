"""Mathematics on packed tensors, of which models are built: attention and its kernels, positions, layers."""
