"""`Engine`: a model from a run, a folder or the hub, with the fastest execution plan for this machine."""

from __future__ import annotations

from pathlib import Path

import torch

from heedful.checkpoint import ModelBundle, load
from heedful.device import resolve_device
from heedful.errors import HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.engine_options import check_token_budget
from heedful.infer.precision import PrecisionOrAuto, check_precision
from heedful.infer.tuning.execution_plan import ExecutionPlan
from heedful.infer.tuning.precision_gate import choose_precision, load_with_plan, precision_for
from heedful.tasks.generation import GenerationConfig


class Engine(BundleEngine):
    """A model that answers inputs with plain data.

    An answer does not depend on the other inputs of its batch; on a GPU, its scores may differ by rounding.
    """

    def __init__(
        self,
        model: str | Path | ModelBundle,
        *,
        revision: str | None = None,
        head: str | None = None,
        precision: PrecisionOrAuto | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        token_budget: int | None = None,
        writing: GenerationConfig | None = None,
        max_length: int | None = None,
        min_confidence: float = 0.0,
        prediction_set: float | None = None,
    ) -> None:
        """Load a model, and apply the precision and the execution plan that are chosen for this machine.

        Args:
            model: A run, a folder, NAME[@REVISION] on the hub, or a loaded bundle, which is used as it is.
            revision: Commit or branch on the hub.
            head: Kind of the head. If None, the head in config.json.
            precision: If None, "float32" on a CPU; on a GPU "bfloat16", or "float16" if it lacks bfloat16. Any other
                precision is refused unless it is faster on this machine and changes scores little; "auto" is the
                fastest accepted one, see tuning/precision_gate.py. On a GPU, "float32" uses TF32 matrix products.
            dtype: Compute everything in this dtype by PyTorch's operators, float32 without TF32; excludes `precision`.
            device: "cpu", "cuda" or "cuda:1". If None, a GPU if there is one.
            token_budget: Maximum tokens of a batch; a longer window is a batch by itself. If None, 4,096 on a CPU; on
                a GPU up to 32,768, as its free memory allows.
            writing: Generation settings of a seq2seq or language model. If None, those of generation_config.json in its
                folder, or greedy decoding of up to 128 tokens if that file is missing.
            max_length: Truncate inputs to this number of tokens instead of splitting them into windows; answers then
                have "truncated_tokens", the number of dropped tokens.
            min_confidence: Minimum probability of a label. If the most probable label has less, the model abstains:
                the label of the answer is "".
            prediction_set: Probability, such as 0.9, that the labels in "prediction_set" of an answer include the right
                one; for classifiers that were calibrated on a dev split. If None, answers have no such set.

        Raises:
            HeedfulError: If arguments exclude each other, the model cannot be loaded or has no head that answers, or
                the precision is refused on this machine.
        """
        if token_budget is not None:
            check_token_budget(token_budget)
        if precision is not None and dtype is not None:
            raise HeedfulError(f"precision is {precision!r} and dtype {dtype}: give one of them")
        if not isinstance(model, ModelBundle):
            bundle, plan, log = open_model(
                model, revision=revision, head=head, precision=precision, dtype=dtype, device=device
            )
        elif any(value is not None for value in (revision, head, precision, dtype, device)):
            raise HeedfulError("this model is loaded already: give revision, head, dtype, device to load() instead")
        else:
            bundle, plan, log = model, None, ()
        super().__init__(
            bundle,
            plan=plan,
            token_budget=token_budget,
            writing=writing,
            max_length=max_length,
            min_confidence=min_confidence,
            prediction_set=prediction_set,
        )
        self.precision_log = log


def open_model(
    name: str | Path,
    *,
    revision: str | None = None,
    head: str | None = None,
    precision: PrecisionOrAuto | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> tuple[ModelBundle, ExecutionPlan | None, tuple[str, ...]]:
    """Load a model in the precision that is chosen for this machine; see `Engine` for the arguments.

    Returns:
        The bundle, its execution plan (None if a dtype is given), and a line for each measured precision.
    """
    resolved_device = resolve_device(device or "auto")
    if dtype is not None:
        return load(name, revision=revision, head=head, dtype=dtype, device=resolved_device), None, ()
    requested = precision or precision_for(name, revision=revision, head=head, device=resolved_device)
    check_precision(requested)
    chosen, measurements = choose_precision(name, requested, revision=revision, head=head, device=resolved_device)
    bundle, plan = load_with_plan(name, chosen, revision=revision, head=head, device=resolved_device)
    return bundle, plan, tuple(measurement.line() for measurement in measurements)
