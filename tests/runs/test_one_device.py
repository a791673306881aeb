"""All tensors of a training step are on one device, for each kind of run.

PyTorch's device "meta" replaces a GPU here: settings ask for "cuda", and `resolve_device` returns "meta". A step fails
if an operator gets tensors of two devices, or if the host waits for the device more often than expected.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heedful.objectives.distillation.objective import Distillation, DistillationLosses, TeacherRequest
from heedful.objectives.distillation.teacher import SampleAlignment
from heedful.runs import run_folder
from heedful.runs.distil import mlm as distil_masked
from heedful.runs.distil import run as distil
from heedful.runs.finetune import run as finetune
from heedful.runs.pretrain import run as pretrain
from heedful.runs.pretrain import teacher as pretrain_teacher
from heedful.train import trainer as trainer_module
from heedful.train.trainer import Trainer
from tests.support.corpora import make_documents, train_on, write_documents
from tests.support.generated_data import assignments, write_splits
from tests.support.model_folders import make_model_dir

META = torch.device("meta")
MOVES = ("aten._to_copy", "aten.copy_", "aten.set_")  # operators that copy a tensor from one device to another
INDEXING = ("aten.index.Tensor", "aten.index_put")  # operators whose indices may be on the host
ON_GPU = {"train.device": "cuda"}
MAX_WAITS = 2  # times that the host waits for the device in a step: for the losses, and for the norm of the gradients
FIT_MODULES = (finetune, pretrain)  # modules that call `fit`
DEVICE_MODULES = (trainer_module, run_folder, finetune, distil, distil_masked, pretrain_teacher)  # `resolve_device`


class OneDevice(TorchDispatchMode):
    """Refuses an operator on tensors of two devices, as CUDA does. Scalars of the host are allowed with any tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func), kwargs or {}
        if not name.startswith((*MOVES, *INDEXING)):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            devices = {tensor.device.type for tensor in tensors if tensor.ndim or tensor.is_meta}
            assert len(devices) < 2, (name, [(tensor.device.type, tuple(tensor.shape)) for tensor in tensors])
        return func(*args, **kwargs)


class StepDoneError(Exception):
    """Stops a run after its first step."""


def caller_name() -> str:
    """Return the name of the function that called the function that calls this one."""
    return sys._getframe(2).f_code.co_qualname


@pytest.fixture(autouse=True)
def meta_as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "meta" replace CUDA, and let each run stop after one step, in which waits of the host are counted.

    Tensors on "meta" have no values; a value that is read is 1.
    """
    reads: list[str] = []  # functions that read a value from the device, which the host waits for
    copies: list[str] = []  # functions that copy something to the device and wait for it
    create, move, to_cpu, autocast = torch.tensor, torch.Tensor.to, torch.Tensor.cpu, torch.autocast

    def recorded_create(*values: Any, **options: Any) -> torch.Tensor:
        if str(options.get("device")) == "meta":
            copies.append(caller_name())
        return create(*values, **options)

    def recorded_move(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        result = move(tensor, *arguments, **options)
        if result.is_meta and not tensor.is_meta and not options.get("non_blocking"):
            copies.append(caller_name())
        return result

    def recorded_read(read: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def read_or_one(tensor: torch.Tensor) -> Any:
            if not tensor.is_meta:
                return read(tensor)
            reads.append(caller_name())
            return 1.0 if tensor.ndim == 0 else torch.ones(tensor.shape, device="cpu").tolist()

        return read_or_one

    def fit_one_step(trainer: Trainer, *arguments: Any, **options: Any) -> Any:
        extra_module = trainer.objective.extra_module
        modules = [trainer.loaded] if extra_module is None else [trainer.loaded, extra_module]
        devices = {parameter.device for module in modules for parameter in module.parameters()}
        assert devices == {trainer.device} == {META}
        reads.clear()
        monkeypatch.setattr(torch, "tensor", recorded_create)
        monkeypatch.setattr(torch.Tensor, "to", recorded_move)
        with OneDevice():  # type: ignore[no-untyped-call]
            assert trainer.train_step().tokens
        waits = [*reads, *copies]
        is_recurrent = "Recurrent" in str(waits)  # recurrent layers read the lengths of sequences
        assert len(waits) <= MAX_WAITS or is_recurrent, f"the host waits {len(waits)} times a step: {waits}"
        raise StepDoneError

    for module in FIT_MODULES:
        monkeypatch.setattr(module, "fit", fit_one_step)
    for module in DEVICE_MODULES:
        monkeypatch.setattr(module, "resolve_device", lambda name: META if name == "cuda" else torch.device(name))
    monkeypatch.setattr(
        torch.Tensor,
        "cpu",
        lambda tensor: torch.ones_like(tensor, device="cpu") if tensor.is_meta else to_cpu(tensor),
    )
    for name in ("item", "tolist", "__float__", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, recorded_read(getattr(torch.Tensor, name)))
    monkeypatch.setattr(
        torch,
        "autocast",
        lambda device_type, *arguments, **options: (
            nullcontext() if device_type == "meta" else autocast(device_type, *arguments, **options)
        ),
    )


@pytest.mark.parametrize(
    "kind",
    [
        *("single", "multiple", "regress", "tag", "qa", "choose 4", "embed", "embed cosent", "together"),
        *("rank", "rank listnet", "rank binary", "rank cosent"),
    ],
)
def test_tasks(kind: str, tmp_path: Path) -> None:
    data_kind, loss = kind, ""
    if kind.startswith(("embed ", "rank ")):
        data_kind, loss = kind.split(" ")
    tasks = {"single": "classify", "multiple": "classify", "choose 4": "multiple-choice", "together": "embed"}
    settings = ON_GPU | {"eval_baseline": "false"}  # evaluation before training would read values
    if loss:
        settings["task.loss"] = loss
    with pytest.raises(StepDoneError):
        finetune.finetune(
            tasks.get(data_kind, data_kind),
            write_splits(data_kind, tmp_path / "data"),
            tmp_path / "run",
            assignments=assignments(settings),
        )


@pytest.mark.parametrize("kind", ["bag", "attention", "structured", "attention+recurrent"])
def test_classic_models(kind: str, tmp_path: Path) -> None:
    reader, _, recurrent = kind.partition("+")
    settings = ON_GPU | {"init.kind": "classic", "init.reader.kind": reader, "init.words.width": 8}
    if recurrent:
        settings["init.reader.over.kind"] = "recurrent"
    data = write_splits("single", tmp_path / "data")
    with pytest.raises(StepDoneError):
        finetune.finetune("classify", data, tmp_path / "run", assignments=assignments(settings))


@pytest.mark.parametrize("architecture", ["transformer", "recurrent"])
def test_rewriting(architecture: str, tmp_path: Path) -> None:
    with (tmp_path / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("source", "target"), *((f"a b {n}", f"{n} b a") for n in range(40))])
    settings = (
        f"init.kind={architecture}",
        "init.tokenizer.vocab_size=270",
        "train.device=cuda",
        "train.precision=float32",
    )
    with pytest.raises(StepDoneError):
        finetune.finetune("seq2seq", tmp_path / "data.csv", tmp_path / "run", assignments=settings)


KINDS = ("mlm", "mlm+nsp", "mlm+sop", "clm", "plm", "rtd", "distillation")


@pytest.mark.parametrize("kind", KINDS)
def test_objectives(kind: str, tmp_path: Path) -> None:
    text = write_documents(tmp_path / "text.txt", make_documents(60, seed=1))
    train_on(make_documents(60, seed=1), vocab_size=300).save(tmp_path / "tokenizer")
    settings: dict[str, Any] = ON_GPU | {
        "model.layers": 1,
        "model.width": 32,
        "model.heads": 2,
        "train.batch_size": 8,
        "train.precision": "float32",
        "max_seq_length": 32,
        "pack_length": 64,
        "eval_fraction": 0.1,
        "eval_every_steps": 3,
        "corpus.sample_by": "paragraph",
    }
    if kind == "distillation":
        settings["objective.teacher"] = make_model_dir(tmp_path / "teacher", "single")
    with pytest.raises(StepDoneError):
        pretrain.pretrain(
            text,
            tmp_path / "run",
            objective=kind,
            tokenizer=tmp_path / "tokenizer",
            assignments=[f"{path}={value}" for path, value in settings.items()],
        )


@pytest.mark.parametrize(
    ("losses", "student"), [("distilbert", "layers=1"), ("minilmv2", "layers=1"), ("logits", "bilstm")]
)
def test_distilling(losses: str, student: str, tmp_path: Path) -> None:
    teacher = make_model_dir(tmp_path / "teacher", "single")
    data = write_splits("single", tmp_path / "data")
    settings = ("train.device=cuda", "train.precision=float32", "teacher_cache.enabled=false", "verdict.baseline=none")
    with pytest.raises(StepDoneError):
        distil.distil(teacher, data, tmp_path / "run", student=student, loss=losses, assignments=settings)


def test_distilling_a_masked_language_model(tmp_path: Path) -> None:
    teacher = make_model_dir(tmp_path / "teacher", "masked")
    text = write_documents(tmp_path / "text.txt", make_documents(60, seed=1))
    settings = (
        "pretrain.train.device=cuda",
        "pretrain.train.precision=float32",
        "pretrain.max_seq_length=32",
        "pretrain.pack_length=64",
        "pretrain.eval_fraction=0.1",
        "pretrain.corpus.sample_by=paragraph",
        "teacher_cache.enabled=false",
        "verdict.baseline=none",
    )
    with pytest.raises(StepDoneError):
        distil.distil(teacher, text, tmp_path / "run", student="layers=1", assignments=settings)


def test_words_without_outputs_of_the_teacher() -> None:
    """The teacher has no outputs for the first sample, whose scores are filled up on the device."""

    def run_teacher(sample_indices: Sequence[int], keys: Sequence[int]) -> Any:
        return {"scores": [torch.ones(2, 3, device=META) for _ in sample_indices]}

    alignment = SampleAlignment(same_tokens=False, teacher_indices=[(), (0,)], words=[None, slice(0, 2)])
    arguments: Any = {"base_objective": None, "run_teacher": run_teacher, "projections": torch.nn.ModuleDict()}
    objective = Distillation(kind="tokens", losses=DistillationLosses(), alignment=alignment, **arguments)
    no_weights = torch.ones(0)
    request = TeacherRequest(
        samples=(),
        sample_indices=[0, 1],
        keys=[0, 0],
        label_weights=no_weights,
        kd_weights=no_weights,
        score_counts=[2, 2],
        token_weights=None,
    )
    with OneDevice():  # type: ignore[no-untyped-call]
        outputs = objective._teacher_outputs(request, torch.ones(4, 3, device=META))
    assert outputs["scores"].shape == (4, 3)
    assert outputs["scores"].is_meta
