"""Mathematics on packed tensors: attention and its kernels, positions, layers."""
