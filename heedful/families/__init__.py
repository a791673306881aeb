"""Model families as data: for each model_type a reader of its config.json and a table of its tensor names."""

from __future__ import annotations

from heedful.families import albert, bert, classic, distilbert, electra, gpt2, heedful, modernbert, roberta, t5, xlnet
from heedful.families.family import Family

FAMILIES: dict[str, Family] = {
    "bert": bert.FAMILY,
    "roberta": roberta.ROBERTA,
    "xlm-roberta": roberta.XLM_ROBERTA,
    "camembert": roberta.CAMEMBERT,
    "distilbert": distilbert.FAMILY,
    "albert": albert.FAMILY,
    "electra": electra.FAMILY,
    "xlnet": xlnet.FAMILY,
    "t5": t5.FAMILY,
    "gpt2": gpt2.FAMILY,
    "modernbert": modernbert.FAMILY,
    "heedful": heedful.FAMILY,
    "heedful-classic": classic.FAMILY,
}

DEFAULT_FAMILIES = {  # objective -> family of a fresh model, unless one is named
    "mlm": "bert",
    "mlm+nsp": "bert",
    "mlm+sop": "albert",
    "plm": "xlnet",
    "span_corruption": "t5",
    "clm": "gpt2",
    "rtd": "electra",
    "distillation": "bert",
}
