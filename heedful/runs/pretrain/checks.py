"""Warnings about settings and texts with which masked language modelling stalls at a high loss."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from heedful.data.corpus.shards import Corpus
from heedful.errors import HeedfulWarning
from heedful.objectives import Sample
from heedful.runs.pretrain.settings import PretrainSettings

STALLING_SEQUENCES = 8  # sequences in a step up to which masked language modelling is known to stall
STALLING_REPEATED_SHARE = 0.2  # share of repeated text from which it is known to stall
PROBED_ROWS = 8  # rows from which the number of sequences in a row is estimated


def warn_of_stalling(settings: PretrainSettings, corpus: Corpus, samples: Sequence[Sample]) -> None:
    """Warn of steps with few sequences, and of repeated text, if the objective has a masked language model.

    Args:
        settings: The settings of the run.
        corpus: The corpus, whose manifest has shares of repeated text.
        samples: Packed rows of the first phase.
    """
    if "mlm" not in settings.kind.split("+"):
        return
    rows = [samples[number] for number in range(min(PROBED_ROWS, len(samples)))]
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
