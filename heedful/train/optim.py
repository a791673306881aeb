"""AdamW over named tensors, and schedules of its rate.

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    p <- p - rate (m / c1) / (sqrt(v / c2) + eps) - rate decay p

with c1 = 1 - b1^t and c2 = 1 - b2^t, or 1 without bias correction (Kingma and Ba 2015; Loshchilov and Hutter 2019).
Decay is for tensors of two dimensions or more: in our models all others are biases and the weights of norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from heedful.csrc import kernels, unavailable_reason
from heedful.errors import HeedfulError
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

# -- schedules --------------------------------------------------------------------------------------------------


def lr_factor(schedule: Schedule, progress: int | float, total: int | float) -> float:
    """What the rate is multiplied by after `progress` of `total` steps, or seconds: 0 at the start of a warm-up.

    A warm-up of less than one is none, so that the only step of a short run moves the weights.

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


# -- rates ------------------------------------------------------------------------------------------------------


def layer_lrs(names: Iterable[str], settings: AdamW) -> dict[str, float]:
    """The rate of each parameter: rate * layer_decay^(blocks + 1 - level) (Howard and Ruder 2018; Zhang et al. 2021).

    Embeddings have level 0, block i has i + 1, a final norm that of the last block below it, the head blocks + 1. A
    decoder's blocks stand upon the encoder's. How many blocks there are is read off the names.
    """
    names = list(names)
    if settings.layer_decay == 1.0:
        return dict.fromkeys(names, settings.lr)
    places = {name: _place(name) for name in names}
    encoder, decoder = (
        max((block for part, block in places.values() if part == stack), default=0) for stack in ("encoder", "decoder")
    )
    top = encoder + decoder + 1

    def level(part: str, block: int) -> int:
        match part:
            case "encoder":
                return block or encoder
            case "decoder":
                return encoder + (block or decoder)
        return top if part == "head" else 0

    return {name: settings.lr * settings.layer_decay ** (top - level(*place)) for name, place in places.items()}


def _place(name: str) -> tuple[str, int]:
    """The part of the model that a parameter is in, and its block there, from 1; 0 outside of blocks."""
    match name.split("."):
        case ["encoder" | "decoder" as stack, "blocks" | "relations", number, _, *_] if number.isdecimal():
            return stack, int(number) + 1  # a relation that all layers share is that of the first block
        case ["encoder" | "decoder" as stack, "norm", _]:
            return stack, 0
        case ["embedding" | "decoder_embedding" | "head" as part, _, *_]:
            return part, 0
    raise HeedfulError(
        f"layer_decay: the depth of {name} is not known; expected embedding, decoder_embedding, encoder, decoder or "
        "head and what is in them. Set layer_decay = 1.0 to train it"
    )


# -- the optimizer ----------------------------------------------------------------------------------------------

PIECE = 1 << 14  # numbers that our kernel moves at a time
HISTORY = 4096  # steps that a row may lag behind
_FUSED = frozenset({"cpu", "cuda"})  # where torch's fused kernel is used: by far its fastest, also on a CPU


class Optimizer:
    """Changes named tensors in place; gradients come in by the same names, and a tensor without one does not move.

    Gradients are sums over targets: `scale`, 1 / count, makes means of them. One step is

        norm = optimizer.norm(gradients, scale=scale)    # nothing has moved: look at it
        optimizer.step(gradients, factor=factor, scale=scale, norm=norm)
    """

    def __init__(self, parameters: Mapping[str, Tensor], settings: AdamW) -> None:
        assert len({id(each) for each in parameters.values()}) == len(parameters), "one tensor would move twice"
        self.settings = settings
        self.rates = layer_lrs(parameters, settings)  # peaks
        self._parameters = dict(parameters)
        self._m = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self._v = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self._steps: dict[str, Tensor] = {}
        self._groups: dict[tuple[float, float], list[str]] = {}  # by rate and decay
        self._fused = {parameter.device.type for parameter in parameters.values()} <= _FUSED
        start = 0.0 if settings.bias_correction else math.inf  # b^inf = 0, so that c1 = c2 = 1 exactly
        for name, parameter in parameters.items():
            if parameter.dtype not in (torch.float32, torch.float64) or not parameter.is_contiguous():
                raise HeedfulError(
                    f"{name} is {_described(parameter)}; expected contiguous float32 (or float64): small updates are "
                    "lost in less, so keep a float32 copy and train that"
                )
            self._steps[name] = torch.full((), start, device=parameter.device if self._fused else "cpu")
            decay = 0.0 if parameter.ndim < 2 or name.endswith("bias") else settings.weight_decay  # of heads, too
            self._groups.setdefault((self.rates[name], decay), []).append(name)
        self._lagging: dict[str, _Lag] = {}

    def lag(self, name: str) -> None:
        """From now on this matrix has gradients of some rows alone (sparse ones), and other rows may lag behind.

        Each row moves as it would without lagging, to the last bit, but only when it is needed: `catch_up` and
        `settle` bring rows up to date, and `state` settles.

        Raises HeedfulError unless the kernels in C++ are used and take this matrix: float32, on the CPU, with rows of
        whole vectors.
        """
        parameter = self._parameters.get(name)
        if parameter is None:
            raise HeedfulError(f"{name} is not among the trained tensors: its rows cannot lag")
        if parameter.ndim != 2 or parameter.dtype != torch.float32 or usable_kernels(parameter) is None:
            reason = unavailable_reason() or "its type or its shape does not fit the kernels in C++"
            raise HeedfulError(
                f"the rows of {name} cannot lag: {reason}. It is {_described(parameter)} on {parameter.device.type}; "
                "expected the kernels, and a float32 matrix on the CPU whose width is a multiple of 16. Train it with "
                "dense gradients, without lag"
            )
        self._lagging[name] = _Lag(moved=torch.zeros(len(parameter), dtype=torch.int32, device="cpu"))

    def catch_up(self, name: str, rows: Tensor | None = None) -> None:
        """Bring these rows up to date; all of them, unless some are given. Rows that are not there move nothing."""
        lag = self._lagging[name]
        if rows is not None and lag.steps:
            rows = rows.flatten().to(torch.int64).unique()
            if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < len(lag.moved):
                return  # whoever reads them says what is wrong
        if lag.steps:
            self._move_rows(name, rows, None, 1.0)
        if rows is None:
            lag.steps.clear()
            lag.moved.zero_()

    def settle(self) -> None:
        """Bring all rows up to date that lag behind."""
        for name in self._lagging:
            self.catch_up(name)

    def norm(self, gradients: Mapping[str, Tensor], *, scale: float) -> float:
        """The norm of all scaled gradients as one vector; not finite if any number in them is not.

        Over rows in float64: one float32 sum over a large table loses digits on a CPU. Elsewhere sums are made in
        parts anyway, and one launch for all tensors counts more.
        """
        each_one = (each.detach() for each in gradients.values())
        dense = [each.values() if each.is_sparse else each for each in each_one]
        if dense and all(each.device.type == "cuda" for each in dense):
            norms = torch.stack(list(torch._foreach_norm(dense)))
            return scale * float(torch.linalg.vector_norm(norms, dtype=torch.float64))
        rows = [torch.linalg.vector_norm(each, dim=-1).flatten() for each in dense]
        return scale * float(torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64)) if rows else 0.0

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], *, factor: float, scale: float, norm: float) -> None:
        """Move every tensor that has a gradient; `norm` is what `norm()` gave, and decides on clipping.

        The gradients are used up: what they hold afterwards is of no use. A norm that is not finite is refused, as is
        a gradient that fits no tensor, before anything has moved.
        """
        self._check(gradients)
        if not math.isfinite(norm):
            raise HeedfulError(
                f"the norm of the gradients is {norm}, and nothing was changed: leave the step out, or lower the rate"
            )
        clip = self.settings.max_grad_norm
        if clip is not None and norm > clip:
            scale *= clip / norm
        for (rate, decay), names in self._groups.items():
            for name in (name for name in names if name in gradients and gradients[name].is_sparse):
                self._move_some(name, gradients[name], rate * factor, decay, scale)
            if names := [name for name in names if name in gradients and not gradients[name].is_sparse]:
                for name in self._lagging.keys() & names:  # their steps so far come before this one
                    self.catch_up(name)
                self._move(names, [gradients[name].contiguous() for name in names], rate * factor, decay, scale)

    def _move(self, names: list[str], gradients: list[Tensor], rate: float, decay: float, scale: float) -> None:
        parameters = [self._parameters[name] for name in names]
        m, v = [self._m[name] for name in names], [self._v[name] for name in names]
        steps = [self._steps[name] for name in names]
        if has_kernel(parameters) and len({float(each) for each in steps}) == 1:
            torch._foreach_add_(steps, 1)
            self._move_together(
                list(zip(parameters, m, v, gradients, strict=True)), rate, decay, float(steps[0]), scale
            )
            return
        # gradients have to be contiguous: the fused kernel does not look at strides
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
            lr=rate,
            weight_decay=decay,
            eps=self.settings.eps,
            maximize=False,
        )

    def _move_together(
        self, tensors: list[tuple[Tensor, ...]], rate: float, decay: float, done: float, scale: float
    ) -> None:
        """The same by our kernel, which reads and writes everything once."""
        found = kernels()
        assert found is not None
        lines, before = [], 0
        for each in tensors:
            count = each[0].numel()
            lines.append([*(part.data_ptr() for part in each), count, before])
            before += -(-count // PIECE)
        step = torch.tensor(self._numbers(rate, decay, done), dtype=torch.float32, device="cpu")
        lined = torch.tensor(lines, dtype=torch.int64, device="cpu")
        b1, b2 = self.settings.betas
        found.adamw(
            len(lines), lined.data_ptr(), step.data_ptr(), scale, b1, b2, self.settings.eps, torch.get_num_threads()
        )

    def _numbers(self, rate: float, decay: float, done: float) -> tuple[float, float, float]:
        """What our kernels need of a step: 1 - rate decay, rate / c1, 1 / sqrt(c2)."""
        b1, b2 = self.settings.betas
        return 1 - rate * decay, rate / (1 - b1**done), (1 - b2**done) ** -0.5

    def _move_some(self, name: str, gradient: Tensor, rate: float, decay: float, scale: float) -> None:
        lag = self._lagging[name]
        self._steps[name] += 1
        lag.steps.append(self._numbers(rate, decay, float(self._steps[name])))
        self._move_rows(name, gradient.indices()[0], gradient.values().contiguous(), scale)
        if len(lag.steps) == HISTORY:
            self.catch_up(name)

    def _move_rows(self, name: str, rows: Tensor | None, gradient: Tensor | None, scale: float) -> None:
        found, lag, parameter = kernels(), self._lagging[name], self._parameters[name]
        assert found is not None
        steps = torch.tensor(lag.steps, dtype=torch.float32, device="cpu")
        found.adamw_rows(
            parameter.data_ptr(),
            self._m[name].data_ptr(),
            self._v[name].data_ptr(),
            lag.moved.data_ptr(),
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
        for name, gradient in gradients.items():
            parameter = self._parameters.get(name)
            if parameter is None:
                raise HeedfulError(f"there is a gradient for {name}, which is not among the trained tensors")
            if not _alike(gradient, parameter):
                told = f"the gradient of {name} is {_described(gradient)}"
                raise HeedfulError(f"{told}; expected {_described(parameter)} as its tensor")
            if gradient.is_sparse:
                self._check_rows(name, gradient)

    def _check_rows(self, name: str, gradient: Tensor) -> None:
        """Refuse a sparse gradient that the kernel would read, or write, beside the rows of its table."""
        if name not in self._lagging:
            raise HeedfulError(f"the gradient of {name} is sparse: call lag({name!r}) first, or give a dense one")
        if gradient.sparse_dim() != 1 or not gradient.is_coalesced():
            raise HeedfulError(
                f"the gradient of {name} is sparse in {gradient.sparse_dim()} dimensions, "
                f"{'' if gradient.is_coalesced() else 'not '}coalesced; expected rows, each once: coalesce() it"
            )
        rows = gradient.indices()[0]
        if len(rows) and not 0 <= (least := int(rows.min())) <= (most := int(rows.max())) < len(gradient):
            raise HeedfulError(
                f"the gradient of {name} has rows {least} to {most}, but its table has 0 to {len(gradient) - 1}"
            )

    def state(self) -> dict[str, Tensor]:
        """All that the next step depends on but the tensors themselves: m and v, and with bias correction the steps.

        They are not copies: the next step changes them.
        """
        self.settle()
        kinds = {"m": self._m, "v": self._v} | ({"steps": self._steps} if self.settings.bias_correction else {})
        return {f"{name}.{kind}": each for kind, tensors in kinds.items() for name, each in tensors.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state()` gave, bit for bit; what does not fit is refused, before anything has changed."""
        mine = self.state()
        wrong = [f"{name} is missing" for name in mine if name not in state]
        wrong += [f"{name} is not expected" for name in state if name not in mine]
        wrong += [
            f"{name} is {_described(state[name])}, expected {_described(tensor)}"
            for name, tensor in mine.items()
            if name in state and not _alike(state[name], tensor)
        ]
        if wrong:
            listed = "; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if wrong[4:] else "")
            raise HeedfulError(
                f"the optimizer's state was saved for another model, or with another bias_correction: {listed}. Go on "
                "with the model and the settings of that run, or begin anew"
            )
        for name, tensor in mine.items():
            tensor.copy_(state[name])


def has_kernel(parameters: Iterable[Tensor]) -> bool:
    """Whether our kernel moves such tensors."""
    return kernels() is not None and all(
        each.device.type == "cpu" and each.dtype == torch.float32 for each in parameters
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Lag:
    """How far the rows of a matrix are: moved[row] of the steps, whose numbers are those that the kernel needs."""

    moved: Tensor
    steps: list[tuple[float, float, float]] = field(default_factory=list)


def _alike(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and tensor.dtype == other.dtype


def _described(tensor: Tensor) -> str:
    layout = "" if tensor.is_sparse or tensor.is_contiguous() else ", not contiguous"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{layout}"
