"""Every family and head computes what transformers computes: forward, backward, in training, alone or packed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import heedful
from heedful.nn.dropout import STEPS
from heedful.packed import Packed
from tests.support.tiny_models import (
    MODELS,
    MODELS_WITH_OWN_HEADS,
    hf_hidden_states,
    hf_inputs,
    hf_outputs,
    our_hidden_states,
    our_outputs,
    random_batch,
    random_sequences,
    under_file_names,
)

each_model = pytest.mark.parametrize(("family", "architecture"), MODELS)
each_own_head = pytest.mark.parametrize(("family", "architecture"), MODELS_WITH_OWN_HEADS)


Saved = Callable[..., tuple[Any, Path]]
Both = Callable[[str, str, torch.dtype], tuple[Any, heedful.ModelBundle]]


@pytest.fixture(scope="module")
def both(saved: Saved) -> Both:
    """Transformers' model, which is made once, and ours, loaded anew for each test."""

    def load(family: str, architecture: str, dtype: torch.dtype) -> tuple[Any, heedful.ModelBundle]:
        reference, folder = saved(family, architecture, dtype)
        return reference, heedful.load(folder, dtype=dtype)

    return load


def _scale(tensor: torch.Tensor) -> float:
    return max(1.0, float(tensor.abs().max()))


@each_model
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_hidden_states_and_head(
    both: Both, family: str, architecture: str, dtype: torch.dtype, tolerance: float
) -> None:
    reference, loaded = both(family, architecture, dtype)
    ids, types = random_sequences(family)
    with torch.no_grad():
        rows = our_hidden_states(loaded, random_batch(family))
        for span, each_ids, each_types in zip(random_batch(family).spans(), ids, types, strict=True):
            expected = hf_hidden_states(reference, family, each_ids, each_types)
            assert (rows[span] - expected).abs().max() <= tolerance * _scale(expected)
        outputs = our_outputs(loaded, random_batch(family))
        for out, expected in zip(outputs, hf_outputs(reference, family, ids, types), strict=True):
            assert out.shape == expected.shape
            assert (out - expected).abs().max() <= tolerance * _scale(expected)


@each_own_head
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_gradients(both: Both, family: str, architecture: str, dtype: torch.dtype, tolerance: float) -> None:
    from heedful.families import FAMILIES
    from heedful.families.names import to_our_names

    reference, loaded = both(family, architecture, dtype)
    ids, types = random_sequences(family)
    expected = hf_outputs(reference, family, ids, types)
    torch.manual_seed(1)
    pushes = [torch.randn_like(out) for out in expected]
    sum((out * push).sum() for out, push in zip(expected, pushes, strict=True)).backward()  # type: ignore[union-attr]
    outputs = our_outputs(loaded, random_batch(family))
    sum((out * push).sum() for out, push in zip(outputs, pushes, strict=True)).backward()  # type: ignore[union-attr]

    table = FAMILIES[family].table(loaded.config.model, loaded.config.head)
    bare = architecture == FAMILIES[family].bare
    theirs_by_name = {
        name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for name, tensor in reference.state_dict(keep_vars=True).items()
    }
    named = {FAMILIES[family].table_name(n, bare): g for n, g in under_file_names(reference, theirs_by_name).items()}
    gradients = to_our_names(table, {name: gradient for name, gradient in named.items() if name not in table.tied})
    for name, parameter in loaded.named_tensors().items():
        actual = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert (actual - gradients[name]).abs().max() <= tolerance * _scale(gradients[name]), name


@each_own_head
def test_dropout_is_applied_at_the_same_sites(
    both: Both, monkeypatch: pytest.MonkeyPatch, family: str, architecture: str
) -> None:
    """With dropout replaced by a factor that tells its probability, outputs agree only if the sites agree."""
    reference, loaded = both(family, architecture, torch.float64)

    def scaled(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return x * (1 + round(p * STEPS) / STEPS) if training else x

    monkeypatch.setattr(F, "dropout", scaled)
    monkeypatch.setattr("heedful.nn.dropout._factors", lambda x, below: torch.full_like(x, 1 + below / STEPS))
    ids, types = random_sequences(family)
    with torch.no_grad():
        still = our_outputs(loaded, random_batch(family))
        reference.train()
        loaded.train()
        outputs = our_outputs(loaded, random_batch(family))
        for out, expected, before in zip(outputs, hf_outputs(reference, family, ids, types), still, strict=True):
            assert (out - expected).abs().max() <= 1e-12 * _scale(expected)
            assert (out - before).abs().max() > 1e-3  # it was on


@each_own_head
def test_packed_is_alone_is_in_any_company(both: Both, family: str, architecture: str) -> None:
    """Forward and gradient of a sequence do not depend on its neighbours, nor on their order."""
    _, loaded = both(family, architecture, torch.float64)
    ids, types = random_sequences(family)

    def run(order: list[int]) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
        batch = Packed.of([ids[b] for b in order], [types[b] for b in order])
        loaded.zero_grad()
        outputs = our_outputs(loaded, batch)
        sum(out.square().sum() for out in outputs).backward()  # type: ignore[union-attr]
        rows = dict(zip(order, batch.unpack(our_hidden_states(loaded, batch).detach()), strict=True))
        return rows, {n: p.grad.clone() for n, p in loaded.named_parameters() if p.grad is not None}

    together, gradients = run([0, 1, 2, 3])
    shuffled, _ = run([2, 0, 3, 1])
    summed: dict[str, torch.Tensor] = {}
    for b in range(4):
        alone, part = run([b])
        assert (alone[b] - together[b]).abs().max() <= 1e-12 * _scale(together[b])
        assert (shuffled[b] - together[b]).abs().max() <= 1e-12 * _scale(together[b])
        for name, gradient in part.items():
            summed[name] = summed.get(name, torch.zeros_like(gradient)) + gradient
    for name, gradient in gradients.items():
        assert (summed[name] - gradient).abs().max() <= 1e-10 * _scale(gradient), name


@each_own_head
def test_a_changed_token_changes_nothing_in_its_neighbour(both: Both, family: str, architecture: str) -> None:
    """Packed by restarted positions alone, transformers fails this by 1.25."""
    _, loaded = both(family, architecture, torch.float32)
    ids, types = random_sequences(family)
    changed = [list(each) for each in ids]
    changed[1][5] = (changed[1][5] + 7) % 90 + 5
    with torch.no_grad():
        before = Packed.of(ids, types).unpack(our_hidden_states(loaded, Packed.of(ids, types)))
        after = Packed.of(changed, types).unpack(our_hidden_states(loaded, Packed.of(changed, types)))
    for b in (0, 2, 3):
        assert torch.equal(before[b], after[b])
    assert (before[1] - after[1]).abs().max() > 0.01


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_packed_is_padded(both: Both, family: str) -> None:
    """Transformers' padded batch with its mask agrees with ours without padding."""
    bare = next(architecture for each, architecture in MODELS if each == family)
    reference, loaded = both(family, bare, torch.float64)
    ids, types = random_sequences(family)
    longest, pad = max(map(len, ids)), reference.config.pad_token_id

    def padded(rows: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])

    inputs = {"input_ids": padded(ids, pad), "attention_mask": padded([[1] * len(row) for row in ids], 0)}
    if family != "distilbert":
        inputs["token_type_ids"] = padded(types, 0)
    with torch.no_grad():
        expected = reference.base_model(**inputs).last_hidden_state
        for b, rows in enumerate(random_batch(family).unpack(loaded.model(random_batch(family)))):
            assert (rows - expected[b, : len(rows)]).abs().max() <= 1e-12 * _scale(expected)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_bfloat16_is_as_near_as_transformers_is(both: Both, tmp_path: Path, family: str) -> None:
    """Rounding to 8 bits is the reference's own loss; ours is not more than half as large again."""
    bare = next(architecture for each, architecture in MODELS if each == family)
    reference, exact = both(family, bare, torch.float32)
    reference.save_pretrained(tmp_path)
    loaded = heedful.load(tmp_path, dtype=torch.bfloat16)
    ids, types = random_sequences(family)
    with torch.no_grad():
        truth = exact.model(random_batch(family))
        actual = loaded.model(random_batch(family)).float()
        inputs = [hf_inputs(family, *sequence) for sequence in zip(ids, types, strict=True)]
        rounding = copy.deepcopy(reference).bfloat16()
        rounded = torch.cat([rounding.base_model(**each).last_hidden_state[0].float() for each in inputs])
    assert (actual - truth).square().mean() <= 1.5**2 * (rounded - truth).square().mean()
