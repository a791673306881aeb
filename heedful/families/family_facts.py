"""Facts about families, for the table of `heedful models --family`: objectives, papers, and results with sources."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyFacts:
    """Facts about a family that its configurations do not contain."""

    name: str
    kind: str  # model_type
    sizes: tuple[str, ...]  # names of published sizes to show
    objective: str  # pre-training objective
    paper: str
    best: str = ""  # name of the size that the results belong to
    results: str = ""  # published results
    source: str = ""  # source of the results
    records: tuple[str, ...] = ()  # recorded benchmarks that measure this model_type


SQUAD_RACE = "Lan et al. 2020, results on SQuAD and RACE, single models, dev (RACE: test)"
README = "README of DistilBERT in transformers' research projects"

FAMILY_FACTS = (
    FamilyFacts(
        name="BERT",
        kind="bert",
        sizes=("bert-base-uncased", "bert-large-uncased"),
        objective="masked tokens + next sentence",
        paper="Devlin et al. 2019",
        best="bert-large-uncased",
        results="SQuAD 1.1 F1 90.9, SQuAD 2.0 F1 81.8, RACE 72.0",
        source=SQUAD_RACE,
        records=("forward-minilm", "finetune"),
    ),
    FamilyFacts(
        name="RoBERTa",
        kind="roberta",
        sizes=("roberta-base", "roberta-large"),
        objective="masked tokens, masks drawn anew",
        paper="Liu et al. 2019",
        best="roberta-large",
        results="SQuAD 1.1 F1 94.6, SQuAD 2.0 F1 89.4, RACE 83.2",
        source=SQUAD_RACE,
    ),
    FamilyFacts(
        name="DistilBERT",
        kind="distilbert",
        sizes=("distilbert-base-uncased",),
        objective="masked tokens + a teacher's scores and states",
        paper="Sanh et al. 2019",
        best="distilbert-base-uncased",
        results="GLUE 77.0 (BERT base: 79.5), SQuAD 1.1 F1 86.9 (88.5)",
        source=README,
    ),
    FamilyFacts(
        name="XLNet",
        kind="xlnet",
        sizes=("xlnet-base-cased", "xlnet-large-cased"),
        objective="tokens in any order, two streams",
        paper="Yang et al. 2019",
        best="xlnet-large-cased",
        results="SQuAD 1.1 F1 94.5, SQuAD 2.0 F1 88.8, RACE 81.8",
        source=SQUAD_RACE,
    ),
    FamilyFacts(
        name="ALBERT",
        kind="albert",
        sizes=("albert-base-v2", "albert-large-v2", "albert-xlarge-v2", "albert-xxlarge-v2"),
        objective="masked tokens + sentence order",
        paper="Lan et al. 2020",
        best="albert-xxlarge-v1",
        results="SQuAD 1.1 F1 94.8, SQuAD 2.0 F1 90.2, RACE 86.5",
        source=f"{SQUAD_RACE}, 1.5M steps; v1 is as large as v2",
        records=("forward-albert",),
    ),
    FamilyFacts(
        name="T5",
        kind="t5",
        sizes=("t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b"),
        objective="spans that a decoder writes",
        paper="Raffel et al. 2020",
        best="t5-11b",
        results="SuperGLUE 89.3",
        source="the SuperGLUE leaderboard of November 2020",
        records=("forward-t5",),
    ),
    FamilyFacts(
        name="GPT-2",
        kind="gpt2",
        sizes=("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
        objective="the next token",
        paper="Radford et al. 2019",
        best="gpt2-xl",
        results="LAMBADA perplexity 8.63, WikiText2 perplexity 18.34, not trained on either",
        source="Radford et al. 2019, table 3",
        records=("decoding",),
    ),
)
