"""Layer 6: objectives. Examples become samples, samples a packed batch, and a batch a loss with its count."""

from __future__ import annotations

from heedful.objectives.base import Batch, Loss, Objective, PerEpochSamples, Sample, SelfSupervised, Term

__all__ = ["Batch", "Loss", "Objective", "PerEpochSamples", "Sample", "SelfSupervised", "Term"]
