"""Settings of training; imports nothing heavy, so that a wrong one is told at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from heedful.errors import HeedfulError

STEADY = (  # what to do where numbers are not finite
    "Lower train.optimiser.rate, lengthen the warm-up, look for numbers in the data that are far off, or set "
    "train.precision = float32"
)

# -- schedules --------------------------------------------------------------------------------------------------


class _Shares:
    __slots__ = ()

    def __post_init__(self) -> None:
        for name in ("warmup", "floor"):
            if not 0 <= getattr(self, name, 0.0) <= 1:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected a share from 0 to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant(_Shares):
    """Up over the warm-up, then 1."""

    kind: Literal["constant"] = "constant"
    warmup: float = 0.0  # a share of the whole, as in all schedules


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear(_Shares):
    """Up over the warm-up, then down to 0 at the end, along straight lines (Hugging Face's)."""

    kind: Literal["linear"] = "linear"
    warmup: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosine(_Shares):
    """Up over the warm-up, then down to the floor along half a cosine (Loshchilov and Hutter 2017, no restarts)."""

    kind: Literal["cosine"] = "cosine"
    warmup: float = 0.06
    floor: float = 0.0  # a share of the rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Google(_Shares):
    """As linear, but the way down begins at 1 at step 0, so that the warm-up ends with a jump from 1 to 1 - warmup.

    So does the published code of Devlin et al. 2019.
    """

    kind: Literal["google"] = "google"
    warmup: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Noam(_Shares):
    """Up over the warm-up, then down as the inverse square root of the step (Vaswani et al. 2017, equation 3).

    With the rate (width w)^-0.5 and w steps of warm-up it is the paper's width^-0.5 min(step^-0.5, step w^-1.5).
    """

    kind: Literal["noam"] = "noam"
    warmup: float = 0.04  # 4,000 of 100,000 steps

    def __post_init__(self) -> None:
        _Shares.__post_init__(self)
        if self.warmup == 0:
            raise HeedfulError("warmup is 0; expected a share above 0, from the end of which the rate falls")


Schedule = Constant | Linear | Cosine | Google | Noam


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """Settings; the defaults are those of the papers, with a clip at norm 1."""

    kind: Literal["adamw"] = "adamw"
    rate: float  # the peak, which the schedule's factor multiplies
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay: float = 0.01  # of weights, apart from the gradient
    bias_correction: bool = True
    clip: float | None = 1.0  # the most that the norm of all gradients together may be (Pascanu et al. 2013)
    layer_decay: float = 1.0  # see optim.layer_rates

    def __post_init__(self) -> None:
        for name, right, expected in (
            ("rate", 0 < self.rate < math.inf, "a number above 0"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1"),
            ("eps", 0 < self.eps < math.inf, "a number above 0"),
            ("decay", 0 <= self.decay < math.inf, "a number from 0"),
            ("clip", self.clip is None or self.clip > 0, 'a number above 0, or "none"'),
            ("layer_decay", 0 < self.layer_decay <= 1, "a number above 0, up to 1"),
        ):
            if not right:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected {expected}")

    @classmethod
    def google(cls, rate: float) -> AdamW:
        """As in the published code of Devlin et al. 2019: no bias correction, and an eps of 1e-6."""
        return cls(rate=rate, betas=(0.9, 0.999), eps=1e-6, decay=0.01, bias_correction=False, clip=1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Epochs:
    """So many times over the samples; the last one may be a part."""

    kind: Literal["epochs"] = "epochs"
    count: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """So many updates."""

    kind: Literal["steps"] = "steps"
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Minutes:
    """As many steps as fit, evaluations not counted; the schedule follows the clock, so no two such runs are equal."""

    kind: Literal["minutes"] = "minutes"
    count: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """How to train."""

    length: Epochs | Steps | Minutes = Epochs(count=3.0)
    batch: int = 32  # samples of an update, over all ranks
    tokens: int = 8192  # of a micro-batch, at most; memory grows with it, and results do not depend on it
    optimiser: AdamW = AdamW(rate=5e-5)
    schedule: Linear | Cosine | Constant | Google | Noam = Linear(warmup=0.1)
    device: Literal["cpu", "cuda"] | None = None  # None: where the model is, which commands read to the processor
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # of products; weights and sums stay float32
    compile: bool = (
        False  # blocks are compiled by PyTorch, once for all layers: for a GPU; the first steps take minutes
    )
    recompute: bool = False  # blocks run again for their gradient: less memory, a third more time
    ema_decay: float = 0.0  # of averaged weights, which then are evaluated and saved, each step; 0: no average
    seed: int = 1  # of the order, of dropout, and of fresh heads
    skip: int = 0  # steps in a row that may be left out because a number is not finite
    halve: bool = False  # where memory is not enough, smaller micro-batches instead of an error
    shard: int | Literal["all"] = 1  # ranks that share one copy of weights, gradients and moments; 1: each has a copy
    sums: Literal["float32", "bfloat16"] = "float32"  # in which gradients of several ranks are added

    def __post_init__(self) -> None:
        if self.shard != "all" and self.shard < 1:
            raise HeedfulError(f'shard is {self.shard}; expected a whole number of ranks from 1, or "all"')
        if self.shard != 1 and self.compile:
            raise HeedfulError("compile is for ranks that each have a copy: unset it, or shard")
        if self.shard != 1 and self.halve:
            raise HeedfulError("halve is for ranks that each have a copy: with shard, lower tokens instead")
        for name, least in (("batch", 1), ("tokens", 1), ("seed", 0), ("skip", 0)):
            if not least <= getattr(self, name) < 2**63:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected a whole number from {least} below 2^63")
        if not 0 <= self.ema_decay < 1:
            raise HeedfulError(f"ema_decay is {self.ema_decay}; expected a number from 0 to below 1")
        if not 0 < self.length.count < math.inf:
            raise HeedfulError(f"length.count is {self.length.count}; expected a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class FitSettings:
    """When to look and what to keep."""

    evaluate: float = 1.0  # epochs between two evaluations on dev
    patience: int = 0  # evaluations without a better metric after which training stops; 0: never
    keep: Literal["best", "last"] = "best"  # the weights that become the model
    save_minutes: float = 5.0  # between two checkpoints; there is one after each evaluation too
    checkpoints: int = 2  # that stay
    keep_state: bool = False  # checkpoints stay when the run is finished; else only the best and the last weights do
    behind: bool = False  # checkpoints are written while training goes on, from a copy: less waiting, more memory

    def __post_init__(self) -> None:
        for name, right, expected in (
            ("evaluate", self.evaluate > 0, "a number above 0"),
            ("patience", self.patience >= 0, "a whole number from 0"),
            ("save_minutes", self.save_minutes >= 0, "a number from 0"),
            ("checkpoints", self.checkpoints >= 1, "a whole number from 1"),
        ):
            if not right:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected {expected}")
