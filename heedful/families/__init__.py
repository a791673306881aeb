"""Layer 3: families are data. A family is a reader of their config.json and a table of their names, nothing more."""

from __future__ import annotations

from heedful.families import bert, distilbert, native, roberta
from heedful.families.table import Family

FAMILIES: dict[str, Family] = {
    "bert": bert.FAMILY,
    "roberta": roberta.ROBERTA,
    "xlm-roberta": roberta.XLM_ROBERTA,
    "camembert": roberta.CAMEMBERT,
    "distilbert": distilbert.FAMILY,
    "heedful": native.FAMILY,
}
