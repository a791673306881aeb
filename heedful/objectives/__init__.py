"""Layer 6: objectives. They pack samples into a batch, and compute the loss of a batch with its target count."""

from __future__ import annotations

from heedful.objectives.base import Batch, Loss, Objective, PerEpochSamples, Sample, SelfSupervised, Term

__all__ = ["Batch", "Loss", "Objective", "PerEpochSamples", "Sample", "SelfSupervised", "Term"]
