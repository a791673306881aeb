"""RoBERTa (Liu et al. 2019, arXiv:1907.11692), and XLM-RoBERTa and CamemBERT, which differ in their tokenizers.

Positions start at pad_token_id + 1, so a table of 514 rows serves 512 tokens.
"""

from __future__ import annotations

from typing import Any

from heedful.families import bert
from heedful.families.bert import masked_table, read_tied, write_tied
from heedful.families.table import Family, HeadEntry, Keys, Table, read_classes, read_tokens, rows, write_labels
from heedful.model.config import Choice, Classes, MaskedTokens, ModelConfig, Pooled, Span, TokenClasses


def read(keys: Keys) -> ModelConfig:
    """As BERT's, but what BERT's code would assume must stand in the file: the published values are others."""
    keys.number("layer_norm_eps")
    return bert.read(keys, offset=keys.integer("pad_token_id", least=0) + 1)


def _dropout(keys: Keys, model: ModelConfig) -> float:
    given: float | None = keys.number("classifier_dropout", None)
    return model.embedding.dropout if given is None else given


def _write_classifier(head: Classes | TokenClasses) -> dict[str, Any]:
    return write_labels(head) | {"classifier_dropout": head.dropout}


_POOLER = ("roberta.pooler.dense", "head.first.dense")
_CLASSES = rows(("classifier.dense", "head.first.dense"), ("classifier.out_proj", "head.out"))
_OUT = rows(("classifier", "head.out"))


def family(name: str, sizes: dict[str, dict[str, Any]]) -> Family:
    """The family whose architectures begin with that name."""
    return Family(
        prefix="roberta.",
        read=read,
        write=bert.write,
        body=bert.body("roberta."),
        irrelevant=bert.IRRELEVANT_HERE,
        sizes=sizes,
        heads={
            f"{name}Model": HeadEntry(
                head=Pooled, read=lambda keys, model: Pooled(), table=lambda head: Table(rows=rows(_POOLER))
            ),
            f"{name}ForMaskedLM": HeadEntry(
                head=MaskedTokens,
                read=lambda keys, model: MaskedTokens(norm_eps=model.embedding.norm_eps, tied=read_tied(keys)),
                write=write_tied,
                table=lambda head: masked_table(
                    head,
                    lm="lm_head.",
                    dense="dense",
                    norm="layer_norm",
                    tokens="roberta.embeddings.word_embeddings",
                    ours="head",
                ),
            ),
            f"{name}ForSequenceClassification": HeadEntry(
                head=Classes,
                read=lambda keys, model: read_classes(
                    keys, dropout=_dropout(keys, model), dropout_first=_dropout(keys, model)
                ),
                write=_write_classifier,
                table=lambda head: Table(rows=_CLASSES),
            ),
            f"{name}ForTokenClassification": HeadEntry(
                head=TokenClasses,
                read=lambda keys, model: read_tokens(keys, dropout=_dropout(keys, model)),
                write=_write_classifier,
                table=lambda head: Table(rows=_OUT),
            ),
            f"{name}ForMultipleChoice": HeadEntry(
                head=Choice,
                read=lambda keys, model: Choice(dropout=model.embedding.dropout),
                table=lambda head: Table(rows=rows(_POOLER) + _OUT),
            ),
            f"{name}ForQuestionAnswering": HeadEntry(
                head=Span,
                read=lambda keys, model: Span(),
                table=lambda head: Table(rows=rows(("qa_outputs", "head.out"))),
            ),
        },
    )


def size(vocabulary: int, layers: int, width: int) -> dict[str, Any]:
    """A published configuration."""
    return bert.size(vocabulary, layers, width) | {
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
    }


ROBERTA = family(
    "Roberta",
    {
        "roberta-base": size(50_265, 12, 768),
        "roberta-large": size(50_265, 24, 1024),
        "distilroberta-base": size(50_265, 6, 768),
    },
)
XLM_ROBERTA = family(
    "XLMRoberta",
    {"xlm-roberta-base": size(250_002, 12, 768), "xlm-roberta-large": size(250_002, 24, 1024)},
)
CAMEMBERT = family("Camembert", {"camembert-base": size(32_005, 12, 768)})
