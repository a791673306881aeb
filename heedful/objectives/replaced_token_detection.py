"""Replaced token detection: which tokens has a small generator put into a text? (Clark et al. 2020, section 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.checkpoint.new_head import make_head_config
from heedful.errors import HeedfulError
from heedful.objectives.base import (
    Batch,
    Sample,
    SelfSupervised,
    Term,
    concat_long,
    cross_entropy_term,
    pack_samples,
    upcast,
)
from heedful.objectives.random_numbers import is_text_token, uniform
from heedful.packed import Packed
from heedful.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ReplacedTokenDetection(SelfSupervised):
    """Generator: the mean of -log p(token) where tokens are hidden; model: whether each token was replaced.

    A share of the text's tokens is hidden, all of them behind the mask token, as the paper says (not 80 %). In their
    place come tokens drawn from what the generator thinks; one that is drawn right was not replaced. No gradient goes
    through the draw. The model judges all tokens, special ones too, as the published code does: loss = generator's mean
    + 50 times the mean of the binary cross-entropy.
    """

    tokenizer: Tokenizer
    generator: ModelBundle  # learns beside the model
    mask_prob: float = 0.15
    disc_weight: float = 50.0  # weight of the discriminator's loss
    extra_module: ModelBundle = field(init=False, repr=False)
    term_weights: tuple[float, ...] = field(init=False, repr=False)
    head = "replaced_token_detection"

    def __post_init__(self) -> None:
        if self.tokenizer.special.mask is None:
            raise HeedfulError("this tokenizer has no mask token: the generator of replaced tokens needs one")
        if not 0 < self.mask_prob < 1:
            raise HeedfulError(f"mask_prob is {self.mask_prob}; expected a share of the tokens between 0 and 1")
        object.__setattr__(self, "extra_module", self.generator)
        object.__setattr__(self, "term_weights", (1.0, self.disc_weight))

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """The batch with tokens hidden, the originals as targets, and a number by which each is drawn."""
        packed, start = pack_samples(samples), 0
        rows: list[NDArray[np.int64]] = []
        draws = [np.zeros(0)]
        for sample, key in zip(samples, keys, strict=True):
            drawn = uniform(key, 2 * len(sample)).reshape(2, -1)
            places = is_text_token(sample.tokens, self.tokenizer).nonzero()[0]
            count = max(1, round(self.mask_prob * len(places)))
            chosen = np.sort(places[drawn[0, places].argsort(kind="stable")[:count]])
            rows.append(start + chosen)
            draws.append(drawn[1, chosen])
            start += len(sample)
        where = concat_long(rows)
        targets = packed.tokens[where]
        packed.tokens[where] = self.tokenizer.special.mask or 0
        return Batch(
            packed=packed,
            targets=targets,
            weights=torch.ones(len(where)),
            rows=where,
            draws=torch.from_numpy(np.concatenate(draws)),
            counts=(float(len(where)), float(packed.bounds[-1])),
        )

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """The generator's and the model's."""
        head, judge = self.generator.head, loaded.head
        assert head is not None and judge is not None and batch.rows is not None and batch.draws is not None
        scores = head(self.generator.hidden_states(batch.packed, output_rows=batch.rows), batch.packed)
        corrupted, replaced = corrupt(batch, sample_tokens(scores.detach(), batch.draws))
        judged = upcast(judge(loaded.hidden_states(corrupted), corrupted))
        losses = F.binary_cross_entropy_with_logits(judged, replaced.to(judged), reduction="none")
        found = (judged.detach() > 0) == replaced
        return cross_entropy_term("generator", scores, batch.targets), Term("rtd", losses, found)


def sample_tokens(
    scores: Float[Tensor, "targets vocabulary"], draws: Float[Tensor, " targets"]
) -> Int[Tensor, " targets"]:
    """A token of each softmax(scores): the first one up to which probabilities sum to more than the number drawn.

    Such numbers belong to a sample, so the draw is the same in any company and on any rank, but for rounding.
    """
    sums = upcast(scores).softmax(-1).cumsum(-1)
    reached = draws.to(sums)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, reached, right=True)[:, 0].clamp(max=scores.shape[-1] - 1)


def corrupt(batch: Batch, tokens: Int[Tensor, " targets"]) -> tuple[Packed, Tensor]:
    """The text with those tokens where some are hidden, and which of all its tokens are not the original ones."""
    assert batch.rows is not None
    text = batch.packed.tokens.clone()
    text[batch.rows] = tokens
    replaced = torch.zeros_like(text, dtype=torch.bool)
    replaced[batch.rows] = tokens != batch.targets
    return replace(batch.packed, tokens=text), replaced


def tied_generator(loaded: ModelBundle, *, generator_size: float = 0.25, seed: int = 0) -> ModelBundle:
    """A generator beside a model: as deep, a part as wide, and with the model's own embeddings (section 3.2).

    Both share the tensors of tokens, places, types and their norm, as the published models do; what projects them to
    the generator's width is its own. It has a part of the heads, which are as wide, and of the MLP's inner width.
    """
    model = loaded.config.model
    stack = model.encoder
    if stack is None or model.decoder is not None:
        raise HeedfulError("a generator of replaced tokens is an encoder alone, and this model is not")
    if not 0 < generator_size <= 1:
        raise HeedfulError(f"generator_size is {generator_size}; expected a share of the width above 0, at most 1")
    heads = max(1, round(stack.heads * generator_size))
    width = heads * stack.width // stack.heads
    inner = max(1, stack.inner_width * width // stack.width)
    smaller = replace(model, encoder=replace(stack, width=width, heads=heads, inner_width=inner))
    config = BundleConfig(family=loaded.config.family, model=smaller)
    made = create(replace(config, head=make_head_config(config, "masked_lm")), loaded.tokenizer, seed=seed)
    like = next(loaded.parameters())
    made.to(device=like.device, dtype=like.dtype)
    _share(made, loaded)
    return made.train(loaded.training)


def _share(made: ModelBundle, loaded: ModelBundle) -> None:
    """The embedding's tensors of the second one stand in the first one too, wherever it uses them."""
    own, theirs = made.model.embedding, loaded.model.embedding
    names = [name for name, _ in own.named_parameters() if not name.startswith("project.")]
    shared: dict[int, nn.Parameter] = {id(own.get_parameter(name)): theirs.get_parameter(name) for name in names}
    for module in made.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = shared.get(id(parameter), parameter)
