"""Make a static student: an embedding table over the teacher's vocabulary, whose text vectors are means of its rows.

The table is made in three steps:

1. A token that occurs in the texts gets the mean of the teacher's hidden states at its occurrences. Any other token
   gets its hidden state in a text of that token alone, as in Model2Vec.
2. The vectors are reduced to their first principal components and scaled to a mean norm of 1.
3. Each vector is multiplied by a / (a + p), where p is the token's share of all tokens in the texts (smooth inverse
   frequency, SIF; Arora et al. 2017).
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

MAX_TEXTS = 20_000  # maximum texts that the teacher encodes; of more texts, evenly spaced ones are taken
BATCH_TOKENS = 4096  # tokens in a batch of the teacher
MAX_CHUNK_TOKENS = 256  # tokens of a sequence, special tokens included; longer texts are split into chunks


def static_student(
    teacher: ModelBundle, settings: StaticStudent, texts: Sequence[str], log: Callable[[str], None]
) -> ModelBundle:
    """Make a static student without a head, in eval mode, with the teacher's tokenizer.

    Args:
        teacher: A model with an encoder or a decoder, but not both.
        settings: Dimension of the vectors, SIF coefficient and dropout.
        texts: Texts whose tokens are counted and encoded, up to MAX_TEXTS.
        log: Receives a summary of the table.

    Raises:
        HeedfulError: If the teacher is an encoder-decoder or a classic model, or its hidden size is too small.
    """
    tokenizer, model = require_tokenizer(teacher), teacher.config.model
    if (model.encoder is None) == (model.decoder is None):
        raise HeedfulError(
            f"{teacher.source} ({teacher.config.family}) is not an encoder or decoder alone, whose hidden states a "
            "static student is made from: choose another student"
        )
    if settings.width > model.width:
        raise HeedfulError(
            f"student.width is {settings.width}, but the hidden states of {teacher.source} are {model.width} wide: "
            f"give a number up to {model.width}"
        )
    used_texts = list(evenly_spaced(texts, len(texts), MAX_TEXTS))
    states, counts = mean_token_states(teacher, used_texts)
    is_ordinary = torch.ones(tokenizer.size, dtype=torch.bool)
    is_ordinary[_special_ids(tokenizer)] = False
    table = torch.zeros(tokenizer.size, settings.width)
    table[is_ordinary] = weighted_components(
        states[is_ordinary], counts[is_ordinary], settings.width, settings.sif_coefficient
    )
    config = ClassicConfig(
        embedding=EmbeddingConfig(vocabulary=tokenizer.size, width=settings.width, dropout=settings.dropout),
        reader=BagPooling(),
    )
    student = create(BundleConfig(family=FAMILY, model=config), tokenizer.limited(UNLIMITED))
    assign(student, {"embedding.tokens.weight": table}, "cpu")
    log(
        f"a table of {tokenizer.size:,} token vectors, {settings.width} wide, from the teacher's hidden states: "
        f"{int((counts > 0).sum()):,} tokens occur in {len(used_texts):,} texts, the others are encoded alone"
    )
    student.source = f"token vectors of {teacher.source}"
    return student.eval()


@torch.no_grad()
def mean_token_states(
    teacher: ModelBundle, texts: Sequence[str]
) -> tuple[Float[Tensor, "vocabulary hidden_size"], Int64[Tensor, " vocabulary"]]:
    """Return the teacher's mean hidden state of each token, and how often it occurs in the texts.

    A token that does not occur gets its hidden state in a text of that token alone. Special tokens (padding, and those
    that begin and end every text) get zeros, and their counts are 0.
    """
    tokenizer, device = require_tokenizer(teacher), next(teacher.parameters()).device
    state_sums = torch.zeros(tokenizer.size, teacher.config.model.width)

    def add_states(sequences: Sequence[Sequence[int]], counts: Int64[Tensor, " vocabulary"]) -> None:
        """Add the hidden states of a batch to `state_sums`, and the occurrences of its tokens to `counts`."""
        batch = Packed.of(sequences)
        states = teacher.hidden_states(batch.to(device)).float().cpu()
        state_sums.index_add_(0, batch.tokens, states)
        counts += torch.bincount(batch.tokens, minlength=tokenizer.size)

    special = tokenizer.special
    prefix_ids = [] if special.bos_or_cls is None else [special.bos_or_cls]
    suffix_ids = [] if special.eos_or_sep is None else [special.eos_or_sep]
    max_tokens = min(teacher.max_length or MAX_CHUNK_TOKENS, MAX_CHUNK_TOKENS)
    chunk_size = max_tokens - len(prefix_ids) - len(suffix_ids)
    chunks = (
        ids[start : start + chunk_size].tolist()
        for ids in tokenizer.ids(texts)
        for start in range(0, len(ids), chunk_size)
    )
    text_counts = torch.zeros(tokenizer.size, dtype=torch.int64)
    for sequences in consecutive_batches(([*prefix_ids, *chunk, *suffix_ids] for chunk in chunks), BATCH_TOKENS):
        add_states(sequences, text_counts)
    text_counts[_special_ids(tokenizer)] = 0
    single_counts = torch.zeros_like(text_counts)  # occurrences in texts of a single token
    unseen_ids = torch.nonzero(text_counts == 0)[:, 0].tolist()
    for sequences in consecutive_batches(([*prefix_ids, id, *suffix_ids] for id in unseen_ids), BATCH_TOKENS):
        add_states(sequences, single_counts)
    states = state_sums / (text_counts + single_counts).clamp(min=1)[:, None]
    states[_special_ids(tokenizer)] = 0.0
    return states, text_counts


def weighted_components(
    states: Float[Tensor, "vocabulary hidden_size"],
    counts: Int64[Tensor, " vocabulary"],
    components: int,
    a: float | None,
) -> Float[Tensor, "vocabulary components"]:
    """Return the first principal components of the states, scaled to mean norm 1, times a / (a + p).

    Args:
        states: A vector for each token.
        counts: Occurrences of each token in the texts; p is a token's share of them.
        components: How many components to return.
        a: SIF coefficient. If None, vectors are not multiplied by a / (a + p).
    """
    centred = states.double() - states.double().mean(0)
    _, eigenvectors = torch.linalg.eigh(centred.T @ centred)  # in the order of increasing eigenvalues
    vectors: Tensor = centred @ eigenvectors[:, -components:].flip(1)
    vectors /= vectors.norm(dim=1).mean().clamp(min=1e-12)
    if a is not None:
        p = counts.double() / max(1, int(counts.sum()))
        vectors *= (a / (a + p))[:, None]
    return vectors.float()


def _special_ids(tokenizer: Tokenizer) -> list[int]:
    """Return ids of the padding token and of the tokens that begin and end every text. Their vectors are 0."""
    special = tokenizer.special
    ids = (special.pad, special.bos_or_cls, special.eos_or_sep)
    return [id for id in ids if id is not None]
