"""Unlabelled data: rows of files as inputs of a model, for `heedful predict` on files."""
