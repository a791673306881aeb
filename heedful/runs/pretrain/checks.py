"""Warnings about settings and texts with which masked language modelling stalls at a high loss.

`runs.pretrain.run` calls them before the first step.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from heedful.data.corpus.shards import Corpus
from heedful.errors import HeedfulWarning
from heedful.objectives import Sample
from heedful.runs.pretrain.settings import PretrainSettings

STALLING_SEQUENCES = 8  # masked language modelling is known to stall with this many sequences in a step, or fewer
STALLING_REPEATED_SHARE = 0.2  # it is known to stall with this share of repeated text, or a larger one
PROBED_ROWS = 8  # packed rows that are used to estimate how many sequences a row has


def warn_of_stalling(settings: PretrainSettings, corpus: Corpus, samples: Sequence[Sample]) -> None:
    """Warn of steps with few sequences, and of repeated text, if the objective has a masked language model.

    Args:
        settings: The settings of the run.
        corpus: The corpus, whose manifest has shares of repeated text.
        samples: Packed rows of the first phase.
    """
    if "mlm" not in settings.kind.split("+"):
        return
    rows = [samples[index] for index in range(min(PROBED_ROWS, len(samples)))]
    sequences = settings.train.batch_size * sum(len(row.bounds) - 1 for row in rows) / len(rows)
    if sequences <= STALLING_SEQUENCES:
        warnings.warn(
            f"a step has about {sequences:.0f} sequences: with {STALLING_SEQUENCES} or fewer, masked language "
            "modelling is known to stall near the frequencies of tokens (a loss of about 7): raise train.batch_size",
            HeedfulWarning,
            stacklevel=2,
        )
    repeated = corpus.about.get("repeated", {})  # kind of text, such as documents or lines -> share that is repeated
    worst = max(repeated, key=lambda name: repeated[name], default=None)
    if worst is not None and repeated[worst] >= STALLING_REPEATED_SHARE:
        remedy = ""
        if repeated.get("documents", 0.0) >= STALLING_REPEATED_SHARE:
            remedy = 'set corpus.dedup = "exact", or '
        warnings.warn(
            f"{100 * repeated[worst]:.0f} % of the {worst} of this text are repeated: on repeated lines masked "
            f"language modelling is known to stall: {remedy}clean the text",
            HeedfulWarning,
            stacklevel=2,
        )
