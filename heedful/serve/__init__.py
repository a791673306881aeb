"""Layer 11: models behind HTTP, within limits."""
