"""Embeddings whose rows move when they are needed: as if each had moved in every step. Training with our kernels."""

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


def made(dropout: float = 0.0, head: Any = None) -> ModelBundle:
    """A fresh model of two layers, 32 wide."""
    embedding = EmbeddingConfig(
        vocabulary=tokenizer().size, width=32, positions=Learned(count=48), norm="layer", dropout=dropout
    )
    encoder = StackConfig(
        width=32, layers=2, heads=2, head_width=16, inner_width=64, dropout=dropout, attention_dropout=dropout
    )
    head = head or Classes(labels=LABELS, dropout=dropout)
    model = ModelConfig(embedding=embedding, encoder=encoder)
    return create(BundleConfig(family="heedful", model=model, head=head), tokenizer(), seed=1)


def make_trainer(loaded: ModelBundle | None = None, *, dropout: float = 0.0, steps: int = 12, **more: Any) -> Trainer:
    loaded = loaded or made(dropout)
    task = Classify(tokenizer=tokenizer(), limit=loaded.max_length, labels=LABELS)
    parts = [line.rpartition(" ") for line in LINES]
    samples = task.encode_split([LabelledExample(text=text, label=label) for text, _, label in parts]).samples
    settings = TrainSettings(max_steps=steps, batch_size=3, optimizer=AdamW(lr=1e-2), precision="float32", **more)
    return Trainer(loaded, task, samples, settings)


def weights(loaded: ModelBundle) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in loaded.named_tensors().items()}


# -- the optimizer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", [True, False])
def test_rows_that_lag_get_the_bits_of_rows_that_do_not(correction: bool) -> None:
    begin, settings = torch.randn(60, 48), AdamW(lr=1e-2, bias_correction=correction)

    def ran(how: str) -> tuple[Tensor, dict[str, Tensor]]:
        table, draw = begin.clone(), torch.Generator().manual_seed(3)
        optimizer = Optimizer({"table": table}, settings)
        if how != "dense":
            optimizer.make_lazy("table")
        for step in range(150):
            rows, values = torch.randint(0, 30, (5,), generator=draw), torch.randn(5, 48, generator=draw)
            gradient = torch.sparse_coo_tensor(rows[None], values, (60, 48), check_invariants=True).coalesce()
            if how == "dense":
                gradient = gradient.to_dense()
            else:
                optimizer.catch_up("table", None if how == "each" else rows)
            gradients = {"table": gradient}
            norm = optimizer.grad_norm(gradients, scale=0.5)
            optimizer.step(gradients, lr_factor=(step % 37) / 37, scale=0.5, grad_norm=norm)
            if how == "now and then" and step % 13 == 0:
                optimizer.flush()
        state = optimizer.state()
        return table, state

    dense, _ = ran("dense")
    lagging, state = ran("when needed")
    for how in ("each", "now and then"):
        table, other = ran(how)
        assert torch.equal(table, lagging)
        assert all(torch.equal(state[name], other[name]) for name in state)
    torch.testing.assert_close(lagging, dense, rtol=1e-5, atol=2e-5)  # PyTorch's own kernel rounds elsewhere


@pytest.mark.parametrize("shape", [(4, 20), (4, 1), (64,), (2, 4, 16)], ids=str)
def test_lag_refuses_rows_that_are_no_whole_vectors(shape: tuple[int, ...]) -> None:
    optimizer = Optimizer({"table": torch.zeros(shape)}, AdamW(lr=1e-2))
    with pytest.raises(HeedfulError, match=r"table cannot be updated lazily: .*float32 \["):
        optimizer.make_lazy("table")


def test_lag_refuses_float64_and_unknown_names() -> None:
    optimizer = Optimizer({"table": torch.zeros(4, 32, dtype=torch.float64)}, AdamW(lr=1e-2))
    with pytest.raises(HeedfulError, match=r"table .*float64 \[4, 32\]"):
        optimizer.make_lazy("table")
    with pytest.raises(HeedfulError, match="other is not a trained tensor"):
        optimizer.make_lazy("other")


def test_lag_without_kernels_says_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_library_or_reason", lambda: "no compiler")
    with pytest.raises(HeedfulError, match="no compiler"):
        Optimizer({"table": torch.zeros(4, 32)}, AdamW(lr=1e-2)).make_lazy("table")


def test_sparse_gradients_are_rows_of_a_table_that_lags() -> None:
    optimizer = Optimizer({"table": torch.zeros(4, 32)}, AdamW(lr=1e-2))

    def step(gradient: Tensor) -> None:
        optimizer.step({"table": gradient}, lr_factor=1.0, scale=1.0, grad_norm=1.0)

    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 32), (4, 32), check_invariants=True)
    with pytest.raises(HeedfulError, match="gradient of table is sparse"):
        step(twice.coalesce())
    optimizer.make_lazy("table")
    with pytest.raises(HeedfulError, match="sparse in 1 dimensions, not coalesced; expected rows"):
        step(twice)
    with pytest.raises(HeedfulError, match="sparse in 2 dimensions, coalesced; expected rows"):
        step(torch.eye(4, 32).to_sparse().coalesce())
    outside = torch.tensor([[0, 4]])
    with pytest.raises(HeedfulError, match="rows 0 to 4, but its table has 0 to 3"):
        step(torch.sparse_coo_tensor(outside, torch.ones(2, 32), (4, 32), is_coalesced=True, check_invariants=False))


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("width", [1, 7, 12, 20, 37, 64, 69])
def test_the_kernel_writes_no_number_outside_of_the_chosen_rows(
    native: library.Kernels, width: int, with_gradient: bool
) -> None:
    """Rows 1 and 3 of 5 move, and the last is followed by memory that is not theirs."""
    draw, steps = torch.Generator().manual_seed(5), [(0.999, 0.01, 30.0), (0.998, 0.02, 22.0), (1.0, 0.03, 18.0)]
    memory = [torch.rand(5 * width + 64, generator=draw) for _ in range(3)]  # p, m and v, each longer than its table
    before = [each.clone() for each in memory]
    rows, gradient = torch.tensor([1, 3]), torch.randn(2 * width + 64, generator=draw)
    moved, numbers = torch.zeros(5, dtype=torch.int32), torch.tensor(steps)
    native.adamw_rows(
        *(each.data_ptr() for each in memory),
        moved.data_ptr(),
        width,
        rows.data_ptr(),
        len(rows),
        numbers.data_ptr(),
        len(steps),
        gradient.data_ptr() if with_gradient else 0,
        0.5,
        0.9,
        0.999,
        1e-8,
        1,
    )
    assert moved.tolist() == [0, 3, 0, 3, 0]
    p, m, v = (each[: 5 * width].view(5, width)[rows].double() for each in before)
    for number, (decay, rate, root) in enumerate(steps):
        g = gradient[: 2 * width].view(2, width).double() / 2 if with_gradient and number == 2 else torch.zeros_like(p)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p = p * decay - m / (v.sqrt() * root + 1e-8) * rate
    for mine, old, expected in zip(memory, before, (p, m, v), strict=True):
        table, untouched = mine[: 5 * width].view(5, width), [0, 2, 4]
        torch.testing.assert_close(table[rows].double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(table[untouched], old[: 5 * width].view(5, width)[untouched])
        assert torch.equal(mine[5 * width :], old[5 * width :])


# -- training ----------------------------------------------------------------------------------------------------


def test_updates_are_those_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = make_trainer()
    steps = list(mine)
    monkeypatch.setattr(library, "_library_or_reason", lambda: "off")
    plain = make_trainer()
    for one, other in zip(steps, plain, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=2e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=2e-4)
    for name, each in weights(mine.loaded).items():
        torch.testing.assert_close(each, weights(plain.loaded)[name], rtol=1e-3, atol=5e-4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_resumed_at_any_step_with_the_same_bits(precision: Any, native: library.Kernels) -> None:
    if precision == "bfloat16" and not native.has_bfloat16:
        pytest.skip("this processor does not multiply bfloat16")

    def begun() -> Trainer:
        found = make_trainer(dropout=0.1)
        found.precision = getattr(torch, precision)
        return found

    whole = begun()
    states = []
    for _ in whole:
        tensors, values = whole.state()
        states.append(({name: each.clone() for name, each in tensors.items()}, dict(values)))
    at_once = begun()
    list(at_once)  # nobody looked at its state on the way
    for at in (0, 4, 10):
        other = begun()
        other.load_state(*states[at])
        list(other)
        for name, each in weights(whole.loaded).items():
            assert torch.equal(each, weights(other.loaded)[name]), name
            assert torch.equal(each, weights(at_once.loaded)[name]), name


def test_what_is_saved_in_the_middle_has_the_weights_of_the_last_step(tmp_path: Path) -> None:
    mine = make_trainer()
    for step in mine:
        if step.number == 7:
            heedful.save(mine.loaded, tmp_path / "model")
            break
    other = make_trainer(steps=12)
    for step in other:
        if step.number == 7:
            other.parameters  # noqa: B018 - all rows up to date
            break
    saved = weights(heedful.load(tmp_path / "model"))
    assert all(torch.equal(each, saved[name]) for name, each in weights(other.loaded).items())


def test_a_copy_of_the_model_goes_its_own_way() -> None:
    mine = make_trainer()
    steps = iter(mine)
    for _ in range(3):
        next(steps)
    copied = [copy.deepcopy(mine.loaded), pickle.loads(pickle.dumps(mine.loaded))]
    assert mine._optimizer._lazy and not any(pending.steps for pending in mine._optimizer._lazy.values())
    at = weights(mine.loaded)
    next(steps)
    for each in (*copied, pickle.loads(pickle.dumps(mine.loaded.model))):
        each(Packed.of([[5, 6, 7]]))
        assert all(one.isfinite().all() for one in each.parameters())
    for each in copied:
        assert all(torch.equal(one, at[name]) for name, one in each.named_tensors().items())
    assert not mine.loaded.model.embedding.tokens.sparse


def test_a_table_that_scores_are_tied_to_has_whole_gradients() -> None:
    loaded = made(head=MaskedTokens(activation="gelu", norm_eps=1e-12))
    assert loaded.head is not None
    found = make_trainer(loaded)
    assert not found._lazy_tables
    assert [table.weight.shape[1] for table in make_trainer()._lazy_tables] == [32]


def test_several_ranks_have_whole_gradients() -> None:
    from heedful.train.ranks import Ranks

    loaded = made()
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
def test_who_reads_the_table_has_the_weights_of_the_last_step(read: Callable[[ModelBundle], Any]) -> None:
    mine = make_trainer()
    steps = iter(mine)
    for _ in range(3):
        next(steps)
    assert any(pending.steps for pending in mine._optimizer._lazy.values())
    read(mine.loaded)
    assert not any(pending.steps for pending in mine._optimizer._lazy.values())


def test_a_state_dict_in_a_step_is_that_of_rows_that_do_not_lag() -> None:
    mine, other = make_trainer(), make_trainer()
    for _, _ in zip(range(4), mine, strict=False):
        found = {name: each.clone() for name, each in mine.loaded.state_dict().items()}
    for _, _ in zip(range(4), other, strict=False):
        expected = {f"model.{name}": each.clone() for name, each in other.parameters.items()}
    name = "model.embedding.tokens.weight"
    assert torch.equal(found[name], expected[name])


def test_weights_that_are_put_back_are_not_moved_by_steps_before() -> None:
    mine = make_trainer()
    steps = iter(mine)
    best = {name: each.clone() for name, each in mine.loaded.state_dict().items()}
    for _ in range(5):
        next(steps)
    mine.loaded.load_state_dict(best)
    for name, each in mine.loaded.named_tensors().items():
        assert torch.equal(each, best[name if name in best else f"model.{name}"]), name


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_ids_of_any_kind(kind: torch.dtype) -> None:
    mine = make_trainer()
    steps = iter(mine)
    for _ in range(2):
        next(steps)
    table, count = mine._lazy_tables[0], tokenizer().size
    ids = torch.tensor([3, 3, 1, count - 1], dtype=kind)
    rows = table(ids)
    assert torch.equal(rows, weights(mine.loaded)["embedding.tokens.weight"][ids.long()])
    next(steps)
    for bad in (count, -1, 1 << 30):
        with pytest.raises(IndexError):
            table(torch.tensor([0, bad], dtype=kind))


def test_a_gradient_of_the_whole_table_comes_after_the_steps_before() -> None:
    begin, settings, found = torch.randn(30, 48), AdamW(lr=1e-2, max_grad_norm=None), []
    for often in (False, True):
        table, draw = begin.clone(), torch.Generator().manual_seed(3)
        optimizer = Optimizer({"table": table}, settings)
        optimizer.make_lazy("table")
        for step in range(9):
            rows, values = torch.arange(step, step + 5), torch.randn(5, 48, generator=draw)
            gradient = torch.sparse_coo_tensor(rows[None], values, (30, 48), check_invariants=True).coalesce()
            if often:
                optimizer.flush()
            given = {"table": gradient.to_dense() if step == 4 else gradient}
            optimizer.step(given, lr_factor=1.0, scale=1.0, grad_norm=1.0)
        optimizer.flush()
        found.append(table)
    assert torch.equal(*found)
