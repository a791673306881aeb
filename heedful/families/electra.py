"""ELECTRA (Clark et al. 2020, arXiv:2003.10555): BERT's body with a head that detects replaced tokens.

The generator, which replaces the tokens in pre-training, is published too, with a masked-language-modelling head.
"""

from __future__ import annotations

from dataclasses import replace

from heedful.families import bert, head_maps
from heedful.families.config_reader import ConfigReader, read_activation
from heedful.families.family import Family, HeadMap
from heedful.families.names import NameTable, name_rows
from heedful.model.config import MaskedTokens, ModelConfig, ReplacedTokens


def read(reader: ConfigReader) -> ModelConfig:
    """Read BERT's keys, and the dimension of the embeddings."""
    model = bert.read(reader)
    return replace(model, embedding=replace(model.embedding, width=reader.integer("embedding_size", 128)))


def write(model: ModelConfig) -> dict[str, object]:
    """Write the values of config.json."""
    return bert.write(model) | {"embedding_size": model.embedding.width}


def body(model: ModelConfig) -> NameTable:
    """Return BERT's names, and the name of the projection of the embeddings."""
    project = NameTable(rows=name_rows(("electra.embeddings_project", "embedding.project")))
    return bert.body(model, "electra.").merged_with(project)


def _masked_table(head: MaskedTokens) -> NameTable:
    """Return the names of the generator's head."""
    named = name_rows(("generator_predictions.dense", "head.dense"), ("generator_predictions.LayerNorm", "head.norm"))
    decoder = "generator_lm_head.bias" if head.tied else "generator_lm_head"
    decoder_name = "head.decoder.bias" if head.tied else "head.decoder"
    tied = {"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"} if head.tied else {}
    return NameTable(rows=(*named, *name_rows((decoder, decoder_name))), tied=tied)


def _summary_settings(reader: ConfigReader) -> head_maps.Arguments:
    """Read the settings of multiple choice: the first hidden state, through a dense layer."""
    reader.only("summary_type", "first", why="it is the published value")
    reader.only("summary_use_proj", True, why="it is the published value")
    reader.only("summary_activation", "gelu", why="it is the published value")
    return {"activation": "gelu", "dropout": reader.number("summary_last_dropout", 0.1)}


_REPLACED = name_rows(
    ("discriminator_predictions.dense", "head.first.dense"),
    ("discriminator_predictions.dense_prediction", "head.out"),
)
_OUT = ("classifier", "head.out")


def size(layers: int, width: int, heads: int, embedding: int) -> dict[str, object]:
    """Return a published configuration."""
    return bert.size(30_522, layers, width, heads) | {"embedding_size": embedding}


FAMILY = Family(
    prefix="electra.",
    read=read,
    write=write,
    body=body,
    ignored_keys=bert.IGNORED_KEYS | {"summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout"},
    heads={
        "ElectraModel": head_maps.bare(),
        "ElectraForPreTraining": HeadMap(
            head=ReplacedTokens,
            read=lambda reader, model: ReplacedTokens(activation=read_activation(reader, "hidden_act")),
            table=lambda head: NameTable(rows=_REPLACED),
        ),
        "ElectraForMaskedLM": head_maps.masked(_masked_table, None),
        "ElectraForSequenceClassification": head_maps.classes(
            ("classifier.dense", "head.first.dense"),
            ("classifier.out_proj", "head.out"),
            dropout_first=True,
            read_settings=lambda reader: {"activation": "gelu"},
        ),
        "ElectraForTokenClassification": head_maps.token_classes(_OUT),
        "ElectraForMultipleChoice": head_maps.with_settings(
            head_maps.choice(
                ("sequence_summary.summary", "head.first.dense"), _OUT, key=None, read_settings=_summary_settings
            ),
            lambda head: {"summary_last_dropout": head.dropout},
        ),
        "ElectraForQuestionAnswering": head_maps.span(),
    },
    sizes={
        "electra-small-discriminator": size(12, 256, 4, 128),
        "electra-base-discriminator": size(12, 768, 12, 768),
        "electra-large-discriminator": size(24, 1024, 16, 1024),
        "electra-small-generator": size(12, 256, 4, 128),
        "electra-base-generator": size(12, 256, 4, 768),
        "electra-large-generator": size(24, 256, 4, 1024),
    },
)
