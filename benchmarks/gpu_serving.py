"""Serving arms of `gpu.py` with half-precision weights: one text at a time, texts of mixed lengths, and decoding.

gpu_measures.py times the arms.
"""

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
Answers = Callable[[Sequence[Any]], list[Vector]]  # returns a vector for each sequence of token ids, or each text


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The size of an encoder."""

    layers: int
    width: int  # hidden size
    heads: int
    inner: int  # inner width of the MLP


BASE = Shape(layers=12, width=768, heads=12, inner=3072)
SMALL = Shape(layers=6, width=384, heads=12, inner=1536)  # all-MiniLM-L6-v2's
TINY = Shape(layers=2, width=64, heads=2, inner=128)  # to rehearse
SHAPES = {"all-MiniLM-L6-v2": SMALL, "BERT-base": BASE}
WORDS = 2000  # vocabulary of the texts
PROMPT = 32  # tokens of a prompt
IDS = 64  # token ids, from 0, whose log-probabilities are compared


def folder_of(shape: Shape, folder: Path, *, tokenizer: bool) -> str:
    """Write an encoder with random weights.

    Args:
        shape: The size of the encoder.
        folder: The folder to write into.
        tokenizer: Whether to write a tokenizer of invented words, and the model for sentence-transformers.

    Returns:
        The folder of the model. With a tokenizer, the folder of sentence-transformers within it.
    """
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
        _tokenizer().save_pretrained(folder)
        _sentence_transformer(str(folder), shape.width).save(str(folder / "sentences"))
        return str(folder / "sentences")
    return str(folder)


def _tokenizer() -> Any:
    """Return a tokenizer of transformers with WORDS invented words, and the special tokens of BERT."""
    import tokenizers
    import transformers

    special = {"[PAD]": 0, "[UNK]": 100, "[CLS]": lengths.CLS, "[SEP]": lengths.SEP, "[MASK]": 103}
    words = {f"w{number}": lengths.FIRST_WORD + number for number in range(WORDS)}
    unused = {
        f"[unused{token_id}]": token_id for token_id in range(lengths.FIRST_WORD) if token_id not in special.values()
    }
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(special | unused | words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [(name, special[name]) for name in ("[CLS]", "[SEP]")]
    )
    tokenizer_class: Any = transformers.PreTrainedTokenizerFast
    return tokenizer_class(
        tokenizer_object=backend,
        model_max_length=512,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def _sentence_transformer(folder: str, width: int) -> Any:
    """Return sentence-transformers' model that averages the hidden states of a model."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    encoder = modules.Transformer(folder)
    return SentenceTransformer(modules=[encoder, modules.Pooling(width, pooling_mode="mean")], device="cpu")


def texts(count: int, distribution: str = "MIXED") -> list[str]:
    """Make texts of invented words; their lengths, with both special tokens, are the distribution's."""
    generator = random.Random(0)
    return [
        " ".join(f"w{generator.randrange(WORDS)}" for _ in range(length - 2))
        for length in lengths.draw(distribution, count)
    ]


# -- one text at a time -------------------------------------------------------------------------------------------


def alone(folder: str, device: torch.device, dtype: torch.dtype) -> dict[str, Answers]:
    """Return arms that compute the mean of the hidden states of one sequence of token ids; the first is the reference.

    Token ids and means are on the host. The CUDA graphs of Heedful are captured here.
    """
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
            states = peer(input_ids=torch.tensor(sequences, device=device)).last_hidden_state[0]
            return [states.mean(0).float().tolist()]

    def with_model(model: Callable[[Any], torch.Tensor]) -> Answers:
        def answer(sequences: Sequence[Sequence[int]]) -> list[Vector]:
            with torch.inference_mode():
                return [model(heedful.Packed.of(sequences)).mean(0).float().tolist()]

        return answer

    return {
        "transformers, eager": eager,
        "heedful": with_model(lambda batch: bundle.model(batch.to(device))),
        "heedful, graphs": with_model(graphs),
    }


# -- mixed lengths ------------------------------------------------------------------------------------------------


def mixed(folder: str, device: torch.device, dtype: torch.dtype, budget: int) -> dict[str, Answers]:
    """Return arms that compute the vectors of many texts, tokenizing included; the first is the reference.

    Args:
        folder: A folder of sentence-transformers, as `folder_of` writes it.
        device: The device.
        dtype: The precision; on a GPU it has to be the default of Heedful's engine.
        budget: Tokens of a batch of Heedful's engine, except on a GPU, where the engine has its default.
    """
    from sentence_transformers import SentenceTransformer

    import heedful

    peer = SentenceTransformer(folder, device=device.type).to(dtype).eval()
    if device.type == "cuda":
        heedful_engine = heedful.Engine(folder, device=device)
        assert heedful_engine.precision == str(dtype).removeprefix("torch."), heedful_engine.precision
    else:
        heedful_engine = heedful.Engine(heedful.load(folder, dtype=dtype), token_budget=budget)

    def with_batch_size(size: int) -> Answers:
        def answer(texts: Sequence[str]) -> list[Vector]:
            embeddings = peer.encode(list(texts), batch_size=size, show_progress_bar=False)  # sorts texts by length
            vectors: list[Vector] = embeddings.astype("float32").tolist()
            return vectors

        return answer

    def engine(texts: Sequence[str]) -> list[Vector]:
        vectors: list[Vector] = heedful_engine.encode(list(texts)).tolist()
        return vectors

    arms = {f"sentence-transformers, sorted, {size} a batch": with_batch_size(size) for size in (64, 256)}
    return {**arms, "transformers, padded, 64 a batch": _padded(folder, device, dtype, 64), "heedful": engine}


def _padded(folder: str, device: torch.device, dtype: torch.dtype, size: int) -> Answers:
    """Return transformers' model on batches in the order of the texts, each padded to its longest text."""
    import torch
    import transformers

    model_folder = str(Path(folder).parent)  # the folder of sentence-transformers is inside it
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_folder)
    model = transformers.AutoModel.from_pretrained(model_folder, dtype=dtype, add_pooling_layer=False).to(device).eval()

    def answer(texts: Sequence[str]) -> list[Vector]:
        vectors: list[Vector] = []
        with torch.inference_mode():
            for start in range(0, len(texts), size):
                batch = tokenizer(list(texts[start : start + size]), padding=True, return_tensors="pt").to(device)
                mask = batch["attention_mask"][..., None]
                states = model(**batch).last_hidden_state.float() * mask
                vectors += (states.sum(1) / mask.sum(1)).tolist()
        return vectors

    return answer


# -- decoding -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    """A model that continues prompts of one length by greedy search."""

    write: Callable[[Sequence[Sequence[int]]], list[list[int]]]  # returns the generated token ids for each prompt
    first: Answers  # returns the log-probabilities of the first generated token, for the first IDS ids


def decoders(folder: str, device: torch.device, dtype: torch.dtype, written: int) -> dict[str, Writer]:
    """Return the models that generate `written` tokens after each prompt; the first is the reference."""
    return {
        "transformers, generate": _transformers_writer(folder, device, dtype, written),
        "heedful": _heedful_writer(folder, device, dtype, written),
    }


def decoder_folder(folder: Path, *, tiny: bool) -> str:
    """Write a decoder of GPT-2's shape, or a tiny one, with random weights, and return its folder."""
    import torch
    import transformers

    if not tiny:
        return random_shape("gpt2", str(folder))
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, eos_token_id=50_255)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return str(folder)


def prompts(count: int) -> list[list[int]]:
    """Return prompts of random token ids."""
    generator = random.Random(0)
    return [[generator.randrange(lengths.FIRST_WORD, lengths.VOCABULARY) for _ in range(PROMPT)] for _ in range(count)]


def _heedful_writer(folder: str, device: torch.device, dtype: torch.dtype, written: int) -> Writer:
    """Return Heedful's decoder."""
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
        log_probabilities: list[Vector] = step.distribution[:, :IDS].tolist()
        return log_probabilities

    return Writer(write=write, first=first)


def _transformers_writer(folder: str, device: torch.device, dtype: torch.dtype, written: int) -> Writer:
    """Return transformers' decoder, which generates `written` tokens whether or not one of them ends the text."""
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
        log_probabilities: list[Vector] = scores.log_softmax(-1)[:, :IDS].tolist()
        return log_probabilities

    return Writer(write=write, first=first)
