"""Serving arms of `gpu.py` with half-precision weights: one text at a time, texts of mixed lengths, and decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lengths
from engines import random_shape

if TYPE_CHECKING:
    import torch

Vector = list[float]
Answers = Callable[[Sequence[Any]], list[Vector]]  # of ids, or of texts


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """An encoder with random weights."""

    layers: int
    width: int
    heads: int
    inner: int


BASE = Shape(layers=12, width=768, heads=12, inner=3072)
SMALL = Shape(layers=6, width=384, heads=12, inner=1536)  # all-MiniLM-L6-v2's
TINY = Shape(layers=2, width=64, heads=2, inner=128)  # to rehearse
SHAPES = {"all-MiniLM-L6-v2": SMALL, "BERT-base": BASE}
WORDS = 2000  # that texts are made of
PROMPT, IDS = 32, 64  # tokens of a prompt; ids whose log-probabilities are compared


def folder_of(shape: Shape, folder: Path, *, tokenizer: bool) -> str:
    """A model in a folder; with a tokenizer of invented words also as sentence-transformers reads it."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if shape == BASE and not tokenizer:
        return random_shape("base", str(folder))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        intermediate_size=shape.inner,
    )
    transformers.BertModel(config).save_pretrained(folder)
    if tokenizer:
        _words().save_pretrained(folder)
        _sentences(str(folder), shape.width).save(str(folder / "sentences"))
        return str(folder / "sentences")
    return str(folder)


def _words() -> Any:
    import tokenizers
    import transformers

    special = {"[PAD]": 0, "[UNK]": 100, "[CLS]": lengths.CLS, "[SEP]": lengths.SEP, "[MASK]": 103}
    words = {f"w{number}": lengths.FIRST_WORD + number for number in range(WORDS)}
    fill = {f"[unused{number}]": number for number in range(lengths.FIRST_WORD) if number not in special.values()}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(special | fill | words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    around = [(name, special[name]) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", around
    )
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    kind: Any = transformers.PreTrainedTokenizerFast
    return kind(
        tokenizer_object=backend, model_max_length=512, **{f"{role}_token": name for role, name in names.items()}
    )


def _sentences(folder: str, width: int) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    reads = modules.Transformer(folder)
    return SentenceTransformer(modules=[reads, modules.Pooling(width, pooling_mode="mean")], device="cpu")


def texts(count: int, distribution: str = "MIXED") -> list[str]:
    """Make texts of invented words; their lengths, with both special tokens, are the distribution's."""
    draw = random.Random(0)
    return [
        " ".join(f"w{draw.randrange(WORDS)}" for _ in range(length - 2)) for length in lengths.draw(distribution, count)
    ]


# -- one text at a time -------------------------------------------------------------------------------------------


def alone(folder: str, device: torch.device, dtype: torch.dtype) -> dict[str, Answers]:
    """From ids on the host to the mean of the rows on the host; the first is the reference. Graphs are recorded."""
    import torch
    import transformers

    import heedful
    from heedful.infer.cuda_graphs import CudaGraphs

    peer = transformers.AutoModel.from_pretrained(folder, dtype=dtype, add_pooling_layer=False).to(device).eval()
    bundle = heedful.load(folder, dtype=dtype).to(device).eval()
    graphs = CudaGraphs(bundle.model)
    graphs.prepare()

    def eager(sequences: Sequence[Sequence[int]]) -> list[Vector]:
        with torch.inference_mode():
            rows = peer(input_ids=torch.tensor(sequences, device=device)).last_hidden_state[0]
            return [rows.mean(0).float().tolist()]

    def by(model: Callable[[Any], torch.Tensor]) -> Answers:
        def answer(sequences: Sequence[Sequence[int]]) -> list[Vector]:
            with torch.inference_mode():
                return [model(heedful.Packed.of(sequences)).mean(0).float().tolist()]

        return answer

    return {
        "transformers, eager": eager,
        "heedful": by(lambda batch: bundle.model(batch.to(device))),
        "heedful, graphs": by(graphs),
    }


# -- mixed lengths ------------------------------------------------------------------------------------------------


def mixed(folder: str, device: torch.device, dtype: torch.dtype, budget: int) -> dict[str, Answers]:
    """From texts to vectors, tokenizing included; sentence-transformers sorts by length itself.

    On a GPU the engine has its default precision and token budget.
    """
    import heedful

    peer = _stock(folder, device, dtype)
    if device.type == "cuda":
        heedful_engine = heedful.Engine(folder, device=device)
        assert heedful_engine.precision == str(dtype).removeprefix("torch."), heedful_engine.precision
    else:
        heedful_engine = heedful.Engine(heedful.load(folder, dtype=dtype), token_budget=budget)

    def sorted_by(size: int) -> Answers:
        def answer(queries: Sequence[str]) -> list[Vector]:
            embeddings = peer.encode(list(queries), batch_size=size, show_progress_bar=False)
            vectors: list[Vector] = embeddings.astype("float32").tolist()
            return vectors

        return answer

    def engine(queries: Sequence[str]) -> list[Vector]:
        vectors: list[Vector] = heedful_engine.encode(list(queries)).tolist()
        return vectors

    arms = {f"sentence-transformers, sorted, {size} a batch": sorted_by(size) for size in (64, 256)}
    return {**arms, "transformers, padded, 64 a batch": _padded(folder, device, dtype, 64), "heedful": engine}


def _padded(folder: str, device: torch.device, dtype: torch.dtype, size: int) -> Answers:
    """Batches of texts as they come, padded to the longest of a batch."""
    import torch
    import transformers

    where = str(Path(folder).parent)  # beside the folder of sentence-transformers
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(where)
    model = transformers.AutoModel.from_pretrained(where, dtype=dtype, add_pooling_layer=False).to(device).eval()

    def answer(queries: Sequence[str]) -> list[Vector]:
        vectors: list[Vector] = []
        with torch.inference_mode():
            for start in range(0, len(queries), size):
                batch = tokenizer(list(queries[start : start + size]), padding=True, return_tensors="pt").to(device)
                mask = batch["attention_mask"][..., None]
                rows = model(**batch).last_hidden_state.float() * mask
                vectors += (rows.sum(1) / mask.sum(1)).tolist()
        return vectors

    return answer


def _stock(folder: str, device: torch.device, dtype: torch.dtype) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(folder, device=device.type).to(dtype).eval()


# -- decoding -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    """A model that continues prompts of one length, greedily."""

    write: Callable[[Sequence[Sequence[int]]], list[list[int]]]  # the written tokens
    first: Answers  # log-probabilities of the first written token, at the first IDS ids


def decoders(folder: str, device: torch.device, dtype: torch.dtype, written: int) -> dict[str, Writer]:
    """Make both writers; the first is the reference."""
    return {
        "transformers, generate": _their_writer(folder, device, dtype, written),
        "heedful": _our_writer(folder, device, dtype, written),
    }


def decoder_folder(folder: Path, *, tiny: bool) -> str:
    """A decoder of GPT-2's shape with random weights."""
    import torch
    import transformers

    if not tiny:
        return random_shape("gpt2", str(folder))
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, eos_token_id=50_255)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return str(folder)


def prompts(count: int) -> list[list[int]]:
    """Random ids."""
    draw = random.Random(0)
    return [[draw.randrange(lengths.FIRST_WORD, lengths.VOCABULARY) for _ in range(PROMPT)] for _ in range(count)]


def _our_writer(folder: str, device: torch.device, dtype: torch.dtype, written: int) -> Writer:
    import heedful
    from heedful.model.decode import Greedy, generate, stream

    bundle = heedful.load(folder, dtype=dtype).to(device).eval()
    head: Any = bundle.head

    def write(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        batch = heedful.Packed.of(sequences).to(device)
        outputs = generate(bundle.model, head, batch, Greedy(), max_new_tokens=written, stop=[])
        return [output[0].tokens for output in outputs]

    def first(sequences: Sequence[Sequence[int]]) -> list[Vector]:
        batch = heedful.Packed.of(sequences).to(device)
        step = next(stream(bundle.model, head, batch, Greedy(), max_new_tokens=1, stop=[], distribution=True))
        assert step.distribution is not None
        rows: list[Vector] = step.distribution[:, :IDS].tolist()
        return rows

    return Writer(write=write, first=first)


def _their_writer(folder: str, device: torch.device, dtype: torch.dtype, written: int) -> Writer:
    import torch
    import transformers

    model: Any = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model.to(device).eval()
    model.generation_config.eos_token_id = None

    def write(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        tokens = torch.tensor(sequences, device=device)
        with torch.inference_mode():
            outputs = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                min_new_tokens=written,
                max_new_tokens=written,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        new_tokens: list[list[int]] = outputs[:, PROMPT:].tolist()
        return new_tokens

    def first(sequences: Sequence[Sequence[int]]) -> list[Vector]:
        with torch.inference_mode():
            scores = model(input_ids=torch.tensor(sequences, device=device)).logits[:, -1].float()
        rows: list[Vector] = scores.log_softmax(-1)[:, :IDS].tolist()
        return rows

    return Writer(write=write, first=first)
