"""AdamW over named tensors, and learning rate schedules.

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    p <- p - lr (m / c1) / (sqrt(v / c2) + eps) - lr weight_decay p

where c1 = 1 - b1^t and c2 = 1 - b2^t, or 1 without bias correction (Kingma and Ba 2015; Loshchilov and Hutter 2019).
Weight decay applies to tensors of two dimensions or more; others are biases and the weights of norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from heedful.csrc import kernels, unavailable_reason
from heedful.errors import HeedfulError, RunError, SettingError
from heedful.nn.cpu_ops import usable_kernels
from heedful.train.settings import AdamW, Constant, Cosine, DecayFromStart, Linear, Noam, Schedule

__all__ = [
    "AdamW",
    "Constant",
    "Cosine",
    "DecayFromStart",
    "Linear",
    "Noam",
    "Optimizer",
    "Schedule",
    "layer_lrs",
    "lr_factor",
]

# -- learning rates -----------------------------------------------------------------------------------------------


def lr_factor(schedule: Schedule, progress: float, total: float) -> float:
    """Return the factor of the learning rate after `progress` of `total` steps or seconds; a warm-up starts at 0.

    A warm-up of less than one step is skipped, so that the only step of a short run changes the weights.

    >>> [lr_factor(Linear(warmup_ratio=0.25), done, 8) for done in (0, 1, 2, 5, 8)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    >>> [lr_factor(Linear(warmup_ratio=0.25), done, 2) for done in (0, 1, 2)]
    [1.0, 0.5, 0.0]
    """
    if not (0 < total < math.inf and progress >= 0):
        raise HeedfulError(f"progress is {progress} of {total}; expected a number from 0, of one above 0")
    warmup = round(schedule.warmup_ratio * total, 6)  # 0.28 * 25 is a little more than 7
    if warmup < 1:
        warmup = 0.0
    if progress < warmup:
        return progress / warmup
    done = min(1.0, (progress - warmup) / (total - warmup)) if total > warmup else 1.0
    match schedule:
        case Constant():
            return 1.0
        case Linear():
            return 1.0 - done
        case Cosine(min_lr_ratio=floor):
            return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * done)) / 2
        case DecayFromStart():
            return max(0.0, 1.0 - progress / total)
        case Noam():
            return math.sqrt(max(1.0, warmup) / max(1.0, warmup, progress))


def layer_lrs(names: Iterable[str], settings: AdamW) -> dict[str, float]:
    """Return the peak learning rate of each parameter: lr * layer_decay^(blocks + 1 - level).

    Embeddings have level 0, block i has level i + 1, a final norm has that of its stack's last block, and the head has
    blocks + 1. The decoder's blocks are counted after the encoder's. The number of blocks follows from the names
    (Howard and Ruder 2018; Zhang et al. 2021).

    Raises:
        SettingError: If the name of a parameter does not tell its level.
    """
    names = list(names)
    if settings.layer_decay == 1.0:
        return dict.fromkeys(names, settings.lr)
    parts = {name: _part_and_block(name) for name in names}
    encoder, decoder = (
        max((block for part, block in parts.values() if part == stack), default=0) for stack in ("encoder", "decoder")
    )
    top = encoder + decoder + 1

    def level(part: str, block: int) -> int:
        match part:
            case "encoder":
                return block or encoder
            case "decoder":
                return encoder + (block or decoder)
        return top if part == "head" else 0

    return {name: settings.lr * settings.layer_decay ** (top - level(*part)) for name, part in parts.items()}


def _part_and_block(name: str) -> tuple[str, int]:
    """Return the part of the model that has a parameter, and the number of its block, from 1 (0 if outside)."""
    match name.split("."):
        case ["encoder" | "decoder" as stack, "blocks" | "relations", number, _, *_] if number.isdecimal():
            return stack, int(number) + 1  # shared relative positions count as the first block's
        case ["encoder" | "decoder" as stack, "norm", _]:
            return stack, 0
        case ["embedding" | "decoder_embedding" | "head" as part, _, *_]:
            return part, 0
    raise SettingError(
        f"layer_decay: the level of {name} is not known; expected a parameter of embedding, decoder_embedding, "
        "encoder, decoder or head. Set layer_decay = 1.0 to train it",
        path="train.optimizer.layer_decay",
    )


# -- the optimizer ------------------------------------------------------------------------------------------------

PIECE_NUMEL = 1 << 14  # numbers in a piece of a tensor that a thread updates, as in csrc/optimizer.cpp
MAX_PENDING_STEPS = 4096  # steps after which all rows of a lazy matrix are updated
_FUSED_DEVICES = frozenset({"cpu", "cuda"})  # devices on which PyTorch's fused kernel is used, by far its fastest


class Optimizer:
    """AdamW over named tensors, which it updates in place.

    Gradients have the names of their tensors; a tensor without a gradient does not change. Gradients are sums over
    targets, and `scale`, 1 / count, makes them means. One step is

        norm = optimizer.grad_norm(gradients, scale=scale)    # nothing has changed yet
        optimizer.step(gradients, lr_factor=factor, scale=scale, grad_norm=norm)
    """

    def __init__(self, parameters: Mapping[str, Tensor], settings: AdamW) -> None:
        assert len({id(tensor) for tensor in parameters.values()}) == len(parameters), "a tensor is listed twice"
        self.settings = settings
        self.peak_lrs = layer_lrs(parameters, settings)
        self._parameters = dict(parameters)
        self._m = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self._v = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self._steps: dict[str, Tensor] = {}
        self._groups: dict[tuple[float, float], list[str]] = {}  # names by learning rate and weight decay
        self._fused = {parameter.device.type for parameter in parameters.values()} <= _FUSED_DEVICES
        start = 0.0 if settings.bias_correction else math.inf  # b^inf = 0, so that c1 = c2 = 1 exactly
        for name, parameter in parameters.items():
            if parameter.dtype not in (torch.float32, torch.float64) or not parameter.is_contiguous():
                raise HeedfulError(
                    f"{name} is {_described(parameter)}; expected contiguous float32 (or float64): small updates are "
                    "lost in less, so keep a float32 copy and train that"
                )
            self._steps[name] = torch.full((), start, device=parameter.device if self._fused else "cpu")
            has_decay = parameter.ndim >= 2 and not name.endswith("bias")  # some biases have one row for each head
            decay = settings.weight_decay if has_decay else 0.0
            self._groups.setdefault((self.peak_lrs[name], decay), []).append(name)
        self._lazy: dict[str, _PendingSteps] = {}

    def make_lazy(self, name: str) -> None:
        """Update a matrix lazily from now on: its gradients are sparse, and steps of rows without a gradient wait.

        Each row changes as without this, to the last bit, but only when it is needed: `catch_up` and `flush` apply
        pending steps, and `state` calls `flush`.

        Raises:
            HeedfulError: If the C++ kernels are missing or cannot update the matrix: they need float32, the CPU, and a
                width that is a multiple of 16.
        """
        parameter = self._parameters.get(name)
        if parameter is None:
            raise HeedfulError(f"{name} is not a trained tensor, so it cannot be updated lazily")
        if parameter.ndim != 2 or parameter.dtype != torch.float32 or usable_kernels(parameter) is None:
            reason = unavailable_reason() or "its type or its shape does not fit the kernels in C++"
            raise HeedfulError(
                f"{name} cannot be updated lazily: {reason}. It is {_described(parameter)} on {parameter.device.type}; "
                "expected the kernels, and a float32 matrix on the CPU whose width is a multiple of 16. Train it with "
                "dense gradients, without make_lazy"
            )
        self._lazy[name] = _PendingSteps(applied=torch.zeros(len(parameter), dtype=torch.int32, device="cpu"))

    def catch_up(self, name: str, rows: Tensor | None = None) -> None:
        """Apply the pending steps of a lazy matrix to these rows, or to all if `rows` is None.

        If a row number is out of range, nothing changes.
        """
        pending = self._lazy[name]
        if rows is not None and pending.steps:
            rows = rows.flatten().to(torch.int64).unique()
            if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < len(pending.applied):
                return  # the lookup after this raises the error
        if pending.steps:
            self._update_rows(name, rows, None, 1.0)
        if rows is None:
            pending.steps.clear()
            pending.applied.zero_()

    def flush(self) -> None:
        """Apply all pending steps of lazy matrices."""
        for name in self._lazy:
            self.catch_up(name)

    def grad_norm(self, gradients: Mapping[str, Tensor], *, scale: float) -> float:
        """Return the norm of all scaled gradients as one vector; it is not finite if a gradient is not.

        Norms of rows are added in float64, since a float32 sum over a large table loses digits on a CPU. On GPUs, one
        launch for all tensors is faster, and sums are made in parts anyway.
        """
        detached = (grad.detach() for grad in gradients.values())
        dense = [grad.values() if grad.is_sparse else grad for grad in detached]
        if dense and all(grad.device.type == "cuda" for grad in dense):
            norms = torch.stack(list(torch._foreach_norm(dense)))
            return scale * float(torch.linalg.vector_norm(norms, dtype=torch.float64))
        rows = [torch.linalg.vector_norm(grad, dim=-1).flatten() for grad in dense]
        return scale * float(torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64)) if rows else 0.0

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], *, lr_factor: float, scale: float, grad_norm: float) -> None:
        """Update every tensor that has a gradient, after clipping to `max_grad_norm`; overwrites the gradients.

        Args:
            gradients: Sums over targets, by name.
            lr_factor: Factor of the learning rates, from the schedule.
            scale: Factor of the gradients.
            grad_norm: Result of the method `grad_norm`.

        Raises:
            HeedfulError: If a gradient does not fit its tensor, or the norm is not finite; then nothing has changed.
        """
        self._check(gradients)
        if not math.isfinite(grad_norm):
            raise RunError(
                f"the norm of the gradients is {grad_norm}, and nothing was changed: skip the step, or lower "
                "train.optimizer.lr"
            )
        max_norm = self.settings.max_grad_norm
        if max_norm is not None and grad_norm > max_norm:
            scale *= max_norm / grad_norm
        for (lr, decay), names in self._groups.items():
            for name in (name for name in names if name in gradients and gradients[name].is_sparse):
                self._update_sparse(name, gradients[name], lr * lr_factor, decay, scale)
            if names := [name for name in names if name in gradients and not gradients[name].is_sparse]:
                for name in self._lazy.keys() & names:  # pending steps must come before this one
                    self.catch_up(name)
                dense = [gradients[name].contiguous() for name in names]
                self._update_dense(names, dense, lr * lr_factor, decay, scale)

    def _update_dense(self, names: list[str], gradients: list[Tensor], lr: float, decay: float, scale: float) -> None:
        """Update tensors of one learning rate and decay; gradients are contiguous."""
        parameters = [self._parameters[name] for name in names]
        m, v = [self._m[name] for name in names], [self._v[name] for name in names]
        steps = [self._steps[name] for name in names]
        if has_kernel(parameters) and len({float(step) for step in steps}) == 1:
            torch._foreach_add_(steps, 1)
            tensors = list(zip(parameters, m, v, gradients, strict=True))
            self._update_by_kernel(tensors, lr, decay, float(steps[0]), scale)
            return
        # gradients must be contiguous, since the fused kernel ignores strides
        if scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        adamw(
            parameters,
            gradients,
            m,
            v,
            [],
            steps,
            fused=self._fused,
            amsgrad=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=lr,
            weight_decay=decay,
            eps=self.settings.eps,
            maximize=False,
        )

    def _update_by_kernel(
        self, tensors: Sequence[tuple[Tensor, ...]], lr: float, decay: float, step: float, scale: float
    ) -> None:
        """Update by our kernel, which reads and writes every number once.

        Args:
            tensors: Parameter, m, v and gradient of each tensor.
        """
        library = kernels()
        assert library is not None
        table, first_piece = [], 0
        for group in tensors:
            numel = group[0].numel()
            table.append([*(tensor.data_ptr() for tensor in group), numel, first_piece])
            first_piece += -(-numel // PIECE_NUMEL)
        factors = torch.tensor(self._step_factors(lr, decay, step), dtype=torch.float32, device="cpu")
        pointers = torch.tensor(table, dtype=torch.int64, device="cpu")
        b1, b2 = self.settings.betas
        threads = torch.get_num_threads()
        library.adamw(len(table), pointers.data_ptr(), factors.data_ptr(), scale, b1, b2, self.settings.eps, threads)

    def _step_factors(self, lr: float, decay: float, step: float) -> tuple[float, float, float]:
        """Return the numbers of a step that our kernels need: 1 - lr decay, lr / c1, 1 / sqrt(c2)."""
        b1, b2 = self.settings.betas
        return 1 - lr * decay, lr / (1 - b1**step), (1 - b2**step) ** -0.5

    def _update_sparse(self, name: str, gradient: Tensor, lr: float, decay: float, scale: float) -> None:
        """Update the rows of a lazy matrix that have a gradient; the step of other rows is pending."""
        pending = self._lazy[name]
        self._steps[name] += 1
        pending.steps.append(self._step_factors(lr, decay, float(self._steps[name])))
        self._update_rows(name, gradient.indices()[0], gradient.values().contiguous(), scale)
        if len(pending.steps) == MAX_PENDING_STEPS:
            self.catch_up(name)

    def _update_rows(self, name: str, rows: Tensor | None, gradient: Tensor | None, scale: float) -> None:
        """Apply all pending steps to rows of a lazy matrix.

        Args:
            rows: Numbers of the rows. If None, steps are applied to all rows.
            gradient: Gradient of these rows in the last step, or None if they have none.
        """
        library, pending, parameter = kernels(), self._lazy[name], self._parameters[name]
        assert library is not None
        steps = torch.tensor(pending.steps, dtype=torch.float32, device="cpu")
        library.adamw_rows(
            parameter.data_ptr(),
            self._m[name].data_ptr(),
            self._v[name].data_ptr(),
            pending.applied.data_ptr(),
            parameter.shape[1],
            0 if rows is None else rows.data_ptr(),
            len(parameter) if rows is None else len(rows),
            steps.data_ptr(),
            len(steps),
            0 if gradient is None else gradient.data_ptr(),
            scale,
            *self.settings.betas,
            self.settings.eps,
            torch.get_num_threads(),
        )

    def _check(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise HeedfulError unless every gradient fits its tensor."""
        for name, gradient in gradients.items():
            parameter = self._parameters.get(name)
            if parameter is None:
                raise HeedfulError(f"there is a gradient for {name}, which is not a trained tensor")
            if not _same_type(gradient, parameter):
                raise HeedfulError(
                    f"the gradient of {name} is {_described(gradient)}; expected {_described(parameter)} as its tensor"
                )
            if gradient.is_sparse:
                self._check_rows(name, gradient)

    def _check_rows(self, name: str, gradient: Tensor) -> None:
        """Raise HeedfulError for a sparse gradient with which the kernel would access memory outside of the table."""
        if name not in self._lazy:
            raise HeedfulError(f"the gradient of {name} is sparse: call make_lazy({name!r}) first, or make it dense")
        if gradient.sparse_dim() != 1 or not gradient.is_coalesced():
            raise HeedfulError(
                f"the gradient of {name} is sparse in {gradient.sparse_dim()} dimensions, "
                f"{'' if gradient.is_coalesced() else 'not '}coalesced; expected rows, each once: coalesce() it"
            )
        rows = gradient.indices()[0]
        if len(rows) and not 0 <= (first := int(rows.min())) <= (last := int(rows.max())) < len(gradient):
            raise HeedfulError(
                f"the gradient of {name} has rows {first} to {last}, but its table has 0 to {len(gradient) - 1}"
            )

    def state(self) -> dict[str, Tensor]:
        """Return m, v and, with bias correction, the step counts of every tensor.

        With the parameters, the next step depends on nothing else. Tensors are not copied: the next step changes them.
        """
        self.flush()
        kinds = {"m": self._m, "v": self._v} | ({"steps": self._steps} if self.settings.bias_correction else {})
        return {f"{name}.{kind}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state, bit for bit.

        Raises:
            RunError: If the state is that of other tensors; then nothing has changed.
        """
        own_state = self.state()
        problems = [f"{name} is missing" for name in own_state if name not in state]
        problems += [f"{name} is not expected" for name in state if name not in own_state]
        problems += [
            f"{name} is {_described(state[name])}, expected {_described(tensor)}"
            for name, tensor in own_state.items()
            if name in state and not _same_type(state[name], tensor)
        ]
        if problems:
            listed = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if problems[4:] else "")
            raise RunError(
                f"the optimizer's state was saved for another model, or with another bias_correction: {listed}. Resume "
                "with the model and the settings of that run, or start again"
            )
        for name, tensor in own_state.items():
            tensor.copy_(state[name])


def has_kernel(parameters: Iterable[Tensor]) -> bool:
    """Return whether our C++ kernel can update all of these tensors."""
    return kernels() is not None and all(
        tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in parameters
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _PendingSteps:
    """Recent steps of a lazy matrix."""

    applied: Tensor  # number of these steps that each row has had, the first ones
    steps: list[tuple[float, float, float]] = field(default_factory=list)  # results of `_step_factors`


def _same_type(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape and dtype."""
    return a.shape == b.shape and a.dtype == b.dtype


def _described(tensor: Tensor) -> str:
    """Return dtype and shape of a tensor, for messages."""
    layout = "" if tensor.is_sparse or tensor.is_contiguous() else ", not contiguous"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{layout}"
