"""The Transformer and its heads, models from before it, and text generation."""
