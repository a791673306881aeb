"""Evaluation during pre-training: losses on validation samples, and scores of probes.

`runs.pretrain.run` calls `measure_share` on each rank, and `combine_shares` with the results of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from heedful.data.sampler import derive_seed
from heedful.device import autocast
from heedful.errors import HeedfulError
from heedful.objectives import Sample, SelfSupervised
from heedful.random_streams import Stream
from heedful.runs.pretrain.probes import ProbeSet, probe_scores
from heedful.train.fit import EvalResult
from heedful.train.trainer import Trainer


def measure_share(
    trainer: Trainer, objective: SelfSupervised, validation: Sequence[Sample], probes: Sequence[ProbeSet]
) -> dict[str, tuple[float, float]]:
    """Evaluate this rank's share of the validation samples, with the same masks at each evaluation.

    Returns:
        (sum over targets, number of targets) by name of the metric. On the first rank, the probes are among the
        metrics, each with its score as the sum and the number 1.
    """
    sums: dict[str, tuple[float, float]] = {}
    ranks = trainer.ranks
    device = trainer.device
    for index in range(ranks.rank, len(validation), ranks.size):
        key = derive_seed(trainer.settings.seed, Stream.VALIDATION, index)
        batch = objective.batch([validation[index]], [key]).to(device)
        with autocast(device, trainer.precision):
            for name, (batch_sum, batch_count) in objective.measure(trainer.loaded, batch).items():
                total, count = sums.get(name, (0.0, 0.0))
                sums[name] = total + batch_sum, count + batch_count
    if ranks.is_main:
        sums |= {name: (score, 1.0) for name, score in probe_scores(probes, trainer.loaded).items()}
    return sums


def combine_shares(objective: SelfSupervised, shares: Sequence[dict[str, tuple[float, float]]]) -> EvalResult:
    """Combine the sums of all ranks into the result of an evaluation.

    The metrics of the result are the mean of each metric over all targets, the weighted sum of the loss terms as
    "loss", and the number of targets of the first term as "count". If the first term has an accuracy, it is a
    classification over a vocabulary, and "perplexity" is exp of its loss. Checkpoints are ranked by the first term's
    accuracy, or by the negated loss if it has none.

    Args:
        objective: The objective, for the weights of its loss terms.
        shares: The result of `measure_share` on each rank.

    Raises:
        HeedfulError: If the validation samples have no targets.
    """
    names = list(dict.fromkeys(name for share in shares for name in share))
    totals = {name: sum(share.get(name, (0.0, 0.0))[0] for share in shares) for name in names}
    counts = {name: sum(share.get(name, (0.0, 0.0))[1] for share in shares) for name in names}
    means: dict[str, float] = {name: totals[name] / counts[name] for name in names if counts[name]}
    loss_names = [name for name in names if name.endswith("_loss")]  # one for each term, in the order of the terms
    if not loss_names or loss_names[0] not in means:
        raise HeedfulError("the validation split has no target: raise eval_fraction, or give longer documents")
    loss = sum(weight * means.get(name, 0.0) for weight, name in zip(objective.term_weights, loss_names, strict=True))
    metrics = {"loss": loss}
    accuracy_name = loss_names[0].removesuffix("_loss") + "_accuracy"
    if accuracy_name in means:
        metrics["perplexity"] = math.exp(min(means[loss_names[0]], 700.0))  # e^700 is still a finite float
    return EvalResult(
        metric_value=means.get(accuracy_name, -loss),
        tie_breaker=-loss,
        metrics=metrics | means | {"count": counts[loss_names[0]]},
    )
