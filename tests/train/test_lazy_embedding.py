"""Lazily updated embeddings: their rows equal those that are updated in every step; training with our kernels."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import heedful
from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.csrc import library
from heedful.data import LabelledExample
from heedful.errors import HeedfulError
from heedful.look.block_steps import _embedding_steps
from heedful.look.head_patterns import _static_unit_vectors
from heedful.look.inspection import Inspection
from heedful.look.word_vectors import nearest_tokens, static_vector
from heedful.model.config import Classes, EmbeddingConfig, Learned, MaskedTokens, ModelConfig, StackConfig
from heedful.packed import Packed
from heedful.tasks.classify import Classify
from heedful.train.optim import Optimizer
from heedful.train.settings import AdamW
from heedful.train.trainer import Trainer, TrainSettings
from tests.support.tiny_runs import LABELS, LINES, tokenizer

pytestmark = pytest.mark.usefixtures("native")


def make_classifier(dropout: float = 0.0, head: Any = None) -> ModelBundle:
    """Return a new model with two layers of width 32."""
    embedding = EmbeddingConfig(
        vocabulary=tokenizer().size, width=32, positions=Learned(count=48), norm="layer", dropout=dropout
    )
    encoder = StackConfig(
        width=32, layers=2, heads=2, head_width=16, inner_width=64, dropout=dropout, attention_dropout=dropout
    )
    head = head or Classes(labels=LABELS, dropout=dropout)
    model = ModelConfig(embedding=embedding, encoder=encoder)
    return create(BundleConfig(family="heedful", model=model, head=head), tokenizer(), seed=1)


def make_trainer(loaded: ModelBundle | None = None, *, dropout: float = 0.0, steps: int = 12, **fields: Any) -> Trainer:
    """Return a trainer of a text classifier."""
    loaded = loaded or make_classifier(dropout)
    task = Classify(tokenizer=tokenizer(), limit=loaded.max_length, labels=LABELS)
    parts = [line.rpartition(" ") for line in LINES]
    samples = task.encode_split([LabelledExample(text=text, label=label) for text, _, label in parts]).samples
    settings = TrainSettings(max_steps=steps, batch_size=3, optimizer=AdamW(lr=1e-2), precision="float32", **fields)
    return Trainer(loaded, task, samples, settings)


def copy_weights(loaded: ModelBundle) -> dict[str, Tensor]:
    """Return a copy of the weights of a model, after all pending updates."""
    return {name: tensor.detach().clone() for name, tensor in loaded.named_tensors().items()}


# -- the optimizer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias_correction", [True, False])
def test_lazily_updated_rows_do_not_depend_on_when_they_are_updated(bias_correction: bool) -> None:
    initial, settings = torch.randn(60, 48), AdamW(lr=1e-2, bias_correction=bias_correction)

    def train(mode: str) -> tuple[Tensor, dict[str, Tensor]]:
        table, generator = initial.clone(), torch.Generator().manual_seed(3)
        optimizer = Optimizer({"table": table}, settings)
        if mode != "dense":
            optimizer.make_lazy("table")
        for step in range(150):
            rows, values = torch.randint(0, 30, (5,), generator=generator), torch.randn(5, 48, generator=generator)
            gradient = torch.sparse_coo_tensor(rows[None], values, (60, 48), check_invariants=True).coalesce()
            if mode == "dense":
                gradient = gradient.to_dense()
            else:
                optimizer.catch_up("table", None if mode == "all rows" else rows)
            gradients = {"table": gradient}
            norm = optimizer.grad_norm(gradients, scale=0.5)
            optimizer.step(gradients, lr_factor=(step % 37) / 37, scale=0.5, grad_norm=norm)
            if mode == "with flushes" and step % 13 == 0:
                optimizer.flush()
        state = optimizer.state()
        return table, state

    dense, _ = train("dense")
    lazy, state = train("used rows")
    for mode in ("all rows", "with flushes"):
        table, other_state = train(mode)
        assert torch.equal(table, lazy)
        assert all(torch.equal(state[name], other_state[name]) for name in state)
    torch.testing.assert_close(lazy, dense, rtol=1e-5, atol=2e-5)  # PyTorch's kernel rounds differently


@pytest.mark.parametrize("shape", [(4, 20), (4, 1), (64,), (2, 4, 16)], ids=str)
def test_make_lazy_refuses_shapes_that_the_kernels_cannot_update(shape: tuple[int, ...]) -> None:
    optimizer = Optimizer({"table": torch.zeros(shape)}, AdamW(lr=1e-2))
    with pytest.raises(HeedfulError, match=r"table cannot be updated lazily: .*float32 \["):
        optimizer.make_lazy("table")


def test_make_lazy_refuses_float64_and_unknown_names() -> None:
    optimizer = Optimizer({"table": torch.zeros(4, 32, dtype=torch.float64)}, AdamW(lr=1e-2))
    with pytest.raises(HeedfulError, match=r"table .*float64 \[4, 32\]"):
        optimizer.make_lazy("table")
    with pytest.raises(HeedfulError, match="other is not a trained tensor"):
        optimizer.make_lazy("other")


def test_make_lazy_without_kernels_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_library_or_reason", lambda: "no compiler")
    with pytest.raises(HeedfulError, match="no compiler"):
        Optimizer({"table": torch.zeros(4, 32)}, AdamW(lr=1e-2)).make_lazy("table")


def test_sparse_gradients_must_be_coalesced_rows_of_a_lazy_table() -> None:
    optimizer = Optimizer({"table": torch.zeros(4, 32)}, AdamW(lr=1e-2))

    def step(gradient: Tensor) -> None:
        optimizer.step({"table": gradient}, lr_factor=1.0, scale=1.0, grad_norm=1.0)

    duplicate_rows = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 32), (4, 32), check_invariants=True)
    with pytest.raises(HeedfulError, match="gradient of table is sparse"):
        step(duplicate_rows.coalesce())
    optimizer.make_lazy("table")
    with pytest.raises(HeedfulError, match="sparse in 1 dimensions, not coalesced; expected rows"):
        step(duplicate_rows)
    with pytest.raises(HeedfulError, match="sparse in 2 dimensions, coalesced; expected rows"):
        step(torch.eye(4, 32).to_sparse().coalesce())
    out_of_range = torch.tensor([[0, 4]])
    with pytest.raises(HeedfulError, match="rows 0 to 4, but its table has 0 to 3"):
        step(
            torch.sparse_coo_tensor(out_of_range, torch.ones(2, 32), (4, 32), is_coalesced=True, check_invariants=False)
        )


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("width", [1, 7, 12, 20, 37, 64, 69])
def test_the_kernel_writes_only_the_rows_that_it_updates(
    native: library.Kernels, width: int, with_gradient: bool
) -> None:
    """Rows 1 and 3 of 5 are updated; the tables are followed by other memory."""
    generator, steps = torch.Generator().manual_seed(5), [(0.999, 0.01, 30.0), (0.998, 0.02, 22.0), (1.0, 0.03, 18.0)]
    memory = [
        torch.rand(5 * width + 64, generator=generator) for _ in range(3)
    ]  # p, m and v, with other memory after each table
    before = [buffer.clone() for buffer in memory]
    rows, gradient = torch.tensor([1, 3]), torch.randn(2 * width + 64, generator=generator)
    applied, factors = torch.zeros(5, dtype=torch.int32), torch.tensor(steps)
    native.adamw_rows(
        *(buffer.data_ptr() for buffer in memory),
        applied.data_ptr(),
        width,
        rows.data_ptr(),
        len(rows),
        factors.data_ptr(),
        len(steps),
        gradient.data_ptr() if with_gradient else 0,
        0.5,
        0.9,
        0.999,
        1e-8,
        1,
    )
    assert applied.tolist() == [0, 3, 0, 3, 0]
    p, m, v = (buffer[: 5 * width].view(5, width)[rows].double() for buffer in before)
    for number, (decay, lr, root) in enumerate(steps):
        g = gradient[: 2 * width].view(2, width).double() / 2 if with_gradient and number == 2 else torch.zeros_like(p)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p = p * decay - m / (v.sqrt() * root + 1e-8) * lr
    for buffer, old, expected in zip(memory, before, (p, m, v), strict=True):
        table, untouched = buffer[: 5 * width].view(5, width), [0, 2, 4]
        torch.testing.assert_close(table[rows].double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(table[untouched], old[: 5 * width].view(5, width)[untouched])
        assert torch.equal(buffer[5 * width :], old[5 * width :])


# -- training ----------------------------------------------------------------------------------------------------


def test_updates_with_kernels_are_close_to_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    steps = list(trainer)
    monkeypatch.setattr(library, "_library_or_reason", lambda: "off")
    plain = make_trainer()
    for step, plain_step in zip(steps, plain, strict=True):
        assert step.loss == pytest.approx(plain_step.loss, rel=2e-5)
        assert step.grad_norm == pytest.approx(plain_step.grad_norm, rel=2e-4)
    for name, tensor in copy_weights(trainer.loaded).items():
        torch.testing.assert_close(tensor, copy_weights(plain.loaded)[name], rtol=1e-3, atol=5e-4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_same_bits(precision: Any, native: library.Kernels) -> None:
    if precision == "bfloat16" and not native.has_bfloat16:
        pytest.skip("this processor does not multiply bfloat16")

    def start() -> Trainer:
        trainer = make_trainer(dropout=0.1)
        trainer.precision = getattr(torch, precision)
        return trainer

    uninterrupted = start()
    states = []
    for _ in uninterrupted:
        tensors, values = uninterrupted.state()
        states.append(({name: tensor.clone() for name, tensor in tensors.items()}, dict(values)))
    without_reads = start()
    list(without_reads)  # its state was never read, so updates stayed pending longer
    for step in (0, 4, 10):
        resumed = start()
        resumed.load_state(*states[step])
        list(resumed)
        for name, tensor in copy_weights(uninterrupted.loaded).items():
            assert torch.equal(tensor, copy_weights(resumed.loaded)[name]), name
            assert torch.equal(tensor, copy_weights(without_reads.loaded)[name]), name


def test_a_model_saved_during_training_has_the_weights_of_the_last_step(tmp_path: Path) -> None:
    trainer = make_trainer()
    for step in trainer:
        if step.number == 7:
            heedful.save(trainer.loaded, tmp_path / "model")
            break
    reference = make_trainer(steps=12)
    for step in reference:
        if step.number == 7:
            reference.parameters  # noqa: B018 - applies all pending updates
            break
    saved = copy_weights(heedful.load(tmp_path / "model"))
    assert all(torch.equal(tensor, saved[name]) for name, tensor in copy_weights(reference.loaded).items())


def test_copies_of_a_model_are_independent_of_training() -> None:
    trainer = make_trainer()
    steps = iter(trainer)
    for _ in range(3):
        next(steps)
    copies = [copy.deepcopy(trainer.loaded), pickle.loads(pickle.dumps(trainer.loaded))]
    assert trainer._optimizer._lazy and not any(pending.steps for pending in trainer._optimizer._lazy.values())
    expected = copy_weights(trainer.loaded)
    next(steps)
    for model in (*copies, pickle.loads(pickle.dumps(trainer.loaded.model))):
        model(Packed.of([[5, 6, 7]]))
        assert all(tensor.isfinite().all() for tensor in model.parameters())
    for loaded in copies:
        assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.named_tensors().items())
    assert not trainer.loaded.model.embedding.tokens.sparse


def test_a_table_tied_to_an_output_layer_is_not_lazy() -> None:
    loaded = make_classifier(head=MaskedTokens(activation="gelu", norm_eps=1e-12))
    assert loaded.head is not None
    tied = make_trainer(loaded)
    assert not tied._lazy_tables
    assert [table.weight.shape[1] for table in make_trainer()._lazy_tables] == [32]


def test_tables_on_several_ranks_are_not_lazy() -> None:
    from heedful.train.ranks import Ranks

    loaded = make_classifier()
    task = Classify(tokenizer=tokenizer(), limit=None, labels=LABELS)
    samples = task.encode_split([LabelledExample(text="a cat", label="good")]).samples
    assert not Trainer(loaded, task, samples, TrainSettings(max_steps=1), Ranks(rank=0, size=2))._lazy_tables


@pytest.mark.parametrize(
    "read",
    [
        lambda loaded: loaded.state_dict(),
        lambda loaded: static_vector(loaded, "cat"),
        lambda loaded: nearest_tokens(loaded, torch.ones(32), set(), 3),
        lambda loaded: _static_unit_vectors(loaded),
        lambda loaded: next(_embedding_steps(Inspection(loaded, "a cat"), "encoder", 1)),
    ],
    ids=["state_dict", "static", "closest", "related", "steps"],
)
def test_reading_a_table_applies_pending_updates(read: Callable[[ModelBundle], Any]) -> None:
    trainer = make_trainer()
    steps = iter(trainer)
    for _ in range(3):
        next(steps)
    assert any(pending.steps for pending in trainer._optimizer._lazy.values())
    read(trainer.loaded)
    assert not any(pending.steps for pending in trainer._optimizer._lazy.values())


def test_a_state_dict_during_training_has_no_pending_updates() -> None:
    trainer, reference = make_trainer(), make_trainer()
    for _, _ in zip(range(4), trainer, strict=False):
        state_dict = {name: tensor.clone() for name, tensor in trainer.loaded.state_dict().items()}
    for _, _ in zip(range(4), reference, strict=False):
        expected = {f"model.{name}": tensor.clone() for name, tensor in reference.parameters.items()}
    name = "model.embedding.tokens.weight"
    assert torch.equal(state_dict[name], expected[name])


def test_loaded_weights_are_not_changed_by_pending_updates() -> None:
    trainer = make_trainer()
    steps = iter(trainer)
    best = {name: tensor.clone() for name, tensor in trainer.loaded.state_dict().items()}
    for _ in range(5):
        next(steps)
    trainer.loaded.load_state_dict(best)
    for name, tensor in trainer.loaded.named_tensors().items():
        assert torch.equal(tensor, best[name if name in best else f"model.{name}"]), name


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_token_ids_of_any_integer_dtype(dtype: torch.dtype) -> None:
    trainer = make_trainer()
    steps = iter(trainer)
    for _ in range(2):
        next(steps)
    table, count = trainer._lazy_tables[0], tokenizer().size
    ids = torch.tensor([3, 3, 1, count - 1], dtype=dtype)
    rows = table(ids)
    assert torch.equal(rows, copy_weights(trainer.loaded)["embedding.tokens.weight"][ids.long()])
    next(steps)
    for bad in (count, -1, 1 << 30):
        with pytest.raises(IndexError):
            table(torch.tensor([0, bad], dtype=dtype))


def test_a_dense_gradient_is_applied_after_pending_updates() -> None:
    initial, settings, tables = torch.randn(30, 48), AdamW(lr=1e-2, max_grad_norm=None), []
    for flushes in (False, True):
        table, generator = initial.clone(), torch.Generator().manual_seed(3)
        optimizer = Optimizer({"table": table}, settings)
        optimizer.make_lazy("table")
        for step in range(9):
            rows, values = torch.arange(step, step + 5), torch.randn(5, 48, generator=generator)
            gradient = torch.sparse_coo_tensor(rows[None], values, (30, 48), check_invariants=True).coalesce()
            if flushes:
                optimizer.flush()
            gradients = {"table": gradient.to_dense() if step == 4 else gradient}
            optimizer.step(gradients, lr_factor=1.0, scale=1.0, grad_norm=1.0)
        optimizer.flush()
        tables.append(table)
    assert torch.equal(*tables)
