"""Folders as they are published: each layout, made of a tiny model, computes what its own library computes from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Normalize

import heedful
from heedful.packed import Packed
from tests.families.test_rotary_encoders import GTE_HUB, NOMIC_HUB
from tests.support.folder_layouts import (
    Step,
    adapter,
    bert_base,
    byte_pairs,
    config,
    dense,
    dense_2,
    edited,
    gpt2_buffers,
    last_token,
    linked,
    modules_2,
    modules_6,
    other_formats,
    pickled,
    pickled_shards,
    pieces,
    reference,
    renamed,
    replaced_config,
    sharded,
    stored_as,
    t5_small,
    tensors,
    tokenizer_json,
    without,
    words,
)
from tests.support.tiny_models import ENCODER_DECODER, hf_outputs, our_outputs, save_tiny, use_eager_attention
from tests.support.tokenizer_folders import ANGLE_BRACKET_TOKENS, wordpieces
from tests.tokenizer.test_joint_vocabulary import save_files

Check = Callable[[Path], None]  # compares what Heedful computes from a folder with the library that it is made for

TEXTS = ["Ada reads the blue book", "A child, at 9:30.", "x", "Nobody borrowed the photographs in winter"]
PAIRS = [("Who reads?", "Ada reads the blue book"), ("When?", "A child, at 9:30."), ("Why", "x")]
LONG = "Ada reads the blue book. " * 12

# -- what is compared ------------------------------------------------------------------------------------------------


def close(ours: Any, theirs: Any) -> bool:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return ours.shape == theirs.shape and bool(np.abs(ours - theirs).max() <= 3e-6 * max(1.0, np.abs(theirs).max()))


def vectors(folder: Path) -> None:
    """Vectors of texts, queries and documents are those of sentence-transformers, before and after saving."""
    theirs = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    engine = heedful.Engine(heedful.load(folder))
    for method in ("encode", "encode_query", "encode_document"):
        expected = getattr(theirs, method)(TEXTS)
        assert close(getattr(engine, method)(TEXTS), expected), method
    assert np.abs(expected[0] - expected[1]).max() > 0.01
    heedful.save(heedful.load(folder), folder / "saved")
    again = SentenceTransformer(str(folder / "saved"), device="cpu", model_kwargs={"dtype": torch.float32})
    assert close(again.encode(TEXTS), theirs.encode(TEXTS))


def cut_vectors(folder: Path) -> None:
    """Vectors equal those of sentence-transformers, also of a text that both truncate at the same token."""
    theirs, engine = SentenceTransformer(str(folder), device="cpu"), heedful.Engine(heedful.load(folder))
    assert close(engine.encode([LONG]), theirs.encode([LONG]))
    vectors(folder)


def scores(folder: Path) -> None:
    """Scores of pairs are those of sentence-transformers' cross-encoder."""
    theirs, engine = CrossEncoder(str(folder), device="cpu"), heedful.Engine(folder)
    ours = [list(answer["values"].values()) for answer in engine(PAIRS)]
    assert close(np.array(ours)[:, 0], theirs.predict(PAIRS))


def outputs(folder: Path) -> None:
    """Tokens of texts and pairs, and the head's outputs for them, are those of transformers."""
    check_outputs(folder, "AutoTokenizer")


def outputs_by(tokenizer_class: str) -> Check:
    """Return the same check for a folder that does not name its tokenizer."""
    return lambda folder: check_outputs(folder, tokenizer_class)


def check_outputs(folder: Path, tokenizer_class: str) -> None:
    loaded, reference = heedful.load(folder), folder.with_name("reference")
    reference = reference if reference.exists() else folder
    (architecture,) = json.loads((reference / "config.json").read_text())["architectures"]
    theirs = use_eager_attention(
        getattr(transformers, architecture).from_pretrained(reference, dtype=torch.float32)
    ).eval()
    tokenizer, family = getattr(transformers, tokenizer_class).from_pretrained(reference), loaded.config.family
    texts = [*TEXTS, *([] if family in ENCODER_DECODER else PAIRS)]
    assert loaded.tokenizer is not None
    encoded = [loaded.tokenizer.encode(text) for text in texts]
    ids, types = [list(text.ids) for text in encoded], [list(text.types) for text in encoded]
    assert ids == [tokenizer(*([text] if isinstance(text, str) else text)).input_ids for text in texts]
    with torch.no_grad():
        ours, expected = our_outputs(loaded, Packed.of(ids, types)), hf_outputs(theirs, family, ids, types)
    assert len(ours) == len(expected) and all(map(close, ours, expected))


def same_as_merged(folder: Path) -> None:
    """An adapter's folder computes what its merged model computes in sentence-transformers."""
    modules_2("Pooling", "Normalize")(folder.with_name("merged"))
    theirs = SentenceTransformer(str(folder.with_name("merged")), device="cpu")
    assert close(heedful.Engine(folder).encode(TEXTS), theirs.encode(TEXTS))


# -- the layouts -----------------------------------------------------------------------------------------------------

XLM: dict[str, Any] = {"file": "sentencepiece.bpe.model", "settings": {}, "pad_token_id": 1}
DEBERTA = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "pad_piece": "[PAD]", "bos_piece": "[CLS]"}
DEBERTA |= {"eos_piece": "[SEP]", "unk_piece": "[UNK]"}
ALBERT = {"control_symbols": "[CLS],[SEP],[MASK]", "pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1}
XLNET = {"control_symbols": "<cls>,<sep>,<pad>,<mask>,<eod>,<eop>", "unk_id": 0, "bos_id": 1, "eos_id": 2}
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
ONE_LABEL: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
SIGMOID = "torch.nn.modules.activation.Sigmoid"
CODE = {"AutoModel": "org/code--modeling.Model", "AutoConfig": "org/code--configuration.Config"}
GTE_SIZE = {"vocab_size": 460, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
GTE_SIZE |= {"intermediate_size": 48, "type_vocab_size": 1, "rope_theta": 160_000}
NOMIC_SIZE = {"vocab_size": len(wordpieces()), "n_embd": 32, "n_head": 4, "n_inner": 48, "n_layer": 4}


def marian(folder: Path) -> None:
    """Write a Marian model with its two SentencePiece models."""
    vocabulary = save_files(folder)
    pad = {"pad_token_id": vocabulary["<pad>"], "decoder_start_token_id": vocabulary["<pad>"]}
    save_tiny(folder, "marian", "MarianMTModel", vocab_size=len(vocabulary), **pad)


bert, classifier = words("bert", "BertModel"), words("bert", "BertForSequenceClassification", **ONE_LABEL)
plain = [bert, modules_2("Pooling", "Normalize")]
as_xlm_roberta = edited("tokenizer_config.json", tokenizer_class="XLMRobertaTokenizer")

LAYOUTS: dict[str, tuple[Check, list[Step]]] = {
    # -- sentence-transformers
    "version 2: mean and Normalize, as all-MiniLM": (cut_vectors, plain),
    "version 2: no Normalize, a BERT with XLM-RoBERTa's pieces": (
        vectors,
        [pieces("bert", "BertModel", **XLM), modules_2("Pooling"), as_xlm_roberta],
    ),
    "version 2: first token, as BGE": (vectors, [bert, modules_2("Pooling", "Normalize", pooling="cls")]),
    "version 2: maximum": (vectors, [bert, modules_2("Pooling", pooling="max")]),
    "version 2: mean over the root of the length": (
        vectors,
        [bert, modules_2("Pooling", pooling="mean_sqrt_len_tokens")],
    ),
    "version 2: Dense, as LaBSE": (vectors, [bert, modules_2("Pooling", "Dense", "Normalize", pooling="cls"), dense_2]),
    "version 2: no sentence_bert_config.json": (cut_vectors, [bert, modules_2("Pooling", max_length=None)]),
    "version 2: MPNet, as all-mpnet-base": (
        vectors,
        [words("mpnet", "MPNetModel", "MPNetTokenizer"), modules_2("Pooling", "Normalize")],
    ),
    "version 2: T5's encoder and Dense, as sentence-t5": (
        vectors,
        [pieces("t5", "T5EncoderModel", "spiece.model", T5), modules_2("Pooling", "Dense", "Normalize"), dense_2],
    ),
    "version 6: mean and Normalize": (cut_vectors, [bert, modules_6(Normalize())]),
    "version 6: several poolings": (vectors, [bert, modules_6(pooling=("cls", "max"))]),
    "version 6: Dense without activation": (
        vectors,
        [bert, modules_6(dense(32, 16, bias=False, activation_function=torch.nn.Identity()), Normalize())],
    ),
    "version 6: prompts of queries and documents, as E5": (
        vectors,
        [bert, modules_6(Normalize(), prompts={"query": "query: ", "document": "passage: "})],
    ),
    "version 6: default prompt that is not pooled, as INSTRUCTOR": (
        vectors,
        [bert, modules_6(include_prompt=False, prompts={"task": "the : "}, default_prompt_name="task")],
    ),
    "version 6: truncate_dim": (vectors, [bert, modules_6(Normalize(), truncate_dim=20)]),
    "version 6: last token, as Qwen3-Embedding": (
        vectors,
        [last_token, modules_6(Normalize(), pooling="lasttoken", prompts={"query": "Instruct: x\nQuery:"})],
    ),
    "version 6: ModernBERT": (
        vectors,
        [words("modernbert", "ModernBertModel"), tokenizer_json, modules_6(Normalize())],
    ),
    "half precision": (vectors, [*plain, stored_as(torch.float16), config(torch_dtype="float16")]),
    "bfloat16": (vectors, [*plain, stored_as(torch.bfloat16), config(dtype="bfloat16")]),
    "shards": (vectors, [*plain, sharded]),
    "pytorch_model.bin": (vectors, [*plain, pickled]),
    "pytorch_model.bin in shards": (outputs, [words("bert", "BertForMaskedLM"), pickled_shards]),
    "files of other libraries beside the weights": (vectors, [*plain, other_formats]),
    "links into the blobs of the hub's cache": (outputs, [words("bert", "BertForMaskedLM"), linked]),
    "an adapter of peft, with modules.json": (same_as_merged, [bert, adapter(), modules_2("Pooling", "Normalize")]),
    # -- cross-encoders
    "cross-encoder before version 4": (scores, [classifier, config(sbert_ce_default_activation_function=SIGMOID)]),
    "cross-encoder of version 4": (
        scores,
        [classifier, config(sentence_transformers={"activation_fn": SIGMOID, "version": "4.1.0"})],
    ),
    "cross-encoder without a key, as BGE's reranker": (
        outputs_by("XLMRobertaTokenizer"),
        [pieces("xlm-roberta", "XLMRobertaForSequenceClassification", **XLM, **ONE_LABEL)],
    ),
    # -- transformers
    "BERT with old names, two heads and tied copies, as bert-base": (
        outputs,
        [words("bert", "BertForPreTraining"), tensors(bert_base), config(architectures=["BertForMaskedLM"])],
    ),
    "BERT with vocab.txt alone": (
        outputs_by("BertTokenizer"),
        [words("bert", "BertForTokenClassification"), without("tokenizer_config.json")],
    ),
    "DistilBERT as fine-tuned for SST-2": (
        outputs,
        [
            words("distilbert", "DistilBertForSequenceClassification", "DistilBertTokenizer"),
            config(finetuning_task="sst-2", output_past=True, sinusoidal_pos_embds=False, tie_weights_=True),
        ],
    ),
    "RoBERTa with vocab.json, merges.txt and position ids": (
        outputs,
        [
            byte_pairs("roberta", "RobertaForMaskedLM", "RobertaTokenizer", ANGLE_BRACKET_TOKENS),
            tensors(lambda weights: weights | {"roberta.embeddings.position_ids": torch.arange(42)[None]}),
        ],
    ),
    "XLM-RoBERTa with sentencepiece.bpe.model alone": (
        outputs_by("XLMRobertaTokenizer"),
        [pieces("xlm-roberta", "XLMRobertaForMaskedLM", **XLM)],
    ),
    "CamemBERT with sentencepiece.bpe.model alone": (
        outputs_by("CamembertTokenizer"),
        [pieces("camembert", "CamembertForMaskedLM", **XLM)],
    ),
    "ALBERT with spiece.model alone": (
        outputs_by("AlbertTokenizer"),
        [pieces("albert", "AlbertForMaskedLM", "spiece.model", ALBERT)],
    ),
    "XLNet with spiece.model alone": (
        outputs_by("XLNetTokenizer"),
        [pieces("xlnet", "XLNetForSequenceClassification", "spiece.model", XLNET)],
    ),
    "DeBERTa with spm.model alone": (
        outputs_by("DebertaV2Tokenizer"),
        [pieces("deberta-v2", "DebertaV2ForSequenceClassification", "spm.model", DEBERTA)],
    ),
    "T5 with spiece.model alone and copies of its tokens, as t5-small": (
        outputs_by("T5Tokenizer"),
        [pieces("t5", "T5ForConditionalGeneration", "spiece.model", T5), tensors(t5_small)],
    ),
    "GPT-2 without a prefix and with causal masks": (
        outputs,
        [byte_pairs("gpt2", "GPT2LMHeadModel", "GPT2Tokenizer", ["<|endoftext|>"]), tensors(gpt2_buffers)],
    ),
    "ELECTRA's discriminator": (outputs, [words("electra", "ElectraForPreTraining", "ElectraTokenizer")]),
    "ModernBERT with keys of transformers 4": (
        outputs,
        [
            words("modernbert", "ModernBertForMaskedLM"),
            tokenizer_json,
            config(rope_parameters=None, layer_types=None, global_rope_theta=160_000.0, local_rope_theta=10_000.0),
        ],
    ),
    "Nomic BERT with its first keys and auto_map": (
        outputs,
        [
            words("nomic_bert", "NomicBertForMaskedLM"),
            reference,
            replaced_config(NOMIC_HUB | NOMIC_SIZE | {"architectures": ["NomicBertForMaskedLM"], "auto_map": CODE}),
        ],
    ),
    "GTE with its first keys, names and auto_map": (
        outputs_by("XLMRobertaTokenizer"),
        [
            pieces("gte", "GteForMaskedLM", **XLM, type_vocab_size=1),
            reference,
            renamed("gte.", "new."),
            replaced_config(GTE_HUB | GTE_SIZE | {"architectures": ["NewForMaskedLM"], "auto_map": CODE}),
        ],
    ),
    "EuroBERT with auto_map": (outputs, [words("eurobert", "EuroBertForMaskedLM"), config(auto_map=CODE)]),
    "Marian with source.spm, target.spm and vocab.json": (outputs_by("MarianTokenizer"), [marian]),
    "mBART with sentencepiece.bpe.model alone": (
        outputs_by("MBartTokenizer"),
        [pieces("mbart", "MBartForConditionalGeneration", **XLM)],
    ),
    "BART as fine-tuned for MNLI": (
        outputs,
        [byte_pairs("bart", "BartForSequenceClassification", "BartTokenizer", ANGLE_BRACKET_TOKENS)],
    ),
    "Llama with keys of transformers 4": (
        outputs,
        [
            byte_pairs("llama", "LlamaForCausalLM", "GPT2Tokenizer", ["<|endoftext|>"]),
            config(rope_parameters=None, rope_theta=10_000.0, rope_scaling=None, pretraining_tp=1),
        ],
    ),
}


@pytest.mark.filterwarnings(
    "ignore:.*(names code|belong to other heads|do_lower_case is not in):heedful.errors.HeedfulWarning"
)
@pytest.mark.filterwarnings("ignore:Recommended:UserWarning")  # Marian's tokenizer recommends a package it does not use
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_computes_what_its_library_computes(tmp_path: Path, name: str) -> None:
    check, steps = LAYOUTS[name]
    for step in steps:
        step(tmp_path / "model")
    check(tmp_path / "model")
