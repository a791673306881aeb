"""Warnings about settings and texts that make pre-training stall."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from heedful.data.corpus.shards import Corpus
from heedful.errors import HeedfulWarning
from heedful.objectives import Sample
from heedful.runs.pretrain.settings import PretrainSettings

FEW = 8  # sequences of a step up to which masked language modelling is known to stall
REPEATED = 0.2  # share of repeated segments from which it stalls too


def warn_of_stalling(settings: PretrainSettings, corpus: Corpus, samples: Sequence[Sample]) -> None:
    """Warn of steps with few sequences and of repeated text, which are known to stall masked language modelling."""
    if "mlm" not in settings.kind.split("+"):
        return
    probe = [samples[number] for number in range(min(8, len(samples)))]
    sequences = settings.train.batch_size * sum(len(sample.bounds) - 1 for sample in probe) / len(probe)
    if sequences <= FEW:
        warnings.warn(
            f"a step has about {sequences:.0f} sequences: with {FEW} or fewer, masked language modelling is known to "
            "stall near the frequencies of tokens (a loss of about 7): raise train.batch_size",
            HeedfulWarning,
            stacklevel=2,
        )
    repeated = corpus.about.get("repeated", {})
    worst = max(repeated, key=lambda name: repeated[name], default=None)
    if worst is not None and repeated[worst] >= REPEATED:
        remedy = 'set corpus.dedup = "exact", or ' if repeated.get("documents", 0.0) >= REPEATED else ""
        warnings.warn(
            f"{100 * repeated[worst]:.0f} % of the {worst} of this text are repeated: on repeated lines masked "
            f"language modelling is known to stall: {remedy}clean the text",
            HeedfulWarning,
            stacklevel=2,
        )
