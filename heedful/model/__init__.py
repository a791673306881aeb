"""The Transformer and its heads, models from before it, and text generation; `checkpoint` loads and saves models."""
