"""Trainer: `for step in trainer:` trains a model on samples, with gradient accumulation and data parallelism."""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from heedful.checkpoint import ModelBundle
from heedful.data.sampler import BatchSampler, derive_seed
from heedful.device import check_device, resolve_device, resolve_dtype
from heedful.errors import HeedfulError, HeedfulWarning, RunError
from heedful.model.stack import Transformer
from heedful.objectives import Batch, Objective, Sample
from heedful.objectives.base import term_scales
from heedful.random_streams import Stream
from heedful.train.batches import StepBatches, StepDataset, StepLoader
from heedful.train.compiled import CompiledBlocks
from heedful.train.ddp import Replicated, trainable_parameters
from heedful.train.determinism import deterministic_algorithms, prepare_determinism
from heedful.train.ema import WeightAverage
from heedful.train.freezing import freeze_layers
from heedful.train.gpu_memory import initial_max_tokens
from heedful.train.lazy_embedding import LazyRows, make_embeddings_lazy
from heedful.train.loss_scale import LossScale
from heedful.train.microbatch import MicroBatch, first_operation, is_out_of_memory, release_failed_backward, seeded
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


class Trainer:
    """Trains a model by an objective on samples.

    `loaded` stays in eval mode between steps, with float32 weights. Call `loaded.flush()` to apply pending lazy
    updates of embeddings before reading its weights.
    """

    def __init__(
        self,
        loaded: ModelBundle,
        objective: Objective,
        samples: Sequence[Sample],
        settings: TrainSettings,
        ranks: Ranks = SINGLE_PROCESS,
        *,
        later_stages: Sequence[Stage] = (),
    ) -> None:
        """Prepare training.

        Args:
            loaded: The model, which is trained in place.
            objective: Makes batches of samples, and computes the loss.
            samples: Training samples.
            settings: Settings of training.
            ranks: The processes that train together.
            later_stages: Other samples, batch sizes or objectives for later parts of training.
        """
        self.objective, self.settings, self.ranks = objective, settings, ranks  # the objective of the current stage
        self._lazy_tables: list[nn.Embedding] = []
        extra_module = objective.extra_module
        self._models: list[nn.Module] = [loaded, *([] if extra_module is None else [extra_module])]
        self.loaded = loaded
        self.device = next(loaded.parameters()).device
        check_device(self.device)
        if settings.device != "auto" or self.device.type == "cpu":
            self.device = resolve_device(settings.device)
        if settings.deterministic and self.device.type == "cuda":
            prepare_determinism()
        for model in self._models:
            model.to(self.device)
        self._set_mode(train=False)
        self.stages = (Stage(0.0, samples, objective=objective), *later_stages)
        self._objectives = [stage.objective or objective for stage in self.stages]
        if not all(len(stage.samples) for stage in self.stages):
            raise HeedfulError("there are no samples to train on: check that the examples can be learned from")
        self._orders = [
            BatchSampler(
                num_samples=len(stage.samples),
                batch_size=round_to_groups(stage.batch_size or settings.batch_size, stage_objective.group_size),
                seed=settings.seed,
            )
            for stage, stage_objective in zip(self.stages, self._objectives, strict=True)
        ]
        self.stage = 0  # number of the current stage
        self._stage_step, self._stage_epoch = 0, 0.0  # step and epoch at the beginning of the stage
        self.precision = resolve_dtype(settings.precision, self.device)
        self._loss_scale: LossScale | None = None  # None: no loss scaling
        if self.precision == torch.float16:
            self._loss_scale = LossScale.for_batch(self.order.batch_size)
        self.step = 0  # number of steps so far
        self.seconds = 0.0  # duration of all steps, earlier parts of a resumed run included
        self.tokens_seen = 0  # tokens of all steps on all ranks, earlier parts of a resumed run included
        self.stop_requested = False  # may be set to True at any time: all ranks stop after the same step
        self.state_copied: torch.cuda.Event | None = None  # end of a copy of the state, which the next update waits for
        self._loader: StepLoader | None = None  # prepares the next steps of the current stage
        self._prefetches = self.device.type == "cuda"  # whether a thread prepares the next step during a step
        self._skipped = 0  # number of consecutive steps without an update
        if settings.shrink_batch_on_oom:
            first_operation()  # needs a thread, for which there may be no memory later
        if settings.freeze_layers:
            freeze_layers(loaded, settings.freeze_layers)
        self._data_parallel = _make_data_parallel(loaded, extra_module, settings, ranks, self.precision)
        self._compiled = CompiledBlocks(*self._models) if settings.compile else nullcontext()
        self._parameters = self._data_parallel.parameters
        self._optimizer = Optimizer(self._parameters, settings.optimizer)
        self.average = WeightAverage(self._parameters, settings.ema_decay)
        if ranks.size == 1 and not settings.ema_decay:  # an average needs every row after every step
            self._lazy_tables = make_embeddings_lazy(self._models, self._parameters, self._optimizer)
            loaded.flush = LazyRows(self._optimizer)
        for part in (part for module in self._models for part in module.modules() if isinstance(part, Transformer)):
            part.execution = replace(part.execution, gradient_checkpointing=settings.gradient_checkpointing)
        self._max_tokens = initial_max_tokens(loaded, settings, self.device, self.precision, self._parameters.values())

    @property
    def samples(self) -> Sequence[Sample]:
        """The samples of the current stage."""
        return self.stages[self.stage].samples

    @property
    def order(self) -> BatchSampler:
        """The order of the samples of the current stage."""
        return self._orders[self.stage]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """All trained parameters by name, without pending updates; names of the extra module begin with "beside."."""
        self._optimizer.flush()
        return dict(self._parameters)

    def full_params(self) -> AbstractContextManager[None]:
        """Context in which every rank has all weights; all ranks enter it."""
        self._optimizer.flush()
        return self._data_parallel.full_params()

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has only shards of the state."""
        return self._data_parallel.num_replicas < self.ranks.size

    @property
    def num_replicas(self) -> int:
        """Number of ranks with the same state."""
        return self._data_parallel.num_replicas

    def as_dtensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a state, with shards as DTensors."""
        return self._data_parallel.as_dtensors(tensors)

    @property
    def max_tokens_per_microbatch(self) -> int:
        """Maximum tokens of a micro-batch."""
        return self._max_tokens

    @property
    def overflows(self) -> int:
        """Number of steps that were skipped because gradients overflowed float16."""
        return 0 if self._loss_scale is None else self._loss_scale.overflows

    def algorithms(self) -> AbstractContextManager[None]:
        """Context in which PyTorch uses deterministic algorithms, if settings ask for them, on a GPU."""
        is_needed = self.settings.deterministic and self.device.type == "cuda"
        return deterministic_algorithms() if is_needed else nullcontext()

    @property
    def epoch(self) -> float:
        """Number of passes over the samples so far."""
        return self._epoch_after(self.step)

    @property
    def total_steps(self) -> int | None:
        """Number of steps of the whole training, or None with a time budget."""
        if self.settings.epochs is not None:
            return max(1, round(self.settings.epochs * self._orders[0].steps_per_epoch))
        return self.settings.max_steps

    @property
    def progress(self) -> float:
        """Share of training that is done, from 0 to 1."""
        if (budget := self.settings.budget_seconds) is not None:
            return min(1.0, self.seconds / budget)
        assert self.total_steps is not None
        return self.step / self.total_steps

    def __iter__(self) -> Iterator[Step]:
        """Train until the end, or until a stop is requested; yields the record of each step."""
        try:
            while self.progress < 1:
                try:
                    step = self.train_step()
                except StoppedError:
                    return
                yield step
        finally:
            self.close()
            self._optimizer.flush()

    def train_step(self) -> Step:
        """Run one optimizer update over one batch of samples.

        A step whose gradients overflow float16 does not update the weights, and the next one has a smaller loss scale.

        Raises:
            DivergedError: If the loss or the gradient is not finite, in more consecutive steps than settings allow.
            StoppedError: If a stop was requested on some rank.
        """
        start = time.perf_counter()
        self._enter_stage()
        batches = self._step_batches()
        with self.algorithms():
            own_sums = self._accumulate_gradients(batches)
        gradients = self._data_parallel.reduce_gradients()
        gathered = self.ranks.all_gather_scalars(*own_sums, self._max_tokens, self.stop_requested)
        losses, counts, tokens, max_tokens, stop_requests = zip(*gathered, strict=True)
        if any(stop_requests):
            self._data_parallel.zero_grad()
            raise StoppedError
        self._max_tokens = int(min(max_tokens))  # the same on all ranks, because rank 0 saves it
        count = sum(counts)
        mean, factor = 1 / count if count else 0.0, self._lr_factor()
        loss, scale = sum(losses) * mean, mean / self._loss_factor
        self.ranks.wait_for_gpu(self.device)
        norm = self._data_parallel.global_norm(self._optimizer.grad_norm(gradients, scale=scale))
        updated = math.isfinite(loss) and math.isfinite(norm)
        if updated:
            if self.state_copied is not None:
                self.state_copied.wait(torch.cuda.current_stream(self.device))
                self.state_copied = None
            self._optimizer.step(gradients, lr_factor=factor, scale=scale, grad_norm=norm)
            self.average.update(self.step + 1)
        loss_scale, is_overflow = None, False
        if self._loss_scale is not None and math.isfinite(loss):
            loss_scale, is_overflow = self._loss_scale.scale, self._loss_scale.update(is_finite=updated)
        number, lr = self.step + 1, factor * max(self._optimizer.peak_lrs.values())
        seconds = self._agree_on_seconds(time.perf_counter() - start)
        step = Step(number, self._epoch_after(number), loss, lr, norm, int(sum(tokens)), seconds, updated, loss_scale)
        is_diverged = not (updated or is_overflow)
        if is_diverged and self._skipped >= self.settings.max_nonfinite_steps:
            raise divergence_error(step, gradients)
        self._data_parallel.zero_grad()
        self._skipped = self._skipped + 1 if is_diverged else 0
        self.step, self.seconds, self.tokens_seen = number, self.seconds + seconds, self.tokens_seen + step.tokens
        return step

    def close(self) -> None:
        """End the thread and the processes that prepare batches, after calls of `train_step`.

        Iteration closes the trainer at its end.
        """
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors, which are not copied, and plain values, from which `load_state` resumes bit for bit."""
        weights = {f"model/{name}": tensor.detach() for name, tensor in self._parameters.items()}
        weights |= {f"average/{name}": tensor for name, tensor in self.average.tensors.items()}
        optimizer = {f"optimizer/{name}": tensor for name, tensor in self._optimizer.state().items()}
        values: dict[str, Any] = {"step": self.step, "seconds": self.seconds, "read": self.tokens_seen}
        values |= {"tokens": self._max_tokens, "skipped": self._skipped}
        if self._loss_scale is not None:
            values["loss_scale"] = asdict(self._loss_scale)
        stage = {"stage": self.stage, "begun": self._stage_step, "epochs": self._stage_epoch} if self.stages[1:] else {}
        return weights | optimizer, values | stage | self._sample_counts()

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Resume from a state.

        Raises:
            RunError: If the state is that of other samples or of another model; then nothing has changed.
        """
        for name, count in self._sample_counts().items():
            if values[name] != count:
                raise RunError(
                    f"the checkpoint was made with {name} = {values[name]:,}, but now it is {count:,}, so that its "
                    "steps would take other samples: restore the data and the settings, or start again in another "
                    "folder"
                )
        weights = select_prefix("model/", tensors)
        shapes = [{name: tensor.shape for name, tensor in group.items()} for group in (weights, self._parameters)]
        if shapes[0] != shapes[1]:
            raise RunError("the checkpoint is of another model: its parameters have other names or shapes")
        self._optimizer.load_state(select_prefix("optimizer/", tensors))
        with torch.no_grad():
            for name, tensor in weights.items():
                self._parameters[name].copy_(tensor)
        self.average.load(select_prefix("average/", tensors))
        self.step, self.seconds, self.tokens_seen = values["step"], values["seconds"], values.get("read", 0)
        self._max_tokens, self._skipped = values["tokens"], values["skipped"]
        if self._loss_scale is not None and "loss_scale" in values:
            self._loss_scale = LossScale(**values["loss_scale"])
        if self.stages[1:]:
            self.stage, self._stage_step, self._stage_epoch = values["stage"], values["begun"], values["epochs"]
            self.objective = self._objectives[self.stage]

    def _sample_counts(self) -> dict[str, int]:
        """Return the numbers that decide which samples a step takes."""
        first, *later = self._orders
        counts = {"samples": first.num_samples, "batch_size": first.batch_size, "seed": first.seed}
        counts |= {f"samples_{number}": order.num_samples for number, order in enumerate(later, 1)}
        counts |= {
            f"batch_size_{number}": order.batch_size
            for number, order in enumerate(later, 1)
            if order.batch_size != first.batch_size
        }
        return counts

    def _enter_stage(self) -> None:
        """Switch to the next stage, if training has reached its share."""
        while self.stages[self.stage + 1 :] and self.progress >= self.stages[self.stage + 1].share:
            self._stage_epoch = self._epoch_after(self.step)
            self.stage, self._stage_step = self.stage + 1, self.step
            self.objective = self._objectives[self.stage]

    def _epoch_after(self, step: int) -> float:
        """Return the number of passes over the samples after a step."""
        return self._stage_epoch + (step - self._stage_step) / self.order.steps_per_epoch

    def _set_mode(self, *, train: bool) -> None:
        """Set training or eval mode; gradients of lazy embeddings are sparse in training mode."""
        for model in self._models:
            model.train(train)
        for table in self._lazy_tables:
            table.sparse = train

    @contextmanager
    def _train_mode(self) -> Iterator[None]:
        """Context in which the models are in training mode."""
        self._set_mode(train=True)
        try:
            yield
        finally:
            self._set_mode(train=False)

    def _step_batches(self) -> StepBatches:
        """Return the micro-batches of this rank in the current step."""
        dataset = StepDataset(
            samples=self.samples,
            objective=self.objective,
            order=self.order,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
            max_tokens=self._max_tokens,
        )
        step = self.step - self._stage_step
        if not (self.settings.num_workers or self._prefetches):
            return dataset[step]
        if self._loader is None or not self._loader.continues(dataset, step):
            self.close()
            self._loader = StepLoader(
                dataset,
                step,
                num_workers=self.settings.num_workers,
                prefetches=self._prefetches,
                device=self.device,
                stop=self._stage_stop(),
            )
        return next(self._loader)

    def _stage_stop(self) -> int | None:
        """Return the number of steps of the current stage, or None with a time budget."""
        if self.total_steps is None:
            return None
        end = self.stages[self.stage + 1].share if self.stages[self.stage + 1 :] else 1.0
        return math.ceil(end * self.total_steps) - self._stage_step

    @property
    def _loss_factor(self) -> float:
        """Factor of the loss in the backward pass, by which gradients are too large."""
        return 1.0 if self._loss_scale is None else self._loss_scale.scale

    def _accumulate_gradients(self, batches: StepBatches) -> tuple[float, float, int]:
        """Run the micro-batches of this rank; gradients accumulate in `grad`.

        If memory runs out, the whole step runs again in smaller micro-batches. If a stop is requested, the remaining
        micro-batches are skipped, unless other ranks would wait for them.

        Returns:
            The summed loss, its count, and the number of tokens.
        """
        scales = self._term_scales(batches)
        while True:
            self._data_parallel.zero_grad()
            sums, count, tokens, failed = list[Tensor](), 0.0, 0, None
            micro_batches = self._with_fillers(batches)
            for number, (micro, batch) in enumerate(micro_batches):
                if self.stop_requested and not self._data_parallel.needs_equal_steps:
                    break
                seed = derive_seed(self.settings.seed, Stream.DROPOUT, self.step, number, self.ranks.rank)
                try:
                    with self._train_mode(), seeded(seed, self.device), self._compiled:
                        loss = self._data_parallel.backward(
                            self.objective,
                            replace(batch, scales=scales).to(self.device),
                            precision=self.precision,
                            weight=0.0 if micro.is_filler else self._loss_factor,
                            last=number == len(micro_batches) - 1,
                        )
                    if not micro.is_filler:
                        sums.append(loss.sum.detach())  # read after the loop, since reading waits for the GPU
                        count += loss.count
                        tokens += sum(len(sample) - sample.filler for sample in micro.samples)
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    failed = micro
                    break
            if failed is None:
                if self._loader is not None:
                    self._loader.prefetch()  # the device has work for a while
                self.ranks.wait_for_gpu(self.device)
                return sum(torch.stack(sums).tolist()) if sums else 0.0, count, tokens
            self._shrink_micro_batches(failed)
            batches = StepBatches.of(self.objective, batches.share, self._max_tokens)

    def _with_fillers(self, batches: StepBatches) -> list[tuple[MicroBatch, Batch]]:
        """Return the micro-batches of this rank, with fillers if all ranks must run the same number."""
        micro_batches = batches.micro_batches
        if not self._data_parallel.needs_equal_steps:
            return micro_batches
        max_count = int(max(count for (count,) in self.ranks.all_gather_scalars(len(micro_batches))))
        fillers = batches.share.fillers(max_count - len(micro_batches))
        return micro_batches + [(micro, self.objective.batch(micro.samples, micro.keys)) for micro in fillers]

    def _term_scales(self, batches: StepBatches) -> tuple[float, ...]:
        """Return factors that turn sums of loss terms into means over the step on all ranks, or () for one term."""
        terms = len(self.objective.term_weights)
        if terms == 1:
            return ()
        counts = self.ranks.all_gather_scalars(*batches.counts(terms))
        return term_scales([sum(column) for column in zip(*counts, strict=True)])

    def _shrink_micro_batches(self, failed: MicroBatch) -> None:
        """Halve micro-batches after one did not fit into memory, or raise a RunError if that is impossible."""
        tokens = failed.num_tokens
        problem = f"step {self.step + 1}: memory was not enough for a micro-batch of {tokens:,} tokens"
        if failed.groups == 1:
            advice = "Set train.gradient_checkpointing = true, or use shorter sequences"
            raise RunError(f"{problem}, which cannot be split; nothing was changed. {advice}")
        if not self.settings.shrink_batch_on_oom:
            raise RunError(
                f"{problem}; nothing was changed. Set train.max_tokens_per_microbatch below {tokens:,}, "
                "train.shrink_batch_on_oom = true or train.gradient_checkpointing = true"
            )
        gc.collect()  # frames of the error may be in a reference cycle that keeps activations alive
        release_failed_backward()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # cuBLAS and NCCL cannot use memory that PyTorch has cached
        self._max_tokens = max(1, tokens // 2)
        warnings.warn(f"{problem}; from here on they have {self._max_tokens:,} at most", HeedfulWarning, stacklevel=2)

    def _lr_factor(self) -> float:
        """Return the factor of the learning rate in the current step."""
        if (budget := self.settings.budget_seconds) is not None:
            return lr_factor(self.settings.schedule, self.seconds, budget)
        assert self.total_steps is not None
        return lr_factor(self.settings.schedule, self.step, self.total_steps)

    def _agree_on_seconds(self, seconds: float) -> float:
        """Return the duration on rank 0 if the schedule follows the clock, otherwise the duration on this rank."""
        if self.settings.time_budget is None:
            return seconds
        return self.ranks.all_gather_scalars(seconds)[0][0]


def select_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with the prefix, by their names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _make_data_parallel(
    loaded: ModelBundle, extra_module: nn.Module | None, settings: TrainSettings, ranks: Ranks, precision: torch.dtype
) -> Replicated | Sharded:
    """Replicate or shard the weights, depending on the settings."""
    if not trainable_parameters(loaded, extra_module):
        raise HeedfulError("no parameter of the model requires a gradient: unfreeze some, or give it a new head")
    reduce_bf16 = settings.grad_reduce_dtype == "bfloat16"
    degree = ranks.size if settings.data_parallel_shard_degree == "all" else settings.data_parallel_shard_degree
    if degree == 1:
        overlap = not settings.shrink_batch_on_oom
        return Replicated(loaded, extra_module, ranks, reduce_bf16=reduce_bf16, overlap=overlap)
    from heedful.train.fsdp import Sharded

    return Sharded(loaded, extra_module, ranks, degree, precision=precision, reduce_bf16=reduce_bf16)
