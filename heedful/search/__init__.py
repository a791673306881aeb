"""Search over documents: an index of words and vectors, on disk."""
