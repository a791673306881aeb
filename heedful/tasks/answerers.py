"""What answers an input, by the kind of head."""

from __future__ import annotations

from heedful.tasks.base import Answerer
from heedful.tasks.choose import CHOOSE
from heedful.tasks.classify import CLASSIFY
from heedful.tasks.embed import COMPARE, EMBED
from heedful.tasks.extract import EXTRACT
from heedful.tasks.fill import FILL
from heedful.tasks.following import FOLLOWING
from heedful.tasks.rewrite import REWRITE
from heedful.tasks.tag import TAG

ANSWERERS: dict[str, tuple[Answerer, ...]] = {  # by the kind of head; the first that knows an input's form answers it
    "masked_lm": (FILL,),
    "next_sentence": (FOLLOWING,),
    "pretraining": (FILL, FOLLOWING),
    "sequence_classification": (CLASSIFY,),
    "token_classification": (TAG,),
    "question_answering": (EXTRACT,),
    "multiple_choice": (CHOOSE,),
    "embedding": (EMBED, COMPARE),
    "language_model": (REWRITE,),
}
