"""Settings of training; this module imports nothing heavy, so that wrong settings are rejected at once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from heedful.errors import HeedfulError, SettingError
from heedful.settings import Exclusive

DIVERGENCE_ADVICE = (  # end of messages about numbers that are not finite
    "Lower train.optimizer.lr, lengthen the warm-up, look for numbers in the data that are far off, or set "
    "train.precision = float32"
)

CACHE_GB = 10.0  # default of train.cache_gb

# -- schedules --------------------------------------------------------------------------------------------------


class _CheckedRatios:
    """Base class of schedules that checks their ratios."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name in ("warmup_ratio", "min_lr_ratio"):
            if not 0 <= getattr(self, name, 0.0) <= 1:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected a share from 0 to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant(_CheckedRatios):
    """Linear warm-up, then a constant learning rate."""

    kind: Literal["constant"] = "constant"
    warmup_ratio: float = 0.0  # share of the training in which lr rises from 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear(_CheckedRatios):
    """Linear warm-up, then linear decay to 0 at the end (Hugging Face's default)."""

    kind: Literal["linear"] = "linear"
    warmup_ratio: float = 0.1  # share of the training in which lr rises from 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosine(_CheckedRatios):
    """Linear warm-up, then cosine decay to the minimum (Loshchilov and Hutter 2017, without restarts)."""

    kind: Literal["cosine"] = "cosine"
    warmup_ratio: float = 0.06  # share of the training in which lr rises from 0
    min_lr_ratio: float = 0.0  # lr at the end as a share of the peak


@dataclass(frozen=True, kw_only=True, slots=True)
class DecayFromStart(_CheckedRatios):
    """Linear warm-up, then linear decay that counts from step 0, as in the published code of Devlin et al. 2019.

    The factor of the learning rate jumps to 1 - warmup_ratio at the end of the warm-up.
    """

    kind: Literal["bert"] = "bert"
    warmup_ratio: float = 0.1  # share of the training in which lr rises from 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Noam(_CheckedRatios):
    """Linear warm-up, then decay with the inverse square root of the step (Vaswani et al. 2017, equation 3).

    With a peak of (width w)^-0.5 and w steps of warm-up, the learning rate is the paper's
    width^-0.5 min(step^-0.5, step w^-1.5).
    """

    kind: Literal["noam"] = "noam"
    warmup_ratio: float = 0.04  # share of the training in which lr rises; 4,000 of 100,000 steps

    def __post_init__(self) -> None:
        _CheckedRatios.__post_init__(self)
        if self.warmup_ratio == 0:
            raise HeedfulError("warmup_ratio is 0; expected a share above 0, since lr falls after the warm-up")


Schedule = Constant | Linear | Cosine | DecayFromStart | Noam


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """Settings of AdamW; defaults are those of the papers, with gradients clipped at norm 1."""

    kind: Literal["adamw"] = "adamw"  # the only optimizer
    lr: float  # peak learning rate, which the schedule's factor multiplies
    betas: tuple[float, float] = (0.9, 0.999)  # decay of the running means of the gradient and of its square
    eps: float = 1e-8  # added to the denominator of the update
    weight_decay: float = 0.01  # decoupled weight decay; not applied to biases and norms
    # divide running means by 1 - beta ** step, as AdamW does; false: as published for BERT
    bias_correction: bool = True
    max_grad_norm: float | None = 1.0  # gradient clipping by global norm (Pascanu et al. 2013); None: off
    layer_decay: float = 1.0  # factor of lr from each layer to the one below it; see optim.layer_lrs

    def __post_init__(self) -> None:
        for name, is_valid, expected in (
            ("lr", 0 < self.lr < math.inf, "a number above 0"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1"),
            ("eps", 0 < self.eps < math.inf, "a number above 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "a number from 0"),
            ("max_grad_norm", self.max_grad_norm is None or self.max_grad_norm > 0, 'a number above 0, or "none"'),
            ("layer_decay", 0 < self.layer_decay <= 1, "a number above 0, up to 1"),
        ):
            if not is_valid:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected {expected}")

    @classmethod
    def without_bias_correction(cls, lr: float) -> AdamW:
        """Return AdamW as in the published code of Devlin et al. 2019: no bias correction, and an eps of 1e-6."""
        return cls(lr=lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, bias_correction=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """Settings of training, with exactly one of epochs, max_steps and time_budget.

    With a time budget, training takes as many steps as fit into it, evaluations not counted. The schedule then follows
    the clock, so that two such runs are never equal.
    """

    EXCLUSIVE: ClassVar[Exclusive] = (("epochs", "max_steps", "time_budget"),)

    epochs: float | None = None  # passes over the training data; may be a fraction
    max_steps: int | None = None  # optimizer steps
    # training time without evaluations, as "10m" or "1h30m", or a number of minutes; the schedule follows the clock
    time_budget: float | str | None = None
    batch_size: int = 32  # samples of an update, summed over ranks and micro-batches
    # maximum tokens per micro-batch: more memory, same results; auto: 8192, or as many as fit into the memory of a GPU
    max_tokens_per_microbatch: int | Literal["auto"] = "auto"
    optimizer: AdamW = AdamW(lr=5e-5)
    schedule: Linear | Cosine | Constant | DecayFromStart | Noam = Linear(warmup_ratio=0.1)
    device: str = "auto"  # cpu, cuda, cuda:1, ...; auto: a GPU where there is one
    # processes that prepare batches ahead of time; 0: the training process, on a GPU in a thread
    num_workers: int = 0
    # precision of matrix products; weights and sums stay float32. float16, with loss scaling: GPUs without bfloat16
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    deterministic: bool = False  # on a GPU, use deterministic algorithms, so that equal runs have the same bits: slower
    compile: bool = False  # compile blocks with torch.compile, for GPUs; the first steps take minutes
    gradient_checkpointing: bool = False  # compute blocks again in the backward pass: less memory, a third more time
    freeze_layers: int = 0  # lower layers that stay as they are, with the embeddings and without dropout; 0: train all
    cache_gb: float = CACHE_GB  # disk space for outputs of frozen layers, in GB; 0: compute them in every step
    ema_decay: float = 0.0  # decay per step of averaged weights, which are then evaluated and saved; 0: no average
    seed: int = 1  # seed of the sample order, dropout and new heads
    max_nonfinite_steps: int = 0  # consecutive steps that may be skipped because a loss or gradient is not finite
    shrink_batch_on_oom: bool = False  # halve micro-batches when memory runs out, instead of an error
    data_parallel_shard_degree: int | Literal["all"] = 1  # ranks that share one copy of the weights; 1: no sharding
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"  # dtype in which gradients are reduced over ranks

    def __post_init__(self) -> None:
        degree = self.data_parallel_shard_degree
        if degree != "all" and degree < 1:
            raise HeedfulError(
                f'data_parallel_shard_degree is {degree}; expected a whole number of ranks from 1, or "all"'
            )
        if degree != 1 and self.compile:
            raise HeedfulError("compile is true and data_parallel_shard_degree is not 1; unset one of them")
        if degree != 1 and self.freeze_layers:
            raise HeedfulError("freeze_layers is set and data_parallel_shard_degree is not 1; unset one of them")
        if self.cache_gb != CACHE_GB and not self.freeze_layers:
            raise HeedfulError(
                f"cache_gb is {self.cache_gb:g}, which is for outputs of frozen layers, and freeze_layers is 0: leave "
                "it out"
            )
        if not 0 <= self.cache_gb < math.inf:
            raise HeedfulError(f"cache_gb is {self.cache_gb}; expected a number of GB from 0")
        if degree != 1 and self.shrink_batch_on_oom:
            raise HeedfulError(
                "shrink_batch_on_oom is true and data_parallel_shard_degree is not 1; lower max_tokens_per_microbatch "
                "instead"
            )
        for name, minimum in (
            ("batch_size", 1),
            *((("max_tokens_per_microbatch", 1),) if self.max_tokens_per_microbatch != "auto" else ()),
            ("seed", 0),
            ("max_nonfinite_steps", 0),
            ("num_workers", 0),
            ("freeze_layers", 0),
        ):
            if not minimum <= getattr(self, name) < 2**63:
                raise HeedfulError(
                    f"{name} is {getattr(self, name)}; expected a whole number from {minimum} below 2^63"
                )
        if not 0 <= self.ema_decay < 1:
            raise HeedfulError(f"ema_decay is {self.ema_decay}; expected a number from 0 to below 1")
        if isinstance(self.time_budget, str):
            object.__setattr__(self, "time_budget", parse_minutes(self.time_budget))
        names = ("epochs", "max_steps", "time_budget")
        durations = {name: value for name in names if (value := getattr(self, name)) is not None}
        if len(durations) != 1:
            problem = (
                f"{' and '.join(durations)} are given"
                if durations
                else "none of epochs, max_steps and time_budget is given"
            )
            raise HeedfulError(f"{problem}: give exactly one of {', '.join(names)}")
        for name, value in durations.items():
            if not 0 < value < math.inf:
                raise HeedfulError(f"{name} is {value}; expected a number above 0")

    @property
    def budget_seconds(self) -> float | None:
        """Time budget in seconds; None: the duration is set in epochs or steps."""
        return None if self.time_budget is None else 60 * float(self.time_budget)

    @property
    def duration(self) -> str:
        """Duration of training, for messages.

        >>> TrainSettings(epochs=3).duration, TrainSettings(max_steps=20_000).duration
        ('3 epochs', '20,000 steps')
        >>> TrainSettings(time_budget="1h30m").duration
        '90 minutes'
        >>> TrainSettings(time_budget="20s").duration
        '20 seconds'
        """
        if self.epochs is not None:
            return f"{self.epochs:g} epochs"
        if self.max_steps is not None:
            return f"{self.max_steps:,} steps"
        minutes = float(self.time_budget or 0)
        return f"{minutes:g} minutes" if minutes >= 1 else f"{60 * minutes:g} seconds"

    def with_duration(
        self, *, epochs: float | None = None, max_steps: int | None = None, time_budget: float | str | None = None
    ) -> TrainSettings:
        """Return these settings with another duration."""
        return replace(self, epochs=epochs, max_steps=max_steps, time_budget=time_budget)


def check_uncached(train: TrainSettings) -> None:
    """Raise SettingError if train.cache_gb was set for training that does not cache outputs of frozen layers."""
    if train.cache_gb != CACHE_GB:
        why = "only finetune caches outputs of frozen layers"
        raise SettingError(f"train.cache_gb would change nothing: {why}; leave it out", path="train.cache_gb")


def parse_minutes(duration: str) -> float:
    """Return a duration in minutes; a number without a unit is in minutes.

    >>> parse_minutes("1h30m"), parse_minutes("90s"), parse_minutes("45")
    (90.0, 1.5, 45.0)

    Raises:
        HeedfulError: If it is not a duration above 0.
    """
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)(?:m|$))?(?:(\d+(?:\.\d+)?)s)?", duration.strip())
    hours, minutes, seconds = (float(part or 0) for part in (match.groups() if match else (0, 0, 0)))
    total = 60 * hours + minutes + seconds / 60
    if not total > 0:
        raise HeedfulError(f'time_budget is "{duration}"; expected a duration as 45s, 10m, 2h or 1h30m')
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class FitSettings:
    """Settings of evaluation, early stopping and checkpoints."""

    eval_every_epochs: float = 1.0  # epochs between evaluations on dev
    patience: int = 0  # early stopping: evaluations without a better metric; 0: off
    load_best_at_end: bool = True  # save the weights of the best evaluation; false: of the last step
    checkpoint_every_minutes: float = 5.0  # minutes between checkpoints; one is saved after each evaluation too
    keep_last: int = 2  # number of checkpoints to keep
    keep_checkpoints: bool = False  # keep checkpoints when the run has finished; false: only the best and last weights
    async_checkpoint: bool = False  # write checkpoints while training continues: less waiting, more memory

    def __post_init__(self) -> None:
        for name, is_valid, expected in (
            ("eval_every_epochs", self.eval_every_epochs > 0, "a number above 0"),
            ("patience", self.patience >= 0, "a whole number from 0"),
            ("checkpoint_every_minutes", self.checkpoint_every_minutes >= 0, "a number from 0"),
            ("keep_last", self.keep_last >= 1, "a whole number from 1"),
        ):
            if not is_valid:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected {expected}")
