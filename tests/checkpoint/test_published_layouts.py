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
    add_other_formats,
    bert_base,
    convert_weights,
    copy_to_reference,
    edit_config,
    edit_json,
    edit_weights,
    gpt2_buffers,
    link_as_hub_cache,
    make_adapter,
    make_dense,
    pickle_shards,
    pickle_weights,
    remove_files,
    rename_tensors,
    replace_config,
    save_with_byte_pairs,
    save_with_end_token,
    save_with_sentencepiece,
    save_with_wordpieces,
    shard_weights,
    t5_small,
    write_dense_2,
    write_modules_2,
    write_modules_6,
    write_tokenizer_json,
)
from tests.support.tiny_models import ENCODER_DECODER, hf_outputs, our_outputs, save_tiny, use_eager_attention
from tests.support.tokenizer_folders import ANGLE_BRACKET_TOKENS, wordpieces
from tests.tokenizer.test_joint_vocabulary import save_files

Check = Callable[[Path], None]  # compares the outputs of Heedful for a folder with those of another library

TEXTS = ["Ada reads the blue book", "A child, at 9:30.", "x", "Nobody borrowed the photographs in winter"]
PAIRS = [("Who reads?", "Ada reads the blue book"), ("When?", "A child, at 9:30."), ("Why", "x")]
LONG = "Ada reads the blue book. " * 12

# -- checks --------------------------------------------------------------------------------------------------------


def close(actual: Any, expected: Any) -> bool:
    """Return whether two arrays have the same shape and close values."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return actual.shape == expected.shape and bool(
        np.abs(actual - expected).max() <= 3e-6 * max(1.0, np.abs(expected).max())
    )


def check_vectors(folder: Path) -> None:
    """Check that vectors of texts, queries and documents equal those of sentence-transformers, also after saving."""
    reference_model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    engine = heedful.Engine(heedful.load(folder))
    for method in ("encode", "encode_query", "encode_document"):
        expected = getattr(reference_model, method)(TEXTS)
        assert close(getattr(engine, method)(TEXTS), expected), method
    assert np.abs(expected[0] - expected[1]).max() > 0.01
    heedful.save(heedful.load(folder), folder / "saved")
    reloaded = SentenceTransformer(str(folder / "saved"), device="cpu", model_kwargs={"dtype": torch.float32})
    assert close(reloaded.encode(TEXTS), reference_model.encode(TEXTS))


def check_truncated_vectors(folder: Path) -> None:
    """Check vectors, also of a text that both libraries truncate at the same token."""
    reference_model, engine = SentenceTransformer(str(folder), device="cpu"), heedful.Engine(heedful.load(folder))
    assert close(engine.encode([LONG]), reference_model.encode([LONG]))
    check_vectors(folder)


def check_scores(folder: Path) -> None:
    """Check that scores of pairs equal those of a cross-encoder of sentence-transformers."""
    reference_model, engine = CrossEncoder(str(folder), device="cpu"), heedful.Engine(folder)
    scores = [list(answer["values"].values()) for answer in engine(PAIRS)]
    assert close(np.array(scores)[:, 0], reference_model.predict(PAIRS))


def check_outputs(folder: Path) -> None:
    """Check that tokens of texts and pairs, and the outputs of the head, equal those of transformers."""
    compare_outputs(folder, "AutoTokenizer")


def outputs_with(tokenizer_class: str) -> Check:
    """Return `check_outputs` for a folder that does not name the class of its tokenizer."""
    return lambda folder: compare_outputs(folder, tokenizer_class)


def compare_outputs(folder: Path, tokenizer_class: str) -> None:
    """Compare tokens and outputs with those of transformers, whose folder may be `reference` beside this one."""
    loaded, reference = heedful.load(folder), folder.with_name("reference")
    reference = reference if reference.exists() else folder
    (architecture,) = json.loads((reference / "config.json").read_text())["architectures"]
    reference_model = use_eager_attention(
        getattr(transformers, architecture).from_pretrained(reference, dtype=torch.float32)
    ).eval()
    tokenizer, family = getattr(transformers, tokenizer_class).from_pretrained(reference), loaded.config.family
    texts = [*TEXTS, *([] if family in ENCODER_DECODER else PAIRS)]
    assert loaded.tokenizer is not None
    encoded = [loaded.tokenizer.encode(text) for text in texts]
    ids, types = [list(text.ids) for text in encoded], [list(text.types) for text in encoded]
    assert ids == [tokenizer(*([text] if isinstance(text, str) else text)).input_ids for text in texts]
    with torch.no_grad():
        actual, expected = our_outputs(loaded, Packed.of(ids, types)), hf_outputs(reference_model, family, ids, types)
    assert len(actual) == len(expected) and all(map(close, actual, expected))


def check_merged_adapter(folder: Path) -> None:
    """Check that vectors of an adapter equal those of its merged model in sentence-transformers."""
    write_modules_2("Pooling", "Normalize")(folder.with_name("merged"))
    reference_model = SentenceTransformer(str(folder.with_name("merged")), device="cpu")
    assert close(heedful.Engine(folder).encode(TEXTS), reference_model.encode(TEXTS))


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


bert, classifier = (
    save_with_wordpieces("bert", "BertModel"),
    save_with_wordpieces("bert", "BertForSequenceClassification", **ONE_LABEL),
)
plain = [bert, write_modules_2("Pooling", "Normalize")]
as_xlm_roberta = edit_json("tokenizer_config.json", tokenizer_class="XLMRobertaTokenizer")

LAYOUTS: dict[str, tuple[Check, list[Step]]] = {
    # -- sentence-transformers
    "version 2: mean and Normalize, as all-MiniLM": (check_truncated_vectors, plain),
    "version 2: no Normalize, a BERT with XLM-RoBERTa's pieces": (
        check_vectors,
        [save_with_sentencepiece("bert", "BertModel", **XLM), write_modules_2("Pooling"), as_xlm_roberta],
    ),
    "version 2: first token, as BGE": (check_vectors, [bert, write_modules_2("Pooling", "Normalize", pooling="cls")]),
    "version 2: maximum": (check_vectors, [bert, write_modules_2("Pooling", pooling="max")]),
    "version 2: mean over the root of the length": (
        check_vectors,
        [bert, write_modules_2("Pooling", pooling="mean_sqrt_len_tokens")],
    ),
    "version 2: Dense, as LaBSE": (
        check_vectors,
        [bert, write_modules_2("Pooling", "Dense", "Normalize", pooling="cls"), write_dense_2],
    ),
    "version 2: no sentence_bert_config.json": (
        check_truncated_vectors,
        [bert, write_modules_2("Pooling", max_length=None)],
    ),
    "version 2: MPNet, as all-mpnet-base": (
        check_vectors,
        [save_with_wordpieces("mpnet", "MPNetModel", "MPNetTokenizer"), write_modules_2("Pooling", "Normalize")],
    ),
    "version 2: T5's encoder and Dense, as sentence-t5": (
        check_vectors,
        [
            save_with_sentencepiece("t5", "T5EncoderModel", "spiece.model", T5),
            write_modules_2("Pooling", "Dense", "Normalize"),
            write_dense_2,
        ],
    ),
    "version 6: mean and Normalize": (check_truncated_vectors, [bert, write_modules_6(Normalize())]),
    "version 6: several poolings": (check_vectors, [bert, write_modules_6(pooling=("cls", "max"))]),
    "version 6: Dense without activation": (
        check_vectors,
        [bert, write_modules_6(make_dense(32, 16, bias=False, activation_function=torch.nn.Identity()), Normalize())],
    ),
    "version 6: prompts of queries and documents, as E5": (
        check_vectors,
        [bert, write_modules_6(Normalize(), prompts={"query": "query: ", "document": "passage: "})],
    ),
    "version 6: default prompt that is not pooled, as INSTRUCTOR": (
        check_vectors,
        [bert, write_modules_6(include_prompt=False, prompts={"task": "the : "}, default_prompt_name="task")],
    ),
    "version 6: truncate_dim": (check_vectors, [bert, write_modules_6(Normalize(), truncate_dim=20)]),
    "version 6: last token, as Qwen3-Embedding": (
        check_vectors,
        [
            save_with_end_token,
            write_modules_6(Normalize(), pooling="lasttoken", prompts={"query": "Instruct: x\nQuery:"}),
        ],
    ),
    "version 6: ModernBERT": (
        check_vectors,
        [save_with_wordpieces("modernbert", "ModernBertModel"), write_tokenizer_json, write_modules_6(Normalize())],
    ),
    "half precision": (check_vectors, [*plain, convert_weights(torch.float16), edit_config(torch_dtype="float16")]),
    "bfloat16": (check_vectors, [*plain, convert_weights(torch.bfloat16), edit_config(dtype="bfloat16")]),
    "shards": (check_vectors, [*plain, shard_weights]),
    "pytorch_model.bin": (check_vectors, [*plain, pickle_weights]),
    "pytorch_model.bin in shards": (check_outputs, [save_with_wordpieces("bert", "BertForMaskedLM"), pickle_shards]),
    "files of other libraries beside the weights": (check_vectors, [*plain, add_other_formats]),
    "links into the blobs of the hub's cache": (
        check_outputs,
        [save_with_wordpieces("bert", "BertForMaskedLM"), link_as_hub_cache],
    ),
    "an adapter of peft, with modules.json": (
        check_merged_adapter,
        [bert, make_adapter(), write_modules_2("Pooling", "Normalize")],
    ),
    # -- cross-encoders
    "cross-encoder before version 4": (
        check_scores,
        [classifier, edit_config(sbert_ce_default_activation_function=SIGMOID)],
    ),
    "cross-encoder of version 4": (
        check_scores,
        [classifier, edit_config(sentence_transformers={"activation_fn": SIGMOID, "version": "4.1.0"})],
    ),
    "cross-encoder without a key, as BGE's reranker": (
        outputs_with("XLMRobertaTokenizer"),
        [save_with_sentencepiece("xlm-roberta", "XLMRobertaForSequenceClassification", **XLM, **ONE_LABEL)],
    ),
    # -- transformers
    "BERT with old names, two heads and tied copies, as bert-base": (
        check_outputs,
        [
            save_with_wordpieces("bert", "BertForPreTraining"),
            edit_weights(bert_base),
            edit_config(architectures=["BertForMaskedLM"]),
        ],
    ),
    "BERT with vocab.txt alone": (
        outputs_with("BertTokenizer"),
        [save_with_wordpieces("bert", "BertForTokenClassification"), remove_files("tokenizer_config.json")],
    ),
    "DistilBERT as fine-tuned for SST-2": (
        check_outputs,
        [
            save_with_wordpieces("distilbert", "DistilBertForSequenceClassification", "DistilBertTokenizer"),
            edit_config(finetuning_task="sst-2", output_past=True, sinusoidal_pos_embds=False, tie_weights_=True),
        ],
    ),
    "RoBERTa with vocab.json, merges.txt and position ids": (
        check_outputs,
        [
            save_with_byte_pairs("roberta", "RobertaForMaskedLM", "RobertaTokenizer", ANGLE_BRACKET_TOKENS),
            edit_weights(lambda weights: weights | {"roberta.embeddings.position_ids": torch.arange(42)[None]}),
        ],
    ),
    "XLM-RoBERTa with sentencepiece.bpe.model alone": (
        outputs_with("XLMRobertaTokenizer"),
        [save_with_sentencepiece("xlm-roberta", "XLMRobertaForMaskedLM", **XLM)],
    ),
    "CamemBERT with sentencepiece.bpe.model alone": (
        outputs_with("CamembertTokenizer"),
        [save_with_sentencepiece("camembert", "CamembertForMaskedLM", **XLM)],
    ),
    "ALBERT with spiece.model alone": (
        outputs_with("AlbertTokenizer"),
        [save_with_sentencepiece("albert", "AlbertForMaskedLM", "spiece.model", ALBERT)],
    ),
    "XLNet with spiece.model alone": (
        outputs_with("XLNetTokenizer"),
        [save_with_sentencepiece("xlnet", "XLNetForSequenceClassification", "spiece.model", XLNET)],
    ),
    "DeBERTa with spm.model alone": (
        outputs_with("DebertaV2Tokenizer"),
        [save_with_sentencepiece("deberta-v2", "DebertaV2ForSequenceClassification", "spm.model", DEBERTA)],
    ),
    "T5 with spiece.model alone and copies of its tokens, as t5-small": (
        outputs_with("T5Tokenizer"),
        [save_with_sentencepiece("t5", "T5ForConditionalGeneration", "spiece.model", T5), edit_weights(t5_small)],
    ),
    "GPT-2 without a prefix and with causal masks": (
        check_outputs,
        [
            save_with_byte_pairs("gpt2", "GPT2LMHeadModel", "GPT2Tokenizer", ["<|endoftext|>"]),
            edit_weights(gpt2_buffers),
        ],
    ),
    "ELECTRA's discriminator": (
        check_outputs,
        [save_with_wordpieces("electra", "ElectraForPreTraining", "ElectraTokenizer")],
    ),
    "ModernBERT with keys of transformers 4": (
        check_outputs,
        [
            save_with_wordpieces("modernbert", "ModernBertForMaskedLM"),
            write_tokenizer_json,
            edit_config(rope_parameters=None, layer_types=None, global_rope_theta=160_000.0, local_rope_theta=10_000.0),
        ],
    ),
    "Nomic BERT with its first keys and auto_map": (
        check_outputs,
        [
            save_with_wordpieces("nomic_bert", "NomicBertForMaskedLM"),
            copy_to_reference,
            replace_config(NOMIC_HUB | NOMIC_SIZE | {"architectures": ["NomicBertForMaskedLM"], "auto_map": CODE}),
        ],
    ),
    "GTE with its first keys, names and auto_map": (
        outputs_with("XLMRobertaTokenizer"),
        [
            save_with_sentencepiece("gte", "GteForMaskedLM", **XLM, type_vocab_size=1),
            copy_to_reference,
            rename_tensors("gte.", "new."),
            replace_config(GTE_HUB | GTE_SIZE | {"architectures": ["NewForMaskedLM"], "auto_map": CODE}),
        ],
    ),
    "EuroBERT with auto_map": (
        check_outputs,
        [save_with_wordpieces("eurobert", "EuroBertForMaskedLM"), edit_config(auto_map=CODE)],
    ),
    "Marian with source.spm, target.spm and vocab.json": (outputs_with("MarianTokenizer"), [marian]),
    "mBART with sentencepiece.bpe.model alone": (
        outputs_with("MBartTokenizer"),
        [save_with_sentencepiece("mbart", "MBartForConditionalGeneration", **XLM)],
    ),
    "BART as fine-tuned for MNLI": (
        check_outputs,
        [save_with_byte_pairs("bart", "BartForSequenceClassification", "BartTokenizer", ANGLE_BRACKET_TOKENS)],
    ),
    "Llama with keys of transformers 4": (
        check_outputs,
        [
            save_with_byte_pairs("llama", "LlamaForCausalLM", "GPT2Tokenizer", ["<|endoftext|>"]),
            edit_config(rope_parameters=None, rope_theta=10_000.0, rope_scaling=None, pretraining_tp=1),
        ],
    ),
}


@pytest.mark.filterwarnings(
    "ignore:.*(names code|belong to other heads|do_lower_case is not in):heedful.errors.HeedfulWarning"
)
@pytest.mark.filterwarnings("ignore:Recommended:UserWarning")  # Marian's tokenizer recommends a package it does not use
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_has_the_outputs_of_its_library(tmp_path: Path, name: str) -> None:
    check, steps = LAYOUTS[name]
    for step in steps:
        step(tmp_path / "model")
    check(tmp_path / "model")
