"""Published configs of much used models: every key is known, counts are exact, and small models equal transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import heedful
from heedful.checkpoint import ModelBundle, read_config
from heedful.families import FAMILIES
from heedful.packed import Packed
from tests.support.tiny_models import scaled_error, transformers_in_float64

BERT: dict[str, Any] = {  # a BERT of 12 layers, 384 wide
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 384,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
    "transformers_version": "4.36.1",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
XLM_ROBERTA = BERT | {
    "architectures": ["XLMRobertaModel"],
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 514,
    "model_type": "xlm-roberta",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "output_past": True,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 250002,
}
MODERNBERT: dict[str, Any] = {  # Ettin of 17 M parameters
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 50281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 50282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 256,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 384,
    "layer_norm_eps": 1e-5,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 7999,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-5,
    "num_attention_heads": 4,
    "num_hidden_layers": 7,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "reference_compile": None,
    "repad_logits_with_grad": False,
    "sep_token_id": 50282,
    "sparse_pred_ignore_index": -100,
    "sparse_prediction": False,
    "torch_dtype": "float32",
    "transformers_version": "4.48.0",
    "vocab_size": 50368,
}
MMBERT = MODERNBERT | {
    "bos_token_id": 2,
    "cls_token_id": 1,
    "eos_token_id": 1,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "local_rope_theta": 160000.0,
    "mask_token_id": 4,
    "max_position_embeddings": 8192,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 0,
    "position_embedding_type": "sans_pos",
    "sep_token_id": 1,
    "vocab_size": 256000,
}
EUROBERT: dict[str, Any] = {  # of 610 M parameters
    "architectures": ["EuroBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token": "<|begin_of_text|>",
    "bos_token_id": 128000,
    "eos_token": "<|end_of_text|>",
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_dropout": 0.0,
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "is_decoder": False,
    "mask_token": "<|mask|>",
    "mask_token_id": 128002,
    "max_position_embeddings": 8192,
    "model_type": "eurobert",
    "num_attention_heads": 18,
    "num_hidden_layers": 26,
    "num_key_value_heads": 6,
    "pad_token": "<|end_of_text|>",
    "pad_token_id": 128001,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 250000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "vocab_size": 128256,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.3",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151669,
}
SMOLLM2: dict[str, Any] = {  # of 135 M parameters
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "vocab_size": 49152,
}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {  # name -> config.json, parameters of the bare model
    "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2": (BERT | {"vocab_size": 250037}, 117_653_760),
    "intfloat/multilingual-e5-small": (
        BERT | {"vocab_size": 250037, "tokenizer_class": "XLMRobertaTokenizer"},
        117_653_760,
    ),
    "intfloat/e5-small-v2": (BERT, 33_360_000),
    "BAAI/bge-small-en-v1.5": (
        BERT | {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "architectures": ["BertModel"]},
        33_360_000,
    ),
    "Snowflake/snowflake-arctic-embed-xs": (BERT | {"num_hidden_layers": 6}, 22_713_216),
    "Snowflake/snowflake-arctic-embed-m": (
        BERT | {"hidden_size": 768, "intermediate_size": 3072},
        109_482_240,
    ),
    "intfloat/multilingual-e5-large": (XLM_ROBERTA, 559_890_432),
    "BAAI/bge-m3": (XLM_ROBERTA | {"max_position_embeddings": 8194}, 567_754_752),
    "jhu-clsp/ettin-encoder-17m": (MODERNBERT, 16_797_440),
    "jhu-clsp/ettin-encoder-32m": (
        MODERNBERT | {"hidden_size": 384, "intermediate_size": 576, "num_attention_heads": 6, "num_hidden_layers": 10},
        31_883_136,
    ),
    "jhu-clsp/ettin-encoder-68m": (
        MODERNBERT | {"hidden_size": 512, "intermediate_size": 768, "num_attention_heads": 8, "num_hidden_layers": 19},
        68_144_640,
    ),
    "jhu-clsp/mmBERT-small": (MMBERT | {"hidden_size": 384, "num_attention_heads": 6}, 140_493_696),
    "jhu-clsp/mmBERT-base": (MMBERT, 306_939_648),
    "EuroBERT/EuroBERT-610m": (EUROBERT, 607_874_688),
    "Qwen/Qwen3-Embedding-0.6B": (QWEN3, 595_776_512),
    "HuggingFaceTB/SmolLM2-135M": (SMOLLM2, 134_515_008),
}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 99}


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_keys_are_known_and_the_parameters_are_as_many(name: str) -> None:
    values, count = PUBLISHED[name]
    config = read_config(values | {"architectures": [FAMILIES[values["model_type"]].bare]}, name)
    with torch.device("meta"):
        assert ModelBundle(config).count() == count
    assert read_config(values, name).model == config.model


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_small_model_of_the_published_keys_equals_transformers(tmp_path: Path, name: str) -> None:
    values = PUBLISHED[name][0] | SMALL | {"torch_dtype": "float64"}
    if_present = {"pad_token_id": 1, "local_attention": 8, "max_position_embeddings": 60, "num_key_value_heads": 2}
    values |= {key: value for key, value in if_present.items() if key in values}
    (tmp_path / "config.json").write_text(json.dumps(values))
    torch.manual_seed(1)
    with transformers_in_float64():
        reference = (
            transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(tmp_path)).double().eval()
        )
        reference.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": [type(reference).__name__]}))
        loaded = heedful.load(tmp_path, dtype=torch.float64)
        ids = torch.randint(5, 98, (40,)).tolist()
        expected = reference(torch.tensor([ids])).last_hidden_state[0]
        assert scaled_error(loaded.model(Packed.of([ids])), expected) < 1e-12
