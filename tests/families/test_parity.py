"""Every family and head gives the outputs and gradients of transformers, for one text at a time and for packed ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import heedful
from heedful.families import FAMILIES
from heedful.families.names import to_our_names
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
    scaled_error,
    under_file_names,
)

each_model = pytest.mark.parametrize(("family", "architecture"), MODELS)
each_own_head = pytest.mark.parametrize(("family", "architecture"), MODELS_WITH_OWN_HEADS)


Saved = Callable[..., tuple[Any, Path]]
LoadPair = Callable[[str, str, torch.dtype], tuple[Any, heedful.ModelBundle]]


@pytest.fixture(scope="module")
def load_pair(saved: Saved) -> LoadPair:
    """Return a function that gives transformers' model, which is made once, and ours, which is loaded anew."""

    def load(family: str, architecture: str, dtype: torch.dtype) -> tuple[Any, heedful.ModelBundle]:
        reference, folder = saved(family, architecture, dtype)
        return reference, heedful.load(folder, dtype=dtype)

    return load


def _weighted_sum(outputs: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    products = [(output * weight).sum() for output, weight in zip(outputs, weights, strict=True)]
    return torch.stack(products).sum()


def _named_gradients(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in tensors.items()}


@each_model
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_hidden_states_and_head(
    load_pair: LoadPair, family: str, architecture: str, dtype: torch.dtype, tolerance: float
) -> None:
    reference, loaded = load_pair(family, architecture, dtype)
    ids, types = random_sequences(family)
    batch = random_batch(family)  # the same sequences, packed
    with torch.no_grad():
        hidden_states = batch.unpack(our_hidden_states(loaded, batch))
        for actual, sequence_ids, sequence_types in zip(hidden_states, ids, types, strict=True):
            expected = hf_hidden_states(reference, family, sequence_ids, sequence_types)
            assert scaled_error(actual, expected) <= tolerance
        for actual, expected in zip(our_outputs(loaded, batch), hf_outputs(reference, family, ids, types), strict=True):
            assert actual.shape == expected.shape
            assert scaled_error(actual, expected) <= tolerance


@each_own_head
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_gradients(load_pair: LoadPair, family: str, architecture: str, dtype: torch.dtype, tolerance: float) -> None:
    reference, loaded = load_pair(family, architecture, dtype)
    ids, types = random_sequences(family)
    expected = hf_outputs(reference, family, ids, types)
    torch.manual_seed(1)
    weights = [torch.randn_like(output) for output in expected]
    _weighted_sum(expected, weights).backward()
    _weighted_sum(our_outputs(loaded, random_batch(family)), weights).backward()

    table = FAMILIES[family].table(loaded.config.model, loaded.config.head)
    is_bare = architecture == FAMILIES[family].bare
    their_gradients = under_file_names(reference, _named_gradients(reference.state_dict(keep_vars=True)))
    by_table_name = {FAMILIES[family].table_name(name, is_bare): x for name, x in their_gradients.items()}
    expected_gradients = to_our_names(table, {name: x for name, x in by_table_name.items() if name not in table.tied})
    for name, actual in _named_gradients(loaded.named_tensors()).items():
        assert scaled_error(actual, expected_gradients[name]) <= tolerance, name


@each_own_head
def test_dropout_is_applied_at_the_same_sites(
    load_pair: LoadPair, monkeypatch: pytest.MonkeyPatch, family: str, architecture: str
) -> None:
    """Replace dropout by a factor that depends on its probability: outputs agree only where the dropouts agree."""
    reference, loaded = load_pair(family, architecture, torch.float64)

    def scale_by_probability(
        x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        return x * (1 + round(p * STEPS) / STEPS) if training else x

    monkeypatch.setattr(F, "dropout", scale_by_probability)
    monkeypatch.setattr("heedful.nn.dropout._factors", lambda x, below: torch.full_like(x, 1 + below / STEPS))
    ids, types = random_sequences(family)
    with torch.no_grad():
        without_dropout = our_outputs(loaded, random_batch(family))
        reference.train()
        loaded.train()
        outputs = our_outputs(loaded, random_batch(family))
        expected_outputs = hf_outputs(reference, family, ids, types)
        for actual, expected, plain in zip(outputs, expected_outputs, without_dropout, strict=True):
            assert scaled_error(actual, expected) <= 1e-12
            assert (actual - plain).abs().max() > 1e-3  # dropout was on


@each_own_head
def test_packed_is_alone_is_in_any_company(load_pair: LoadPair, family: str, architecture: str) -> None:
    """Forward and gradient of a sequence do not depend on its neighbours, nor on their order."""
    _, loaded = load_pair(family, architecture, torch.float64)
    ids, types = random_sequences(family)

    def run(order: list[int]) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the hidden states of the sequences, by their numbers, and the gradients of the parameters."""
        batch = Packed.of([ids[n] for n in order], [types[n] for n in order])
        loaded.zero_grad()
        squares = [output.square().sum() for output in our_outputs(loaded, batch)]
        torch.stack(squares).sum().backward()
        hidden_states = dict(zip(order, batch.unpack(our_hidden_states(loaded, batch).detach()), strict=True))
        gradients = {name: x.grad.clone() for name, x in loaded.named_parameters() if x.grad is not None}
        return hidden_states, gradients

    together, gradients = run([0, 1, 2, 3])
    shuffled, _ = run([2, 0, 3, 1])
    summed: dict[str, torch.Tensor] = {}
    for n in range(4):
        alone, gradients_alone = run([n])
        assert scaled_error(alone[n], together[n]) <= 1e-12
        assert scaled_error(shuffled[n], together[n]) <= 1e-12
        for name, gradient in gradients_alone.items():
            summed[name] = summed.get(name, torch.zeros_like(gradient)) + gradient
    for name, gradient in gradients.items():
        assert scaled_error(summed[name], gradient) <= 1e-10, name


@each_own_head
def test_a_changed_token_changes_nothing_in_its_neighbour(load_pair: LoadPair, family: str, architecture: str) -> None:
    """Transformers fails this where only restarted positions separate the sequences: values differ by up to 1.25."""
    _, loaded = load_pair(family, architecture, torch.float32)
    ids, types = random_sequences(family)
    changed = [list(sequence) for sequence in ids]
    changed[1][5] = (changed[1][5] + 7) % 90 + 5
    with torch.no_grad():
        before = Packed.of(ids, types).unpack(our_hidden_states(loaded, Packed.of(ids, types)))
        after = Packed.of(changed, types).unpack(our_hidden_states(loaded, Packed.of(changed, types)))
    for n in (0, 2, 3):
        assert torch.equal(before[n], after[n])
    assert (before[1] - after[1]).abs().max() > 0.01


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_packed_is_padded(load_pair: LoadPair, family: str) -> None:
    """A padded batch in transformers, with its mask, gives what a packed one gives here."""
    bare = FAMILIES[family].bare
    reference, loaded = load_pair(family, bare, torch.float64)
    ids, types = random_sequences(family)
    longest, pad = max(map(len, ids)), reference.config.pad_token_id

    def pad_to_longest(sequences: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([sequence + [value] * (longest - len(sequence)) for sequence in sequences])

    mask = pad_to_longest([[1] * len(sequence) for sequence in ids], 0)
    inputs = {"input_ids": pad_to_longest(ids, pad), "attention_mask": mask}
    if family != "distilbert":
        inputs["token_type_ids"] = pad_to_longest(types, 0)
    batch = random_batch(family)
    with torch.no_grad():
        padded = reference.base_model(**inputs).last_hidden_state
        for actual, padded_rows in zip(batch.unpack(loaded.model(batch)), padded, strict=True):
            assert scaled_error(actual, padded_rows[: len(actual)]) <= 1e-12


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_bfloat16_is_as_near_as_transformers_is(load_pair: LoadPair, tmp_path: Path, family: str) -> None:
    """The error of bfloat16 against float32 is at most one and a half times that of transformers."""
    bare = FAMILIES[family].bare
    reference, exact = load_pair(family, bare, torch.float32)
    reference.save_pretrained(tmp_path)
    loaded = heedful.load(tmp_path, dtype=torch.bfloat16)
    ids, types = random_sequences(family)
    with torch.no_grad():
        expected = exact.model(random_batch(family))
        actual = loaded.model(random_batch(family)).float()
        inputs = [hf_inputs(family, *sequence) for sequence in zip(ids, types, strict=True)]
        rounded_model = copy.deepcopy(reference).bfloat16()
        rounded = torch.cat([rounded_model.base_model(**kwargs).last_hidden_state[0].float() for kwargs in inputs])
    our_error, their_error = (actual - expected).square().mean(), (rounded - expected).square().mean()
    assert our_error <= 1.5**2 * their_error
