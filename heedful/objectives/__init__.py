"""Training objectives: each packs samples into a batch, and computes the sum of the losses and the target count."""

from __future__ import annotations

from heedful.objectives.base import Batch, Loss, Objective, PerEpochSamples, Sample, SelfSupervised, Term

__all__ = ["Batch", "Loss", "Objective", "PerEpochSamples", "Sample", "SelfSupervised", "Term"]
