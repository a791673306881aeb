"""Experiments that `heedful study` runs: one task, several models, several seeds, and a conclusion each.

The variants that a study compares are its arms.
"""

from __future__ import annotations

STUDIES = {  # question of each study; the module of that name has a function `run`
    "limits": "What does a bag of words miss, and which models learn it?",
    "scores": "Six ways to score a query against a key: which of them retrieve the right value?",
    "translation": "Recurrent networks without and with attention, and a Transformer: which learns to translate?",
    "positions": "How does a Transformer represent order, and does it generalize to texts longer than in training?",
    "norm": "Norms before or after each sublayer, layer norm or batch norm: which train well?",
    "complexity": "How do time and memory of four kinds of layers grow with length and width?",
    "pretraining": "Random weights, or pre-training by one of three objectives on the same budget?",
    "masking": "80 % masked, 10 % replaced, 10 % kept: do other shares work as well?",
}
SEEDS = {"translation": 8}  # default seed count of a study on toy data, if not 3
REAL = {"limits": 3, "translation": 1, "pretraining": 3, "masking": 3}  # default seed count on real data
REAL_MODULES = {"translation": "multi30k"}  # modules that run a study on real data, if not the study's own
