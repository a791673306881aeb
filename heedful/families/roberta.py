"""RoBERTa (Liu et al. 2019, arXiv:1907.11692), and XLM-RoBERTa and CamemBERT, which differ in their tokenizers.

Positions start at pad_token_id + 1, so a table of 514 rows is for 512 tokens.
"""

from __future__ import annotations

from heedful.families import bert, head_maps, tokenizer_defaults
from heedful.families.config_reader import ConfigReader
from heedful.families.family import Family
from heedful.families.names import NameTable
from heedful.model.config import MaskedTokens, ModelConfig


def read(reader: ConfigReader) -> ModelConfig:
    """Read BERT's keys. A key is required if its default for BERT differs from the published value."""
    reader.number("layer_norm_eps")
    return bert.read(reader, offset=reader.integer("pad_token_id", minimum=0) + 1)


def _masked_table(head: MaskedTokens) -> NameTable:
    """Return the names of the masked-language-modelling head."""
    tokens = "roberta.embeddings.word_embeddings"
    return head_maps.masked_table(head, lm="lm_head.", dense="dense", norm="layer_norm", tokens=tokens, module="head")


def size(vocabulary: int, layers: int, width: int) -> dict[str, object]:
    """Return a published configuration."""
    return bert.size(vocabulary, layers, width) | {
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
    }


_POOLER, _OUT = ("roberta.pooler.dense", "head.first.dense"), ("classifier", "head.out")
_CLASSES = (("classifier.dense", "head.first.dense"), ("classifier.out_proj", "head.out"))


def family(name: str, sizes: dict[str, dict[str, object]], tokenizer: dict[str, object] | None = None) -> Family:
    """Return the family whose architectures begin with that name."""
    return Family(
        prefix="roberta.",
        read=read,
        write=bert.write,
        body=lambda model: bert.body(model, "roberta."),
        ignored_keys=bert.IGNORED_KEYS,
        special_token_ids={"bos_token_id": "bos_or_cls", "eos_token_id": "eos_or_sep"},
        sizes=sizes,
        tokenizer_defaults=tokenizer,
        heads={
            f"{name}Model": head_maps.pooled(_POOLER),
            f"{name}ForMaskedLM": head_maps.masked(_masked_table, None),
            f"{name}ForSequenceClassification": head_maps.classes(*_CLASSES, dropout_first=True),
            f"{name}ForTokenClassification": head_maps.token_classes(_OUT),
            f"{name}ForMultipleChoice": head_maps.choice(_POOLER, _OUT, key=None),
            f"{name}ForQuestionAnswering": head_maps.span(),
        },
    )


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
    {
        "xlm-roberta-base": size(250_002, 12, 768),
        "xlm-roberta-large": size(250_002, 24, 1024),
        "bge-m3": size(250_002, 24, 1024) | {"max_position_embeddings": 8194},
    },
    tokenizer_defaults.XLM_ROBERTA,
)
CAMEMBERT = family("Camembert", {"camembert-base": size(32_005, 12, 768)}, tokenizer_defaults.CAMEMBERT)
