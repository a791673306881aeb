"""What a step of each run computes lies on one device: PyTorch's "meta" stands for a GPU, and no two may meet."""

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
from heedful.runs import run_folder as folder
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
MOVES = ("aten._to_copy", "aten.copy_", "aten.set_")  # they are how a tensor gets to a device
PLACED = ("aten.index.Tensor", "aten.index_put")  # places may lie on the host
AUTOCAST = torch.autocast
THERE = {"train.device": "cuda"}
READS = 2  # the losses of a step, and the norm of its gradients


class OneDevice(TorchDispatchMode):
    """Refuses an operator on tensors of two devices, as CUDA does; a number of the host may stand beside others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func), kwargs or {}
        if not name.startswith((*MOVES, *PLACED)):
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            there = {each.device.type for each in tensors if each.ndim or each.is_meta}
            assert len(there) < 2, (name, [(each.device.type, tuple(each.shape)) for each in tensors])
        return func(*args, **kwargs)


class SeenError(Exception):
    """A step was made."""


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA is "meta", whose numbers read as 1; a run is over after a step that reads few of them."""

    def fit(trainer: Trainer, *arguments: Any, **more: Any) -> Any:
        models = [trainer.loaded, *([] if trainer.objective.extra_module is None else [trainer.objective.extra_module])]
        assert {each.device for model in models for each in model.parameters()} == {trainer.device} == {META}
        reads.clear()
        monkeypatch.setattr(torch, "tensor", created)
        monkeypatch.setattr(torch.Tensor, "to", moved)
        with OneDevice():  # type: ignore[no-untyped-call]
            assert trainer.train_step().tokens
        waits = [*reads, *copies]
        assert len(waits) <= READS or "Recurrent" in str(waits), f"the host waits {len(waits)} times a step: {waits}"
        raise SeenError

    reads: list[str] = []  # functions that read a number of the device
    copies: list[str] = []  # functions that wait until something is copied to it
    create, move = torch.tensor, torch.Tensor.to

    def created(*values: Any, **how: Any) -> torch.Tensor:
        if str(how.get("device")) == "meta":
            copies.append(sys._getframe(1).f_code.co_qualname)
        return create(*values, **how)

    def moved(tensor: torch.Tensor, *there: Any, **how: Any) -> torch.Tensor:
        result = move(tensor, *there, **how)
        if result.is_meta and not tensor.is_meta and not how.get("non_blocking"):
            copies.append(sys._getframe(1).f_code.co_qualname)
        return result

    def known(read: Callable[[torch.Tensor], Any], number: Any = 1.0) -> Callable[[torch.Tensor], Any]:
        def read_or_known(tensor: torch.Tensor) -> Any:
            if not tensor.is_meta:
                return read(tensor)
            reads.append(sys._getframe(1).f_code.co_qualname)
            return number if tensor.ndim == 0 else torch.full(tensor.shape, number, device="cpu").tolist()

        return read_or_known

    for module in (finetune, pretrain):
        monkeypatch.setattr(module, "fit", fit)
    for place in (trainer_module, folder, finetune, distil, distil_masked, pretrain_teacher):
        monkeypatch.setattr(place, "resolve_device", lambda asked: META if asked == "cuda" else torch.device(asked))
    host = torch.Tensor.cpu
    monkeypatch.setattr(
        torch.Tensor, "cpu", lambda each: torch.ones_like(each, device="cpu") if each.is_meta else host(each)
    )
    for name in ("item", "tolist", "__float__", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, known(getattr(torch.Tensor, name)))
    monkeypatch.setattr(
        torch, "autocast", lambda kind, *how, **more: nullcontext() if kind == "meta" else AUTOCAST(kind, *how, **more)
    )


@pytest.mark.parametrize(
    "kind",
    [
        *("single", "multiple", "regress", "tag", "qa", "choose 4", "embed", "embed cosent", "together"),
        *("rank", "rank listnet", "rank binary", "rank cosent"),
    ],
)
def test_tasks(kind: str, tmp_path: Path) -> None:
    kind, _, loss = (kind, "", "") if kind == "choose 4" else kind.partition(" ")
    task = {"single": "classify", "multiple": "classify", "choose 4": "multiple-choice", "together": "embed"}.get(
        kind, kind
    )
    unscored = assignments(  # before training, which reads numbers
        THERE | {"eval_baseline": "false"} | ({"task.loss": loss} if loss else {})
    )
    with pytest.raises(SeenError):
        finetune.finetune(task, write_splits(kind, tmp_path / "data"), tmp_path / "run", assignments=unscored)


@pytest.mark.parametrize("kind", ["bag", "attention", "structured", "attention+recurrent"])
def test_classic_models(kind: str, tmp_path: Path) -> None:
    reader, _, recurrent = kind.partition("+")
    more = THERE | {"init.kind": "classic", "init.reader.kind": reader, "init.words.width": 8}
    if recurrent:
        more["init.reader.over.kind"] = "recurrent"
    with pytest.raises(SeenError):
        finetune.finetune(
            "classify", write_splits("single", tmp_path / "data"), tmp_path / "run", assignments=assignments(more)
        )


WRITERS = {"transformer": "init.kind=transformer", "recurrent": "init.kind=recurrent"}


@pytest.mark.parametrize("writer", ["transformer", "recurrent"])
def test_rewriting(writer: str, tmp_path: Path) -> None:
    with (tmp_path / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("source", "target"), *((f"a b {n}", f"{n} b a") for n in range(40))])
    how = (WRITERS[writer], "init.tokenizer.vocab_size=270", "train.device=cuda", "train.precision=float32")
    with pytest.raises(SeenError):
        finetune.finetune("seq2seq", tmp_path / "data.csv", tmp_path / "run", assignments=how)


KINDS = ("mlm", "mlm+nsp", "mlm+sop", "clm", "plm", "rtd", "distillation")


@pytest.mark.parametrize("kind", KINDS)
def test_objectives(kind: str, tmp_path: Path) -> None:
    text = write_documents(tmp_path / "text.txt", make_documents(60, seed=1))
    train_on(make_documents(60, seed=1), vocab_size=300).save(tmp_path / "words")
    more = {"objective.teacher": make_model_dir(tmp_path / "teacher", "single")} if kind == "distillation" else {}
    small = {
        "model.layers": 1,
        "model.width": 32,
        "model.heads": 2,
        "train.batch_size": 8,
        "train.precision": "float32",
    }
    small |= {
        "max_seq_length": 32,
        "pack_length": 64,
        "eval_fraction": 0.1,
        "eval_every_steps": 3,
        "corpus.sample_by": "paragraph",
    }
    how = [f"{name}={value}" for name, value in (small | more | THERE).items()]
    with pytest.raises(SeenError):
        pretrain.pretrain(text, tmp_path / "run", objective=kind, tokenizer=tmp_path / "words", assignments=how)


@pytest.mark.parametrize(
    ("losses", "student"), [("distilbert", "layers=1"), ("minilmv2", "layers=1"), ("logits", "bilstm")]
)
def test_distilling(losses: str, student: str, tmp_path: Path) -> None:
    teacher = make_model_dir(tmp_path / "teacher", "single")
    how = ("train.device=cuda", "train.precision=float32", "teacher_cache.enabled=false", "verdict.baseline=none")
    with pytest.raises(SeenError):
        distil.distil(
            teacher, write_splits("single", tmp_path / "data"), tmp_path / "run", student=student, loss=losses,
            assignments=how,
        )  # fmt: skip


def test_distilling_hidden_tokens(tmp_path: Path) -> None:
    teacher, text = (
        make_model_dir(tmp_path / "teacher", "masked"),
        write_documents(tmp_path / "text.txt", make_documents(60, seed=1)),
    )
    how = [
        f"pretrain.{name}={value}"
        for name, value in (THERE | {"max_seq_length": 32, "pack_length": 64, "eval_fraction": 0.1}).items()
    ]
    how += ["pretrain.train.precision=float32", "pretrain.corpus.sample_by=paragraph", "teacher_cache.enabled=false"]
    with pytest.raises(SeenError):
        distil.distil(teacher, text, tmp_path / "run", student="layers=1", assignments=[*how, "verdict.baseline=none"])


def test_tags_of_which_the_teacher_says_nothing() -> None:
    def ask(numbers: Sequence[int], keys: Sequence[int]) -> Any:
        return {"scores": [torch.ones(2, 3, device=META) for _ in numbers]}

    alignment = SampleAlignment(same_tokens=False, teacher_indices=[(), (0,)], words=[None, slice(0, 2)])
    arguments: Any = {"base_objective": None, "run_teacher": ask, "projections": torch.nn.ModuleDict()}
    objective = Distillation(kind="tokens", losses=DistillationLosses(), alignment=alignment, **arguments)
    none = torch.ones(0)
    asked = TeacherRequest(
        samples=(),
        sample_indices=[0, 1],
        keys=[0, 0],
        label_weights=none,
        kd_weights=none,
        score_counts=[2, 2],
        token_weights=None,
    )
    with OneDevice():  # type: ignore[no-untyped-call]
        outputs = objective._teacher_outputs(asked, torch.ones(4, 3, device=META))
    assert outputs["scores"].shape == (4, 3) and outputs["scores"].is_meta
