"""Experiments that `heedful study` runs: a study trains several models on one task, and compares them.

The variants that a study compares, such as models, are its arms. Each arm is trained with several seeds. A study is a
module with a function `run`, which `runner.run_study` calls.
"""

from __future__ import annotations

STUDIES = {  # question that a study answers, by name of the study and of its module
    "limits": "What does a bag of words miss, and which models learn it?",
    "scores": "Six ways to score a query against a key: which of them retrieve the right value?",
    "translation": "Recurrent networks without and with attention, and a Transformer: which learns to translate?",
    "positions": "How does a Transformer represent order, and does it generalize to texts longer than in training?",
    "norm": "Norms before or after each sublayer, layer norm or batch norm: which train well?",
    "complexity": "How do time and memory of four kinds of layers grow with length and width?",
    "pretraining": "Random weights, or pre-training by one of three objectives on the same budget?",
    "masking": "80 % masked, 10 % replaced, 10 % kept: do other shares work as well?",
}
SEEDS = {"translation": 8}  # default number of seeds of a study on toy data, if it is not 3
# default number of seeds on real data (--full), for each study that can use real data
REAL = {"limits": 3, "translation": 1, "pretraining": 3, "masking": 3}
REAL_MODULES = {"translation": "multi30k"}  # module that runs a study on real data, if it is not the study's own
