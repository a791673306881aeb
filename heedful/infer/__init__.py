"""Inference: `Engine` opens a model folder and answers inputs; also batches of files, a request queue and export."""
