"""Model families as data: a reader of config.json and a table of tensor names for each model_type.

`checkpoint` finds the family of a model folder in `FAMILIES`.
"""

from __future__ import annotations

from heedful.errors import ModelError
from heedful.families import (
    albert,
    bart,
    bert,
    classic,
    deberta,
    distilbert,
    electra,
    gpt2,
    heedful,
    llama,
    marian,
    modernbert,
    mpnet,
    roberta,
    rotary_encoders,
    t5,
    xlnet,
)
from heedful.families.family import Family

FAMILIES: dict[str, Family] = {
    "bert": bert.FAMILY,
    "roberta": roberta.ROBERTA,
    "xlm-roberta": roberta.XLM_ROBERTA,
    "camembert": roberta.CAMEMBERT,
    "distilbert": distilbert.FAMILY,
    "mpnet": mpnet.FAMILY,
    "albert": albert.FAMILY,
    "electra": electra.FAMILY,
    "xlnet": xlnet.FAMILY,
    "t5": t5.FAMILY,
    "bart": bart.BART,
    "mbart": bart.MBART,
    "marian": marian.FAMILY,
    "gpt2": gpt2.FAMILY,
    "modernbert": modernbert.FAMILY,
    "deberta-v2": deberta.FAMILY,
    "nomic_bert": rotary_encoders.NOMIC_BERT,
    "gte": rotary_encoders.GTE_NATIVE,
    "new": rotary_encoders.GTE_HUB,
    "jina_embeddings_v3": rotary_encoders.JINA_EMBEDDINGS_V3,
    "eurobert": llama.EUROBERT,
    "llama": llama.LLAMA,
    "qwen3": llama.QWEN3,
    "heedful": heedful.FAMILY,
    "heedful-classic": classic.FAMILY,
}


def register(model_type: str, family: Family) -> None:
    """Add a family, so that its model folders can be loaded, trained and saved.

    Args:
        model_type: Value of model_type in config.json.
        family: The family.

    Raises:
        ModelError: If another family has that model_type.
    """
    if model_type in FAMILIES:
        raise ModelError(f'a family with the model_type "{model_type}" is registered already: choose another name')
    FAMILIES[model_type] = family


def unregister(model_type: str) -> None:
    """Remove a registered family."""
    del FAMILIES[model_type]


DEFAULT_FAMILIES = {  # objective -> model_type of a fresh model, if the user names none
    "mlm": "bert",
    "mlm+nsp": "bert",
    "mlm+sop": "albert",
    "plm": "xlnet",
    "span_corruption": "t5",
    "clm": "gpt2",
    "rtd": "electra",
    "distillation": "bert",
}
