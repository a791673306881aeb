"""Layer 6: objectives. Examples become samples, samples a packed batch, and a batch a loss with its count."""

from __future__ import annotations

from heedful.objectives.base import Batch, Changing, Loss, Objective, Pretext, Sample, Term

__all__ = ["Batch", "Changing", "Loss", "Objective", "Pretext", "Sample", "Term"]
