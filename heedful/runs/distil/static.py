"""Static students: a table with a vector for each token of the teacher's vocabulary, whose mean is a text's vector.

The vectors are made from the teacher's hidden states. A token that the texts have gets the mean of its states in them;
any other one its state in a text of that token alone, as in Model2Vec. Their principal components are weighted by
a / (a + p), where p is the share of the token in the texts (smooth inverse frequency; Arora et al. 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from heedful.checkpoint import BundleConfig, ModelBundle, assign, create
from heedful.data.sampler import consecutive_batches
from heedful.errors import HeedfulError
from heedful.model.classic_config import BagPooling, ClassicConfig
from heedful.model.config import EmbeddingConfig
from heedful.packed import Packed
from heedful.runs.distil.settings import StaticStudent
from heedful.runs.finetune.build import evenly_spaced
from heedful.runs.finetune.classic import FAMILY
from heedful.tasks.answering import require_tokenizer
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.tokenizer import UNLIMITED

MAX_TEXTS = 20_000  # that the teacher reads for the vectors
TOKENS = 4096  # of a batch
LONGEST = 256  # tokens of a text that are read at once


def static_student(
    teacher: ModelBundle, settings: StaticStudent, texts: Sequence[str], log: Callable[[str], None]
) -> ModelBundle:
    """Make a static student, without a head, with the teacher's vocabulary.

    Raises:
        HeedfulError: If the teacher has no encoder or decoder of its own, or is narrower than the student.
    """
    tokenizer, model = require_tokenizer(teacher), teacher.config.model
    if (model.encoder is None) == (model.decoder is None):
        raise HeedfulError(
            f"{teacher.source} ({teacher.config.family}) is no encoder, from whose hidden states the vectors of a "
            "static student are made: take another student"
        )
    if settings.width > model.width:
        raise HeedfulError(
            f"student.width is {settings.width}, but the hidden states of {teacher.source} are {model.width} wide: "
            f"give a number up to {model.width}"
        )
    read = list(evenly_spaced(texts, len(texts), MAX_TEXTS))
    states, counts = token_states(teacher, read)
    rows = weighted_components(states, counts, settings.width, settings.sif_coefficient)
    rows[_around_texts(tokenizer)] = 0.0
    config = ClassicConfig(
        embedding=EmbeddingConfig(vocabulary=tokenizer.size, width=settings.width, dropout=settings.dropout),
        reader=BagPooling(),
    )
    student = create(BundleConfig(family=FAMILY, model=config), tokenizer.limited(UNLIMITED))
    assign(student, {"embedding.tokens.weight": rows}, "cpu")
    log(
        f"a table of {tokenizer.size:,} token vectors, {settings.width} wide, from the teacher's hidden states: "
        f"{int((counts > 0).sum()):,} tokens in {len(read):,} texts, the others each by itself"
    )
    student.source = f"token vectors of {teacher.source}"
    return student.eval()


@torch.no_grad()
def token_states(
    teacher: ModelBundle, texts: Sequence[str]
) -> tuple[Float[Tensor, "vocabulary width"], Int64[Tensor, " vocabulary"]]:
    """Return the mean hidden state of each token, and how often the texts have it."""
    tokenizer, device = require_tokenizer(teacher), next(teacher.parameters()).device
    sums = torch.zeros(tokenizer.size, teacher.config.model.width)
    counts = torch.zeros(tokenizer.size, dtype=torch.int64)

    def add(sequences: Sequence[Sequence[int]], counted: Tensor) -> None:
        batch = Packed.of(sequences)
        states = teacher.hidden_states(batch.to(device)).float().cpu()
        sums.index_add_(0, batch.tokens, states)
        counted += torch.bincount(batch.tokens, minlength=tokenizer.size)

    before, after = ([] if id is None else [id] for id in (tokenizer.special.bos_or_cls, tokenizer.special.eos_or_sep))
    room = min(teacher.max_length or LONGEST, LONGEST) - len(before) - len(after)
    parts = (ids[start : start + room].tolist() for ids in tokenizer.ids(texts) for start in range(0, len(ids), room))
    for sequences in consecutive_batches(([*before, *part, *after] for part in parts), TOKENS):
        add(sequences, counts)
    counts[_around_texts(tokenizer)] = 0
    alone = torch.zeros_like(counts)
    unseen = ([*before, id, *after] for id in torch.nonzero(counts == 0)[:, 0].tolist())
    for sequences in consecutive_batches(unseen, TOKENS):
        add(sequences, alone)
    return sums / (counts + alone).clamp(min=1)[:, None], counts


def weighted_components(
    states: Float[Tensor, "vocabulary width"], counts: Int64[Tensor, " vocabulary"], width: int, a: float | None
) -> Float[Tensor, "vocabulary components"]:
    """Return the first principal components of the states, of mean norm 1 and then weighted by a / (a + p).

    Args:
        states: Of each token.
        counts: Of each token in the texts, from which its share p follows.
        width: Number of components.
        a: None: all weights are 1.
    """
    centred = states.double() - states.double().mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)  # by ascending eigenvalues
    rows: Tensor = centred @ vectors[:, -width:].flip(1)
    rows /= rows.norm(dim=1).mean().clamp(min=1e-12)
    if a is not None:
        shares = counts.double() / max(1, int(counts.sum()))
        rows *= (a / (a + shares))[:, None]
    return rows.float()


def _around_texts(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of padding and of the tokens that begin and end a text, which are the same for all texts."""
    special = tokenizer.special
    ids = (special.pad, special.bos_or_cls, special.eos_or_sep)
    return [id for id in ids if id is not None]
