"""Layer 2: what a Transformer is made of, and its heads."""
