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

STALLING_SEQUENCES = 8  # a warning is given for this number of sequences in a step, or fewer
STALLING_REPEATED_SHARE = 0.2  # a warning is given if this share of the text is repeated, or more
PROBED_ROWS = 8  # packed rows from which the number of sequences in a row is estimated


def warn_of_stalling(settings: PretrainSettings, corpus: Corpus, samples: Sequence[Sample]) -> None:
    """Warn of steps with few sequences, and of repeated text, if masked language modelling is part of the objective.

    Args:
        settings: The settings of the run.
        corpus: The corpus, whose manifest has shares of repeated text.
        samples: Packed rows of the first phase.
    """
    if "mlm" not in settings.kind.split("+"):
        return
    rows = [samples[index] for index in range(min(PROBED_ROWS, len(samples)))]
    num_sequences = sum(len(row.bounds) - 1 for row in rows)
    sequences_per_step = settings.train.batch_size * num_sequences / len(rows)
    if sequences_per_step <= STALLING_SEQUENCES:
        warnings.warn(
            f"a step has about {sequences_per_step:.0f} sequences: with {STALLING_SEQUENCES} or fewer, masked language "
            "modelling is known to learn only the frequencies of tokens (a loss of about 7): raise train.batch_size",
            HeedfulWarning,
            stacklevel=2,
        )
    repeated_shares = corpus.about.get("repeated", {})  # share that is repeated, by unit: "documents", "segments"
    worst_unit = max(repeated_shares, key=lambda unit: repeated_shares[unit], default=None)
    if worst_unit is not None and repeated_shares[worst_unit] >= STALLING_REPEATED_SHARE:
        percentage = f"{100 * repeated_shares[worst_unit]:.0f} %"
        remedy = ""
        if repeated_shares.get("documents", 0.0) >= STALLING_REPEATED_SHARE:
            remedy = 'set corpus.dedup = "exact", or '
        warnings.warn(
            f"{percentage} of the {worst_unit} of this text are repeated: on repeated lines masked language modelling "
            f"is known to stall: {remedy}clean the text",
            HeedfulWarning,
            stacklevel=2,
        )
