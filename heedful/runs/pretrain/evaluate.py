"""Evaluation during pre-training: losses on validation samples, and probes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from heedful.data.sampler import derive_seed
from heedful.errors import HeedfulError
from heedful.objectives import Sample, SelfSupervised
from heedful.random_streams import Stream
from heedful.runs.pretrain.probes import ProbeSet, probe_scores
from heedful.train.fit import EvalResult
from heedful.train.trainer import Trainer


def measure_share(
    trainer: Trainer, objective: SelfSupervised, held: Sequence[Sample], probes: Sequence[ProbeSet]
) -> dict[str, tuple[float, float]]:
    """Sums and counts over this rank's share of the validation samples, with the same masks each time; probe scores."""
    sums: dict[str, tuple[float, float]] = {}
    ranks, device = trainer.ranks, trainer.device
    for number in range(ranks.rank, len(held), ranks.size):
        batch = objective.batch([held[number]], [derive_seed(trainer.settings.seed, Stream.VALIDATION, number)]).to(
            device
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=trainer.precision == torch.bfloat16):
            for name, (total, count) in objective.measure(trainer.loaded, batch).items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + total, before[1] + count
    if ranks.is_main:
        sums |= {name: (score, 1.0) for name, score in probe_scores(probes, trainer.loaded).items()}
    return sums


def combine_shares(objective: SelfSupervised, shares: Sequence[dict[str, tuple[float, float]]]) -> EvalResult:
    """Means over all ranks, and the perplexity, exp of the first term's loss, if that is over a vocabulary.

    Checkpoints are ranked by the first term's accuracy, or by the negated loss if it has none.

    Raises:
        HeedfulError: If the validation samples have no targets.
    """
    names = list(dict.fromkeys(name for share in shares for name in share))
    sums = {name: [sum(share.get(name, (0.0, 0.0))[at] for share in shares) for at in (0, 1)] for name in names}
    numbers: dict[str, float] = {name: total / count for name, (total, count) in sums.items() if count}
    terms = [name for name in names if name.endswith("_loss")]
    if not terms or terms[0] not in numbers:
        raise HeedfulError("the validation split has no target: raise eval_fraction, or give longer documents")
    loss = sum(weight * numbers.get(name, 0.0) for weight, name in zip(objective.term_weights, terms, strict=True))
    total = {"loss": loss}
    if (accuracy := terms[0].removesuffix("_loss") + "_accuracy") in numbers:
        total["perplexity"] = math.exp(min(numbers[terms[0]], 700.0))
    return EvalResult(
        metric_value=numbers.get(accuracy, -loss),
        tie_breaker=-loss,
        metrics=total | numbers | {"count": sums[terms[0]][1]},
    )
