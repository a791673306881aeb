"""Nomic BERT, GTE and Jina embeddings v3 with rotary positions: keys of their first publication, scaled rotations.

All three were published with code of their own before transformers had them: config.json then had other keys.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import heedful
from heedful.checkpoint import ModelBundle, read_config
from heedful.errors import HeedfulError
from heedful.families import FAMILIES
from heedful.model.config import LinearScaling, Rotary
from tests.support.tiny_models import (
    hf_hidden_states,
    hf_outputs,
    our_hidden_states,
    our_outputs,
    random_batch,
    random_sequences,
    save_tiny,
    scaled_error,
    transformers_in_float64,
)

NOMIC_HUB = {  # as nomic-embed-text-v1.5 is published, less its sizes
    "activation_function": "swiglu",
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "causal": False,
    "dense_seq_output": True,
    "embd_pdrop": 0.0,
    "eos_token_id": None,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_positions": 8192,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.0,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "type_vocab_size": 2,
    "use_cache": True,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "use_xentropy": True,
}
TINY_SIZE = {"n_embd": 32, "n_head": 4, "n_inner": 48, "n_layer": 4, "vocab_size": 99}
GTE_HUB = {  # as gte-multilingual-base is published, less its sizes
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 8192,
    "model_type": "new",
    "pack_qkv": True,
    "pad_token_id": 1,
    "position_embedding_type": "rope",
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
}
SIZE_KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def rewrite(folder: Path, config: dict[str, Any], prefixes: tuple[str, str] = ("", "")) -> None:
    """Replace config.json, and the first of `prefixes` by the second in the names of tensors."""
    old, new = prefixes
    path = folder / "model.safetensors"
    tensors = {
        new + name.removeprefix(old) if name.startswith(old) else name: tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def check_outputs_and_round_trip(reference: Any, family: str, folder: Path, tmp_path: Path) -> None:
    """Compare the outputs of a folder with transformers' model, and the folder saved again with the one read."""
    loaded = heedful.load(folder)
    ids, types = random_sequences(family)
    with torch.no_grad():
        expected = torch.cat(
            [hf_hidden_states(reference, family, *sequence) for sequence in zip(ids, types, strict=True)]
        )
        assert scaled_error(our_hidden_states(loaded, random_batch(family)), expected) <= 2e-6
        outputs, expected_outputs = our_outputs(loaded, random_batch(family)), hf_outputs(reference, family, ids, types)
        for actual_output, expected_output in zip(outputs, expected_outputs, strict=True):
            assert scaled_error(actual_output, expected_output) <= 2e-6
    heedful.save(loaded, tmp_path / "again")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    read, written = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "again"))
    read.pop("auto_map", None)  # the published code, which Heedful does not run
    written.pop("dtype", None)
    assert written == read


@pytest.mark.filterwarnings("ignore:.*names code:heedful.errors.HeedfulWarning")
@pytest.mark.parametrize("architecture", ["NomicBertModel", "NomicBertForMaskedLM"])
def test_nomic_bert_as_it_was_published_first(tmp_path: Path, architecture: str) -> None:
    reference = save_tiny(tmp_path / "hub", "nomic_bert", architecture)
    code = {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"}
    rewrite(tmp_path / "hub", NOMIC_HUB | TINY_SIZE | {"architectures": [architecture], "auto_map": code})
    check_outputs_and_round_trip(reference, "nomic_bert", tmp_path / "hub", tmp_path)


def test_nomic_bert_has_as_many_parameters_by_either_keys() -> None:
    size = {"n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12, "vocab_size": 30_528}
    with torch.device("meta"):
        assert ModelBundle(read_config(NOMIC_HUB | size, "config.json")).count() == 136_731_648


@pytest.mark.parametrize(
    "changed",
    [
        *({name: True} for name in ("prenorm", "parallel_block", "causal", "use_rms_norm", "rotary_emb_interleaved")),
        *({name: True} for name in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")),
        {"rotary_emb_fraction": 0.5},
        {"rotary_scaling_factor": 2.0},
        {"moe_every_n_layers": 2},
        {"num_experts": 8},
        {"activation_function": "gelu"},
        {"unknown": 1},
    ],
)
def test_other_models_of_the_first_publication_are_refused_by_key(changed: dict[str, Any]) -> None:
    with pytest.raises(HeedfulError, match=next(iter(changed))):
        read_config(NOMIC_HUB | TINY_SIZE | changed, "config.json")


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"])
def test_gte_as_it_was_published_first(tmp_path: Path, head: str) -> None:
    reference = save_tiny(tmp_path / "hub", "gte", f"Gte{head}")
    native = json.loads((tmp_path / "hub/config.json").read_text())
    common_keys = ("id2label", "label2id", "type_vocab_size", *SIZE_KEYS)
    values = GTE_HUB | {key: native[key] for key in common_keys if key in native}
    values |= {"architectures": [f"New{head}"], "rope_theta": 160_000.0, "rope_scaling": None}
    rewrite(tmp_path / "hub", values | {"pad_token_id": native["pad_token_id"]}, ("gte.", "new."))
    check_outputs_and_round_trip(reference, "gte", tmp_path / "hub", tmp_path)


def test_gte_without_types(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "gte", "gte", "GteModel", type_vocab_size=0)
    ids, _ = random_sequences("gte")
    with torch.no_grad():
        rows = our_hidden_states(heedful.load(tmp_path / "gte"), random_batch("gte"))
        expected = torch.cat([reference(torch.tensor([row_ids])).last_hidden_state[0] for row_ids in ids])
    assert scaled_error(rows, expected) <= 2e-6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logn_attention_scale": True}, "scores that are scaled by the length are not supported"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type is 'rms_norm'"),
        ({"pack_qkv": False}, "separate tensors of q, k and v are not read"),
        ({"position_embedding_type": "absolute"}, "other positions are not supported"),
    ],
)
def test_other_models_of_gte_are_refused_by_key(changed: dict[str, Any], message: str) -> None:
    sizes = dict.fromkeys(SIZE_KEYS, 4) | {"hidden_size": 16, "type_vocab_size": 1}
    values = GTE_HUB | sizes | {"architectures": ["NewModel"]}
    read_config(values, "config.json")
    with pytest.raises(HeedfulError, match=message):
        read_config(values | changed, "config.json")


# -- scaled rotations for texts longer than the trained ones ----------------------------------------------------------


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 0.1,
    "high_freq_factor": 1.2,
    "original_max_position_embeddings": 10,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0625, 1.5, 2.25],
    "long_factor": [1.0, 2.5, 8.0, 31.5],
    "factor": 4.0,
    "original_max_position_embeddings": 10,
}
STRETCHES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 8.0},
    YARN,
    YARN | {"attention_factor": 0.7, "beta_fast": 4.0, "beta_slow": 0.5},
    YARN | {"beta_fast": 3.0, "beta_slow": 1.0, "truncate": False},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 4.0},
    YARN | {"mscale": 0.7, "factor": 1.0},
    YARN | {"beta_fast": 1e4, "beta_slow": 1e4},
    LLAMA3,
    LLAMA3 | {"low_freq_factor": 0.01, "high_freq_factor": 0.5, "factor": 32.0},
    LONGROPE,
    LONGROPE | {"factor": 1.0},
    LONGROPE | {"attention_factor": 1.5},
]


@pytest.mark.parametrize("family", ["eurobert", "gte", "jina_embeddings_v3", "nomic_bert"])
@pytest.mark.parametrize("parameters", STRETCHES, ids=lambda values: "-".join(f"{value}" for value in values.values()))
def test_stretched_positions_equal_transformers(tmp_path: Path, family: str, parameters: dict[str, Any]) -> None:
    """Texts shorter and longer than the 10 trained positions; the config that is written describes the same model."""
    rope_parameters = {"rope_theta": 500.0} | parameters
    reference = save_tiny(
        tmp_path,
        family,
        FAMILIES[family].bare,
        torch.float64,
        rope_parameters=rope_parameters,
        max_position_embeddings=10,
    )
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    lengths = (3, 9, 11, 30)  # ascending: transformers continues with the rotations of the longest text so far
    ids, types = random_sequences(family, lengths)
    batch = random_batch(family, lengths)
    with transformers_in_float64():
        expected = torch.cat(
            [hf_hidden_states(reference, family, *sequence) for sequence in zip(ids, types, strict=True)]
        )
        assert scaled_error(our_hidden_states(loaded, batch), expected) <= 1e-12
    values = FAMILIES[family].write(loaded.config.model) | {"model_type": family}
    assert read_config(values, "config.json").model == loaded.config.model


@pytest.mark.parametrize("parameters", [{"rope_type": "dynamic", "factor": 4.0}, LONGROPE], ids=["dynamic", "longrope"])
def test_rotations_by_length_do_not_depend_on_the_batch(tmp_path: Path, parameters: dict[str, Any]) -> None:
    """A text has the same hidden states alone and packed with longer ones."""
    rope_parameters = {"rope_theta": 500.0} | parameters
    save_tiny(tmp_path, "gte", "GteModel", torch.float64, rope_parameters=rope_parameters, max_position_embeddings=10)
    model = heedful.load(tmp_path, dtype=torch.float64).model
    batch = random_batch("gte", (3, 30, 12))
    together, ids, types = (batch.unpack(rows) for rows in (model(batch), batch.tokens, batch.types))
    for hidden_states, row_ids, row_types in zip(together, ids, types, strict=True):
        alone = model(heedful.Packed.of([row_ids.tolist()], types=[row_types.tolist()]))
        assert (alone - hidden_states).abs().max() < 1e-12
    with pytest.raises(HeedfulError, match=r"\((dynamic_ntk|longrope)\) are for encoders; this stack is causal"):
        replace(model.config.encoder, causal=True)  # type: ignore[type-var]


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_ntk_stretch_is_its_formula(key: str) -> None:
    """With factor s and base b, pair i of d dimensions turns by 1 / ((s b)^(2i/d) s^(2/d)) radians per position.

    The published code of GTE computes it so.
    """
    values = GTE_HUB | {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    values |= {"intermediate_size": 48, "type_vocab_size": 1, "architectures": ["NewModel"], "rope_theta": 20_000}
    model = read_config(values | {"rope_scaling": {key: "ntk", "factor": 8.0}}, "config.json").model
    assert model.encoder is not None and isinstance(relation := model.encoder.relation, Rotary)
    assert isinstance(relation.scaling, LinearScaling)
    for index in range(4):
        expected = 1 / ((20_000 * 8.0) ** (2 * index / 8) * 8.0 ** (2 / 8))
        assert relation.base ** (-2 * index / 8) / relation.scaling.factor == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "type is 'su'; expected one of default, linear"),
        ({"rope_scaling": {"type": "dynamic"}}, "factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor is 0.5; expected a number from 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta": 1}}, "does not know the key 'beta'"),
        ({"rope_parameters": LONGROPE | {"long_factor": [1.0, 2.0]}}, "expected a list of 2 numbers above 0"),
        ({"rope_parameters": LONGROPE | {"short_factor": [0.0] * 2}}, "expected a list of 2 numbers above 0"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 2}}, r"is 2; expected less than high_freq_factor, 1\.2"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type is 'proportional'; expected one of default"),
        ({"rope_scaling": {"factor": 2.0}}, "factor is 2.0"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.75}}, "mixed_b is 0.75"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "all dimensions of a head"),
        ({"rope_parameters": {"rope_type": "default", "beta": 0.5}}, "does not know the key 'beta'"),
    ],
)
def test_other_stretches_are_refused_by_name(changed: dict[str, Any], message: str) -> None:
    sizes = dict.fromkeys(SIZE_KEYS, 4) | {"hidden_size": 16, "type_vocab_size": 1}
    values = GTE_HUB | sizes | {"architectures": ["NewModel"]}
    with pytest.raises(HeedfulError, match=message):
        read_config(values | changed, "config.json")
