"""Loss scaling for float16, in which small gradients would be lost (Micikevicius et al. 2018, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

# constants of torch.amp.GradScaler, whose loss is a mean over samples
INITIAL_EXPONENT = 16
GROWTH_INTERVAL = 2000  # steps
MIN_SCALE = 2.0**-14  # with less, no gradient would be lost for being too large, so an infinite one is no overflow


@dataclass(kw_only=True, slots=True)
class LossScale:
    """The factor of the loss in the backward pass; it is halved after an overflow, and doubled after 2,000 steps.

    The optimizer divides gradients by the factor. `torch.amp.GradScaler` is not used: it needs a
    `torch.optim.Optimizer` and would read all gradients again to find an overflow, which their norm already shows.
    """

    scale: float  # a power of 2, so that scaling rounds nothing
    steps: int = 0  # consecutive steps without an overflow, since the last change
    overflows: int = 0  # steps that were skipped because of an overflow

    @classmethod
    def for_batch(cls, batch_size: int) -> LossScale:
        """Return the initial scale for a loss that is a sum over `batch_size` samples.

        >>> LossScale.for_batch(32).scale, LossScale.for_batch(10**6).scale
        (2048.0, 1.0)
        """
        return cls(scale=2.0 ** max(0, INITIAL_EXPONENT + 1 - batch_size.bit_length()))

    def update(self, *, is_finite: bool) -> bool:
        """Adapt the scale after a step; returns whether the step overflowed: the next one has a smaller scale.

        Args:
            is_finite: Whether all gradients of the step are finite.
        """
        if is_finite:
            self.steps += 1
            if self.steps == GROWTH_INTERVAL:
                self.scale, self.steps = 2 * self.scale, 0
            return False
        if self.scale <= MIN_SCALE:
            return False
        self.scale, self.steps, self.overflows = self.scale / 2, 0, self.overflows + 1
        return True
