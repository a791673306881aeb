"""Building blocks of models on packed tensors: attention and its kernels, positions, layers."""
