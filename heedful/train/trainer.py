"""Trainer: `for step in trainer:` trains, and what stands below that line is the extension point."""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from heedful.checkpoint import ModelBundle
from heedful.data.sampler import BatchPlan, BatchSampler, assign_to_ranks, derive_seed, group, split_microbatches
from heedful.device import resolve_device, resolve_dtype
from heedful.errors import HeedfulError, HeedfulWarning
from heedful.model.stack import Transformer
from heedful.objectives import Objective, PerEpochSamples, Sample
from heedful.objectives.base import term_scales
from heedful.train.compiled import CompiledBlocks
from heedful.train.ddp import Replicated, trainable_parameters
from heedful.train.ema import WeightAverage
from heedful.train.lazy_embedding import LazyRows, make_embeddings_lazy
from heedful.train.optim import Optimizer, lr_factor
from heedful.train.ranks import SINGLE_PROCESS, Ranks
from heedful.train.settings import TrainSettings
from heedful.train.step import DivergedError, Stage, Step, StoppedError, divergence_error, round_to_groups

if TYPE_CHECKING:
    from heedful.train.fsdp import Sharded

__all__ = [
    "DivergedError",
    "Stage",
    "Step",
    "StoppedError",
    "TrainSettings",
    "Trainer",
    "select_prefix",
]

DROPOUT = 1  # what a seed is mixed with, so that what it draws here is drawn nowhere else


class Trainer:
    """Trains a model on samples; `loaded` is in eval mode, and has the current weights, in float32, once it settled."""

    def __init__(
        self,
        loaded: ModelBundle,
        objective: Objective,
        samples: Sequence[Sample],
        settings: TrainSettings,
        ranks: Ranks = SINGLE_PROCESS,
        *,
        later: Sequence[Stage] = (),
    ) -> None:
        self.objective, self.settings, self.ranks = objective, settings, ranks  # the objective of the stage
        self._tables: list[nn.Embedding] = []
        self._models: list[nn.Module] = [loaded, *([] if objective.beside is None else [objective.beside])]
        self.loaded = loaded
        self.device = next(loaded.parameters()).device if settings.device is None else resolve_device(settings.device)
        for model in self._models:
            model.to(self.device)
        self._mode(train=False)
        self.stages = (Stage(0.0, samples, objective=objective), *later)
        self._objectives = [stage.objective or objective for stage in self.stages]
        if not all(len(stage.samples) for stage in self.stages):
            raise HeedfulError("there is nothing to train on: no example gave a sample")
        self._orders = [
            BatchSampler(
                count=len(stage.samples),
                batch=round_to_groups(stage.batch_size or settings.batch_size, learned.together),
                seed=settings.seed,
            )
            for stage, learned in zip(self.stages, self._objectives, strict=True)
        ]
        self.stage, self._begun, self._epochs = 0, 0, 0.0  # the step and the epoch in which the stage began
        self.precision = resolve_dtype(settings.precision, self.device)
        self.step = 0  # updates done
        self.seconds, self.read = 0.0, 0  # spent in them, resumed runs included; tokens of them, over all ranks
        self.stopping = False  # ask for a stop here, at any moment; all ranks leave after the same step
        self._tokens = settings.max_tokens_per_microbatch
        self._skipped = 0  # steps in a row
        self._together = _together(loaded, objective.beside, settings, ranks)
        self._compiled = CompiledBlocks(*self._models) if settings.compile else nullcontext()
        self._parameters = self._together.parameters
        self._optimizer = Optimizer(self._parameters, settings.optimizer)
        self.average = WeightAverage(self._parameters, settings.ema_decay)
        if ranks.size == 1 and not settings.ema_decay:  # an average needs every row after every step
            self._tables = make_embeddings_lazy(self._models, self._parameters, self._optimizer)
            loaded.flush = LazyRows(self._optimizer)
        for model in (part for module in self._models for part in module.modules() if isinstance(part, Transformer)):
            model.execution = replace(model.execution, gradient_checkpointing=settings.gradient_checkpointing)

    @property
    def samples(self) -> Sequence[Sample]:
        """Those of the stage."""
        return self.stages[self.stage].samples

    @property
    def order(self) -> BatchSampler:
        """That of the stage."""
        return self._orders[self.stage]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """All that is trained here, by name; what stands beside the model has its names behind "beside."."""
        self._optimizer.settle()
        return dict(self._parameters)

    def whole(self) -> AbstractContextManager[None]:
        """While all weights are in the model, on every rank; all ranks come here. Elsewhere each may have a part."""
        self._optimizer.settle()
        return self._together.whole()

    @property
    def parted(self) -> bool:
        """Whether this rank has a part of the state only."""
        return self._together.copies < self.ranks.size

    @property
    def copies(self) -> int:
        """How many ranks have the same state."""
        return self._together.copies

    def placed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a state with what they are parts of, where they are parts."""
        return self._together.placed(tensors)

    @property
    def epoch(self) -> float:
        """How many times the samples have been seen."""
        return self._epoch(self.step)

    @property
    def total(self) -> int | None:
        """How many steps there will be; None: until the time is over."""
        if self.settings.epochs is not None:
            return max(1, round(self.settings.epochs * self._orders[0].steps))
        return self.settings.max_steps

    @property
    def done(self) -> float:
        """The share of the whole, from 0 to 1."""
        if (budget := self.settings.budget_seconds) is not None:
            return min(1.0, self.seconds / budget)
        assert self.total is not None
        return self.step / self.total

    def __iter__(self) -> Iterator[Step]:
        """Steps until the end, or until a stop was asked for."""
        try:
            while self.done < 1:
                try:
                    step = self.advance()
                except StoppedError:
                    return
                yield step
        finally:
            self._optimizer.settle()

    def advance(self) -> Step:
        """One update over one batch of samples."""
        start = time.perf_counter()
        self._enter()
        mine = self._gradients(self.order.turn(self.step - self._begun, self.objective.num_static_masks))
        gradients = self._together.gradients()
        everyone = self.ranks.numbers(*mine, self._tokens, self.stopping)
        losses, counts, tokens, budgets, stops = zip(*everyone, strict=True)
        if any(stops):
            self._forget()
            raise StoppedError
        self._tokens = int(min(budgets))  # one for all ranks, so that a checkpoint of the first one knows it
        count = sum(counts)
        scale, share = 1 / count if count else 0.0, self._factor()
        loss, norm = sum(losses) * scale, self._together.norm(self._optimizer.norm(gradients, scale=scale))
        moved = math.isfinite(loss) and math.isfinite(norm)
        if moved:
            self._optimizer.step(gradients, factor=share, scale=scale, norm=norm)
            self.average.update(self.step + 1)
        number, rate = self.step + 1, share * max(self._optimizer.rates.values())
        spent = self._agreed(time.perf_counter() - start)
        step = Step(number, self._epoch(number), loss, rate, norm, int(sum(tokens)), spent, moved)
        if not moved and self._skipped >= self.settings.max_nonfinite_steps:
            raise divergence_error(step, gradients)
        self._forget()
        self._skipped = 0 if moved else self._skipped + 1
        self.step, self.seconds, self.read = number, self.seconds + spent, self.read + step.tokens
        return step

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain values from which `load_state` goes on, to the last bit; the tensors are not copies."""
        weights = {f"model/{name}": tensor.detach() for name, tensor in self._parameters.items()}
        weights |= {f"average/{name}": tensor for name, tensor in self.average.tensors.items()}
        optimizer = {f"optimizer/{name}": tensor for name, tensor in self._optimizer.state().items()}
        values = {"step": self.step, "seconds": self.seconds, "tokens": self._tokens, "skipped": self._skipped}
        values["read"] = self.read
        stage = {"stage": self.stage, "begun": self._begun, "epochs": self._epochs} if self.stages[1:] else {}
        return weights | optimizer, values | stage | self._counted()

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Go on from there; what does not fit is refused, before anything has changed."""
        for name, now in self._counted().items():
            if values[name] != now:
                raise HeedfulError(
                    f"the checkpoint was made with {name} = {values[name]:,}, but now it is {now:,}, so that its steps "
                    "would take other samples: put the data and the settings back, or start anew in another folder"
                )
        weights = select_prefix("model/", tensors)
        shapes = [{name: tensor.shape for name, tensor in each.items()} for each in (weights, self._parameters)]
        if shapes[0] != shapes[1]:
            raise HeedfulError("the checkpoint is of another model: its parameters have other names or shapes")
        self._optimizer.load_state(select_prefix("optimizer/", tensors))
        with torch.no_grad():
            for name, tensor in weights.items():
                self._parameters[name].copy_(tensor)
        self.average.load(select_prefix("average/", tensors))
        self.step, self.seconds, self.read = values["step"], values["seconds"], values.get("read", 0)
        self._tokens, self._skipped = values["tokens"], values["skipped"]
        if self.stages[1:]:
            self.stage, self._begun, self._epochs = values["stage"], values["begun"], values["epochs"]
            self.objective = self._objectives[self.stage]

    def _counted(self) -> dict[str, int]:
        """What decides which samples a step takes."""
        first, *others = self._orders
        later = {f"samples_{number}": order.count for number, order in enumerate(others, 1)}
        later |= {
            f"batch_size_{number}": order.batch for number, order in enumerate(others, 1) if order.batch != first.batch
        }
        return {"samples": first.count, "batch_size": first.batch, "seed": first.seed} | later

    def _enter(self) -> None:
        """The next stage, once the share of the whole is done from which it counts."""
        while self.stages[self.stage + 1 :] and self.done >= self.stages[self.stage + 1].share:
            self._epochs = self._epoch(self.step)
            self.stage, self._begun = self.stage + 1, self.step
            self.objective = self._objectives[self.stage]

    def _epoch(self, step: int) -> float:
        """How many times the samples have been seen after that step."""
        return self._epochs + (step - self._begun) / self.order.steps

    def _mode(self, *, train: bool) -> None:
        for model in self._models:
            model.train(train)
        for table in self._tables:
            table.sparse = train

    def _gradients(self, turn: BatchPlan) -> tuple[float, float, int]:
        """This rank's part of a step: the summed loss, its count and the tokens; gradients are summed up in `grad`.

        Where memory is not enough, the part is done again in smaller micro-batches, or an error says how large one was.
        """
        known = self.samples.at(turn.epoch) if isinstance(self.samples, PerEpochSamples) else self.samples
        samples = [known[number] for number in turn.numbers.tolist()]
        groups = group(len(samples), self.objective.together)
        sizes = [sum(len(samples[number]) for number in group) for group in groups]
        mine = assign_to_ranks(sizes, self.ranks.size)[self.ranks.rank]
        scales = self._scales(
            *([values[number] for unit in mine for number in groups[unit]] for values in (samples, turn.keys))
        )
        while True:
            batches = split_microbatches([sizes[unit] for unit in mine], self._tokens)
            members = [[number for place in batch for number in groups[mine[place]]] for batch in batches]
            parts = [([samples[each] for each in group], [turn.keys[each] for each in group]) for group in members]
            fillers = 0
            if self._together.even:
                fillers = int(max(most for (most,) in self.ranks.numbers(len(parts)))) - len(parts)
                least = min(groups, key=lambda group: sum(len(samples[each]) for each in group))
                parts += [([samples[each] for each in least], [turn.keys[each] for each in least])] * fillers
            try:
                return self._run(parts, scales, fillers)
            except _FullError as error:
                full = error.number
            self._make_smaller(sum(len(samples[each]) for each in members[full]), alone=len(batches[full]) == 1)

    def _scales(self, samples: list[Any], keys: list[Any]) -> tuple[float, ...]:
        """How the terms of the loss are brought to one count over all micro-batches and ranks, where it has several."""
        terms = len(self.objective.balance)
        if terms == 1:
            return ()
        counts = self.objective.batch(samples, keys).counts if samples else (0.0,) * terms
        return term_scales([sum(each) for each in zip(*self.ranks.numbers(*counts), strict=True)])

    def _run(
        self, parts: Sequence[tuple[list[Sample], list[int]]], scales: tuple[float, ...], fillers: int
    ) -> tuple[float, float, int]:
        """The same of micro-batches, each the samples and their keys; the last ones only fill up, and count nothing.

        A stop that was asked for cuts it short, unless other ranks would wait.
        """
        self._forget()
        total, count, tokens = 0.0, 0.0, 0
        for number, (samples, keys) in enumerate(parts):
            if self.stopping and not self._together.even:
                break
            try:
                seed = derive_seed(self.settings.seed, DROPOUT, self.step, number, self.ranks.rank)
                real, last = number < len(parts) - fillers, number == len(parts) - 1
                loss = self._learn(samples, keys, scales, seed, real=real, last=last)
            except (MemoryError, RuntimeError) as error:
                if not _no_memory(error):
                    raise
                raise _FullError(number) from None
            if not real:
                continue
            total, count = total + loss[0], count + loss[1]
            tokens += sum(len(each) - each.filler for each in samples)
        return total, count, tokens

    def _learn(
        self, samples: list[Sample], keys: list[int], scales: tuple[float, ...], seed: int, *, real: bool, last: bool
    ) -> tuple[float, float]:
        """Add the gradient of a micro-batch; its summed loss and count."""
        self._mode(train=True)
        try:
            with _seeded(seed, self.device):
                batch = replace(self.objective.batch(samples, keys), scales=scales).to(self.device)
                with self._compiled:
                    loss = self._together.learn(
                        self.objective, batch, precision=self.precision, weight=float(real), last=last
                    )
        finally:
            self._mode(train=False)
        return loss.sum.item(), loss.count

    def _forget(self) -> None:
        """The gradients, and the memory that they take."""
        self._together.forget()

    def _make_smaller(self, tokens: int, *, alone: bool) -> None:
        """Micro-batches, after memory was not enough for one of so many tokens."""
        what = f"step {self.step + 1}: memory was not enough for a micro-batch of {tokens:,} tokens"
        if alone:
            more = "Set train.gradient_checkpointing = true, or use shorter sequences"
            raise HeedfulError(f"{what}, which cannot be parted; nothing was changed. {more}")
        if not self.settings.shrink_batch_on_oom:
            raise HeedfulError(
                f"{what}; nothing was changed. Set train.max_tokens_per_microbatch below {tokens:,}, "
                "train.shrink_batch_on_oom = true or train.gradient_checkpointing = true"
            )
        gc.collect()  # an error's frames may hold each other, and with them what was computed
        self._tokens = max(1, tokens // 2)
        warnings.warn(f"{what}; from here on they have {self._tokens:,} at most", HeedfulWarning, stacklevel=2)

    def _factor(self) -> float:
        if (budget := self.settings.budget_seconds) is not None:
            return lr_factor(self.settings.schedule, self.seconds, budget)
        assert self.total is not None
        return lr_factor(self.settings.schedule, self.step, self.total)

    def _agreed(self, seconds: float) -> float:
        """The first rank's clock counts where the schedule follows it."""
        return self.ranks.numbers(seconds)[0][0] if self.settings.time_budget is not None else seconds


def select_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _together(
    loaded: ModelBundle, beside: nn.Module | None, settings: TrainSettings, ranks: Ranks
) -> Replicated | Sharded:
    """Who has which weights."""
    if not trainable_parameters(loaded, beside):
        raise HeedfulError("there is nothing to train: no parameter of the model requires a gradient")
    half = settings.grad_reduce_dtype == "bfloat16"
    parts = ranks.size if settings.data_parallel_shard_degree == "all" else settings.data_parallel_shard_degree
    if parts == 1:
        return Replicated(loaded, beside, ranks, half=half, early=not settings.shrink_batch_on_oom)
    from heedful.train.fsdp import Sharded

    return Sharded(loaded, beside, ranks, parts, half=half)


class _FullError(Exception):
    """Memory was not enough for the micro-batch of that number."""

    def __init__(self, number: int) -> None:
        self.number = number


def _no_memory(error: BaseException) -> bool:
    said = ("can't allocate memory", "bad_alloc")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(each in str(error) for each in said)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's own generators draw from the seed inside."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    before = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
