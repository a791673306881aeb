"""XLNet's two streams of attention (Yang et al. 2019), compared with transformers; no target sees its own token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import heedful
from heedful.packed import Packed
from tests.support.tiny_models import Float64Mode, save_tiny


def permuted(lengths: tuple[int, ...], last: int = 3) -> tuple[Packed, list[dict[str, torch.Tensor]]]:
    """Draw a random order of prediction for each sequence; its last `last` positions are targets.

    Return one pack, in which the rows of a sequence's targets follow those of its tokens, and the arguments of
    transformers' model for each sequence.
    """
    generator = torch.Generator().manual_seed(7)
    tokens, positions, types, visibility, bounds, hf_arguments = [], [], [], [], [0], []
    for length in lengths:
        ids = torch.randint(5, 98, (length,), generator=generator)
        sequence_types = (torch.arange(length) >= length // 2).long()
        order = torch.randperm(length, generator=generator)
        rank = torch.empty(length, dtype=torch.long)
        rank[order] = torch.arange(length)
        targets = order[-min(last, length) :]
        seen = rank[None, :] < rank[:, None]  # strictly earlier in the order
        mapping = torch.zeros(1, len(targets), length, dtype=torch.float64)
        mapping[0, torch.arange(len(targets)), targets] = 1
        hf_arguments.append(
            {
                "input_ids": ids[None],
                "token_type_ids": sequence_types[None],
                "perm_mask": (~seen).double()[None],
                "target_mapping": mapping,
            }
        )
        tokens += [ids, ids[targets]]
        positions += [torch.arange(length), targets]
        types += [sequence_types, sequence_types[targets]]
        visibility.append(torch.cat([seen | torch.eye(length, dtype=torch.bool), seen[targets]]))
        bounds.append(bounds[-1] + length + len(targets))
    batch = Packed(
        tokens=torch.cat(tokens),
        positions=torch.cat(positions),
        types=torch.cat(types),
        bounds=tuple(bounds),
        key_lengths=lengths,
        visibility=tuple(visibility),
    )
    return batch, hf_arguments


def test_two_streams_are_those_of_transformers(tmp_path: Path) -> None:
    lengths = (11, 4, 17)
    reference = save_tiny(tmp_path, "xlnet", "XLNetLMHeadModel", torch.float64)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    batch, hf_arguments = permuted(lengths)
    with torch.no_grad(), Float64Mode(torch.float64):
        actual = batch.unpack(loaded(batch))
        for logits, length, arguments in zip(actual, lengths, hf_arguments, strict=True):
            assert (logits[length:] - reference(**arguments).logits[0]).abs().max() < 1e-12


def test_without_targets_the_streams_are_one(tmp_path: Path) -> None:
    save_tiny(tmp_path, "xlnet", "XLNetModel", torch.float64)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    ids = [[5, 6, 7, 8, 9], [10, 11, 12]]
    plain = Packed.of(ids)
    with_key_lengths = Packed(
        tokens=plain.tokens, positions=plain.positions, types=plain.types, bounds=plain.bounds, key_lengths=(5, 3)
    )
    with torch.no_grad():
        assert (loaded.model(plain) - loaded.model(with_key_lengths)).abs().max() < 1e-12


def test_no_target_sees_itself_and_no_context_sees_targets(tmp_path: Path) -> None:
    """The token that is last in the order changes no output but that of its own position in the content stream."""
    save_tiny(tmp_path, "xlnet", "XLNetLMHeadModel", torch.float64)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    batch, _ = permuted((9,))
    target = int(batch.positions[-1])  # last in the order: no other row may see it
    changed_tokens = batch.tokens.clone()
    changed_tokens[target] = (changed_tokens[target] + 1) % 90 + 5
    changed = Packed(
        tokens=changed_tokens,
        positions=batch.positions,
        types=batch.types,
        bounds=batch.bounds,
        key_lengths=batch.key_lengths,
        visibility=batch.visibility,
    )
    with torch.no_grad():
        differs = (loaded(batch) - loaded(changed)).abs().amax(-1) > 0
    assert differs.nonzero().flatten().tolist() == [target]


def test_models_without_a_query_stream_refuse_key_lengths(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertModel")
    batch, _ = permuted((9,))
    with pytest.raises(heedful.HeedfulError, match="this model has no query stream: leave it out"):
        heedful.load(tmp_path).model(batch)
