"""Experiments of the road from a bag of words to pre-training: each one task, several models, seeds, and a verdict."""

from __future__ import annotations

STUDIES = {  # name: what it asks; the file of that name in this folder has its `run`
    "limits": "What can a bag of words not tell, and what does it take?",
    "scores": "Six ways to compare a query with a key: which of them find what is asked for?",
    "translation": "Two recurrent nets without attention, with it, and a Transformer: who learns to translate?",
    "positions": "How does a Transformer know order, and does it still where texts are longer than any it has seen?",
    "norm": "Norms before or after each sublayer, over the layer or over the batch: what learns?",
    "complexity": "How do time and memory of four kinds of layers grow with length and width?",
    "pretraining": "Random weights, or weights that read text first, by one of three objectives on one budget?",
    "masking": "80 % hidden, 10 % replaced, 10 % kept: what if it is otherwise?",
}
SEEDS = {"translation": 8}  # of the default form, where three tell too little
REAL = {"limits": 3, "translation": 1, "pretraining": 3, "masking": 3}  # those that take real data too, with its seeds
