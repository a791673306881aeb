"""TokenLoss: the mean loss per token, and the perplexity of language models."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from heedful.errors import HeedfulError
from heedful.tasks.metrics.base import (
    Ids,
    Result,
    Values,
    as_numbers,
    exact_sum,
    example_name,
    from_exact,
    require_examples,
    require_same_length,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLoss:
    """The mean loss per token in nats, and the perplexity exp(Σ loss / Σ tokens) (Jelinek et al. 1977).

    >>> round(TokenLoss().update([2.0, 4.0], [1, 2]).compute()["perplexity"], 3)
    7.389
    """

    total: int = 0  # sum of losses, in units of 2^-1126 nats
    tokens: int = 0

    def update(self, losses: Values, tokens: Values, ids: Ids = None) -> TokenLoss:
        """Add sequences by the sum of their losses, and by how many tokens they have.

        A sequence may also be a whole batch; the rounding of its sum then depends on the batch size.
        """
        losses = as_numbers(losses, "loss", ids)
        counts = as_numbers(tokens, "number of tokens", ids)
        require_same_length(len(losses), len(counts), "losses", "numbers of tokens")
        bad = (counts < 0) | (counts % 1 != 0)
        if bad.any():
            index = int(bad.argmax())
            raise HeedfulError(
                f"the number of tokens of {example_name(ids, index)} is {counts[index]:g}: give a whole number"
            )
        return replace(self, total=self.total + exact_sum(losses), tokens=self.tokens + int(counts.sum()))

    def merge_state(self, incoming: TokenLoss) -> TokenLoss:
        """Return the metric over the examples of both metrics."""
        return replace(self, total=self.total + incoming.total, tokens=self.tokens + incoming.tokens)

    def compute(self) -> Result:
        """Return {"loss", "perplexity", "tokens", "notes"}. The loss is in nats per token."""
        require_examples(self.tokens, "the loss")
        loss = from_exact(self.total, self.tokens)
        try:
            perplexity, notes = math.exp(loss), []
        except OverflowError:
            perplexity, notes = math.inf, [f"the perplexity exp({loss:g}) is more than a float holds"]
        return {"loss": loss, "perplexity": perplexity, "tokens": self.tokens, "notes": notes}
