"""Unlabelled data: rows of files as inputs of a model."""
