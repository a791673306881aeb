"""Replaced token detection: find the tokens that a small generator replaced (Clark et al. 2020, section 2)."""

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
    """A generator predicts masked tokens; the model predicts, for each token, whether the generator replaced it.

    A share of the text's tokens is masked. All of them become the mask token, as in the paper (not only 80 %). The
    generator predicts them, and tokens sampled from its predictions replace them. A sampled token that equals the
    original is labelled as not replaced. No gradient flows through the sampling. The model classifies all tokens,
    special tokens included, as in the published code. The loss is the generator's mean cross-entropy plus `disc_weight`
    times the model's mean binary cross-entropy.
    """

    tokenizer: Tokenizer
    generator: ModelBundle  # masked language model, trained together with the model
    mask_prob: float = 0.15  # share of the text's tokens that are masked
    disc_weight: float = 50.0  # weight of the loss of the model, which is the discriminator
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
        """Return the masked batch with the original tokens as targets, and a random number for each replacement."""
        packed = pack_samples(samples)
        rows: list[NDArray[np.int64]] = []  # packed positions of the masked tokens of each sample
        draws = [np.zeros(0)]
        start = 0
        for sample, key in zip(samples, keys, strict=True):
            sample_draws = uniform(key, 2 * len(sample)).reshape(2, -1)
            candidates = is_text_token(sample.tokens, self.tokenizer).nonzero()[0]
            count = max(1, round(self.mask_prob * len(candidates)))
            chosen = np.sort(candidates[sample_draws[0, candidates].argsort(kind="stable")[:count]])
            rows.append(start + chosen)
            draws.append(sample_draws[1, chosen])
            start += len(sample)
        masked_rows = concat_long(rows)
        targets = packed.tokens[masked_rows]
        packed.tokens[masked_rows] = self.tokenizer.special.mask or 0
        return Batch(
            packed=packed,
            targets=targets,
            weights=torch.ones(len(masked_rows)),
            rows=masked_rows,
            draws=torch.from_numpy(np.concatenate(draws)),
            counts=(float(len(masked_rows)), float(packed.bounds[-1])),
        )

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """Return the generator's cross-entropy and the model's binary cross-entropy."""
        generator_head, discriminator_head = self.generator.head, loaded.head
        assert generator_head is not None and discriminator_head is not None
        assert batch.rows is not None and batch.draws is not None
        scores = generator_head(self.generator.hidden_states(batch.packed, output_rows=batch.rows), batch.packed)
        corrupted, replaced = corrupt(batch, sample_tokens(scores.detach(), batch.draws))
        logits = upcast(discriminator_head(loaded.hidden_states(corrupted), corrupted))
        losses = F.binary_cross_entropy_with_logits(logits, replaced.to(logits), reduction="none")
        right = (logits.detach() > 0) == replaced
        return cross_entropy_term("generator", scores, batch.targets), Term("rtd", losses, right)


def sample_tokens(
    scores: Float[Tensor, "targets vocabulary"], draws: Float[Tensor, " targets"]
) -> Int[Tensor, " targets"]:
    """Sample a token from each softmax(scores): the first one whose cumulative probability exceeds the random number.

    The random numbers depend only on the keys of samples. A sample therefore gets the same tokens in any batch and on
    any rank, up to rounding.
    """
    cumulative = upcast(scores).softmax(-1).cumsum(-1)
    thresholds = draws.to(cumulative)[:, None] * cumulative[:, -1:]  # the total may differ from 1 by rounding
    return torch.searchsorted(cumulative, thresholds, right=True)[:, 0].clamp(max=scores.shape[-1] - 1)


def corrupt(batch: Batch, tokens: Int[Tensor, " targets"]) -> tuple[Packed, Tensor]:
    """Return the batch with sampled tokens in place of masked ones, and a mask of the tokens that were replaced."""
    assert batch.rows is not None
    text = batch.packed.tokens.clone()
    text[batch.rows] = tokens
    replaced = torch.zeros_like(text, dtype=torch.bool)
    replaced[batch.rows] = tokens != batch.targets
    return replace(batch.packed, tokens=text), replaced


def tied_generator(loaded: ModelBundle, *, generator_size: float = 0.25, seed: int = 0) -> ModelBundle:
    """Return a generator with the model's layer count and embeddings, and a smaller hidden size (section 3.2).

    Generator and model share the embeddings of tokens, positions and types, and the norm of the embeddings, as the
    published models do. The generator projects the embeddings to its own hidden size. It has a share of the model's
    attention heads, with the same head dimension, and a share of the intermediate size of the MLP.

    Args:
        loaded: The model, an encoder.
        generator_size: Share of the heads and of the hidden size.
        seed: Seed of the generator's initial weights.
    """
    model = loaded.config.model
    stack = model.encoder
    if stack is None or model.decoder is not None:
        raise HeedfulError("replaced token detection needs a model that is only an encoder, and this model is not one")
    if not 0 < generator_size <= 1:
        raise HeedfulError(f"generator_size is {generator_size}; expected a share of the width above 0, at most 1")
    heads = max(1, round(stack.heads * generator_size))
    width = heads * stack.width // stack.heads
    inner = max(1, stack.inner_width * width // stack.width)
    narrow = replace(stack, width=width, heads=heads, kv_heads=stack.kv_heads_of(heads), inner_width=inner)
    smaller = replace(model, encoder=narrow)
    config = BundleConfig(family=loaded.config.family, model=smaller)
    generator = create(replace(config, head=make_head_config(config, "masked_lm")), loaded.tokenizer, seed=seed)
    parameter = next(loaded.parameters())
    generator.to(device=parameter.device, dtype=parameter.dtype)
    _tie_embeddings(generator, loaded)
    return generator.train(loaded.training)


def _tie_embeddings(generator: ModelBundle, loaded: ModelBundle) -> None:
    """Replace the generator's embedding tensors by the model's, wherever the generator uses them."""
    own_embedding, shared_embedding = generator.model.embedding, loaded.model.embedding
    names = [name for name, _ in own_embedding.named_parameters() if not name.startswith("project.")]
    shared: dict[int, nn.Parameter] = {
        id(own_embedding.get_parameter(name)): shared_embedding.get_parameter(name) for name in names
    }
    for module in generator.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = shared.get(id(parameter), parameter)
