"""Layer 8: from a folder to answers."""
