"""Layer 8: training."""
