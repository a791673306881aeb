"""Causal language modelling: predict each token from the tokens before it (Radford et al. 2019, section 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.objectives.base import Batch, Sample, SelfSupervised, Term, cross_entropy_term, pack_samples
from heedful.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class CausalLM(SelfSupervised):
    """The mean of -log p(token | earlier tokens of its sequence), over all tokens of each sequence but the first one.

    It makes no random choices, so every epoch has the same targets.
    """

    tokenizer: Tokenizer
    head = "language_model"

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return the batch with the next token as target at all positions but the last one of each sequence."""
        packed = pack_samples(samples)
        has_next = np.ones(packed.bounds[-1], dtype=np.bool_)
        if len(has_next):
            # for an empty sequence this is the last position of the sequence before it, or -1, the last of the batch
            has_next[np.array(packed.bounds[1:]) - 1] = False
        rows = torch.from_numpy(has_next.nonzero()[0])
        return Batch(packed=packed, targets=packed.tokens[rows + 1], weights=torch.ones(len(rows)), rows=rows)

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """Return one term, the cross-entropy of the next tokens."""
        decoder = loaded.config.model.decoder
        if decoder is None or not decoder.causal:
            raise HeedfulError("this model attends to later tokens: causal pre-training needs a decoder")
        assert loaded.head is not None and batch.rows is not None
        states = loaded.hidden_states(batch.packed, output_rows=batch.rows)
        return (cross_entropy_term("clm", loaded.head(states, batch.packed), batch.targets),)
