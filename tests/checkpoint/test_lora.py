"""LoRA adapters in peft's format: merged by their formula, with heads and biases, or refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import heedful
from heedful.checkpoint import config_of, weight_files
from heedful.cli import main
from heedful.errors import HeedfulError
from tests.support.tiny_models import random_batch, random_sequences, save_tiny
from tests.support.tokenizer_folders import wordpieces, write_wordpiece

CONFIG: dict[str, Any] = {  # as peft 0.21 writes it
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config")),
    **dict.fromkeys(("exclude_modules", "kasa_config", "layer_replication", "layers_pattern", "lora_ga_config")),
    **dict.fromkeys(("layers_to_transform", "megatron_config", "modules_to_save", "monteclora_config", "revision")),
    **dict.fromkeys(("target_parameters", "task_type", "trainable_token_indices", "use_bdlora", "velora_config")),
    **dict.fromkeys(("ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora"), False),
    "use_rslora": False,
    "alpha_pattern": {},
    "bias": "none",
    "inference_mode": True,
    "init_lora_weights": True,
    "loftq_config": {},
    "lora_alpha": 12,
    "lora_dropout": 0.1,
    "megatron_core": "megatron.core",
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "target_modules": ["query"],
}
QUERY = "bert.encoder.layer.{}.attention.self.query"


def write_adapter(folder: Path, tensors: dict[str, Tensor], base: Path | None = None, **changed: Any) -> Path:
    """Write an adapter; names of tensors are those of the model that peft wraps."""
    folder.mkdir(parents=True)
    named = {} if base is None else {"base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | named | changed))
    save_file(
        {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


def random_tensor(*shape: int) -> Tensor:
    """Return random numbers that depend only on the shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64) / 4


def factors(module: str, out: int, width: int, rank: int = 4) -> dict[str, Tensor]:
    """Return the factors A and B of a linear layer, by their names in an adapter."""
    return {f"{module}.lora_A.weight": random_tensor(rank, width), f"{module}.lora_B.weight": random_tensor(out, rank)}


def classifier() -> dict[str, Tensor]:
    """Return the tensors of a classifier of three labels."""
    return {"classifier.weight": random_tensor(3, 32), "classifier.bias": random_tensor(3)}


def hf_logits(model: Any, family: str = "bert") -> Tensor:
    """Return the scores of transformers for the sequences of `random_batch`, computed one by one."""
    ids, types = random_sequences(family)
    type_inputs = [{"token_type_ids": torch.tensor([row])} if family == "bert" else {} for row in types]
    with torch.no_grad():
        return torch.cat(
            [model(torch.tensor([row]), **inputs).logits for row, inputs in zip(ids, type_inputs, strict=True)]
        )


def reference_classifier(base: Path) -> Any:
    """Return the model of transformers that an adapter changes, with the classifier of the adapter."""
    model = transformers.BertForSequenceClassification.from_pretrained(base, num_labels=3, dtype=torch.float64).eval()
    model.load_state_dict(classifier(), strict=False)
    return model


@pytest.mark.parametrize(
    ("changed", "rank", "scale"),
    [
        ({}, 4, 12 / 4),
        ({"use_rslora": True}, 4, 12 / math.sqrt(4)),
        ({"rank_pattern": {"query": 2}}, 2, 12 / 2),
        ({"alpha_pattern": {"self.query": 5}}, 4, 5 / 4),
        ({"rank_pattern": {"value": 2}, "alpha_pattern": {"value": 5, "uery": 3}}, 4, 12 / 4),
    ],
)
def test_weights_are_merged_by_the_formula(tmp_path: Path, changed: dict[str, Any], rank: int, scale: float) -> None:
    save_tiny(tmp_path / "base", "bert", "BertModel", torch.float64)
    tensors = classifier()
    for layer in range(4):
        tensors |= factors(QUERY.format(layer), 32, 32, rank)
    write_adapter(tmp_path / "adapter", tensors, tmp_path / "base", task_type="SEQ_CLS", **changed)
    reference = reference_classifier(tmp_path / "base")
    for block in reference.bert.encoder.layer:
        block.attention.self.query.weight.data += scale * random_tensor(32, rank) @ random_tensor(rank, 32)
    loaded = heedful.load(tmp_path / "adapter", dtype=torch.float64)
    assert loaded.config.head.labels == ("LABEL_0", "LABEL_1", "LABEL_2")  # type: ignore[union-attr]
    with torch.no_grad():
        assert (loaded(random_batch("bert")) - hf_logits(reference)).abs().max() < 1e-12
    heedful.save(loaded, tmp_path / "merged")
    assert not (tmp_path / "merged/adapter_config.json").exists()
    reloaded = transformers.BertForSequenceClassification.from_pretrained(
        tmp_path / "merged", dtype=torch.float64
    ).eval()
    assert (hf_logits(reloaded) - hf_logits(reference)).abs().max() < 1e-12


def test_biases_heads_and_embeddings(tmp_path: Path) -> None:
    """Biases and whole embeddings have names of wrapped layers; factors of embeddings lack .weight."""
    save_tiny(tmp_path / "base", "bert", "BertModel", torch.float64)
    base = load_file(tmp_path / "base/model.safetensors")
    words = "bert.embeddings.word_embeddings"
    tensors = classifier() | factors(QUERY.format(1), 32, 32)
    tensors |= {
        f"{QUERY.format(1)}.base_layer.bias": random_tensor(32),
        "bert.embeddings.LayerNorm.bias": random_tensor(32),
    }
    tensors |= {f"{words}.lora_embedding_A": random_tensor(4, 99), f"{words}.lora_embedding_B": random_tensor(32, 4)}
    tensors[f"{words}.base_layer.weight"] = base["embeddings.word_embeddings.weight"]
    write_adapter(tmp_path / "adapter", tensors, tmp_path / "base", task_type="SEQ_CLS", bias="all")
    reference = reference_classifier(tmp_path / "base")
    query, embeddings = reference.bert.encoder.layer[1].attention.self.query, reference.bert.embeddings
    query.weight.data += 3 * random_tensor(32, 4) @ random_tensor(4, 32)
    query.bias.data = embeddings.LayerNorm.bias.data = random_tensor(32)
    embeddings.word_embeddings.weight.data += 3 * (random_tensor(32, 4) @ random_tensor(4, 99)).T
    loaded = heedful.load(tmp_path / "adapter", dtype=torch.float64)
    with torch.no_grad():
        assert (loaded(random_batch("bert")) - hf_logits(reference)).abs().max() < 1e-12


def test_transposed_matrices(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "base", "gpt2", "GPT2LMHeadModel", torch.float64)
    module = "transformer.h.2.attn.c_attn"
    tensors = factors(module, 96, 32)
    write_adapter(tmp_path / "adapter", tensors, tmp_path / "base", task_type="CAUSAL_LM", fan_in_fan_out=True)
    reference.transformer.h[2].attn.c_attn.weight.data += 3 * (random_tensor(96, 4) @ random_tensor(4, 32)).T
    ids, _ = random_sequences("gpt2")
    with torch.no_grad():
        expected = torch.cat([reference(torch.tensor([row])).logits[0] for row in ids])
        loaded = heedful.load(tmp_path / "adapter", dtype=torch.float64)
        assert (loaded(random_batch("gpt2")) - expected).abs().max() < 1e-12


def test_a_lower_precision_rounds_once(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", "bert", "BertModel")
    write_adapter(tmp_path / "adapter", classifier() | factors(QUERY.format(0), 32, 32), tmp_path / "base")
    exact, rounded = (heedful.load(tmp_path / "adapter", dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    for name, tensor in rounded.named_tensors().items():
        assert torch.equal(tensor, exact.named_tensors()[name].bfloat16()), name


def test_modules_of_sentence_transformers_in_the_folder_of_an_adapter(tmp_path: Path) -> None:
    """Sentence-transformers saves modules.json of a model with an adapter in the folder of the adapter."""
    save_tiny(tmp_path / "base", "bert", "BertModel")
    write_wordpiece(tmp_path / "base", wordpieces()[:99])
    module = QUERY.format(3).removeprefix("bert.")
    folder = write_adapter(tmp_path / "adapter", factors(module, 32, 32), tmp_path / "base")
    config = json.loads((folder / "adapter_config.json").read_text()) | {"task_type": "FEATURE_EXTRACTION"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    loaded = heedful.load(folder)
    assert loaded.config.head.kind == "embedding"  # type: ignore[union-attr]
    assert (
        loaded.tokenizer is not None
        and loaded.tokenizer.fingerprint == heedful.Tokenizer.load(tmp_path / "base").fingerprint
    )
    weight = load_file(tmp_path / "base/model.safetensors")[f"{module}.weight"]
    merged = loaded.named_tensors()["encoder.blocks.3.attention.qkv.weight"][:32]
    assert torch.allclose(
        merged, (weight.double() + 3 * random_tensor(32, 4) @ random_tensor(4, 32)).float(), atol=1e-6
    )


def test_convert_merges_into_the_given_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "base", "bert", "BertForMaskedLM")
    folder = write_adapter(tmp_path / "adapter", factors(QUERY.format(0), 32, 32), tmp_path / "gone")

    def convert(*options: str) -> int:
        with pytest.raises(SystemExit) as stop:
            main(["convert", str(folder), str(tmp_path / "merged"), *options])
        return int(stop.value.code or 0)

    assert convert() == 2 and f"heedful convert {folder} OUT --base MODEL" in " ".join(capsys.readouterr().err.split())
    assert convert("--base", str(tmp_path / "base")) == 0
    merged, expected = heedful.load(tmp_path / "merged"), heedful.load(folder, base=tmp_path / "base")
    assert merged.weights_digest() == expected.weights_digest() != heedful.load(tmp_path / "base").weights_digest()
    reference, report = transformers.BertForMaskedLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weight = reference.bert.encoder.layer[0].attention.self.query.weight
    assert torch.equal(weight, expected.named_tensors()["encoder.blocks.0.attention.qkv.weight"][:32])


def test_the_base_model_can_be_given(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", "bert", "BertForMaskedLM")
    folder = write_adapter(tmp_path / "adapter", factors(QUERY.format(0), 32, 32))
    with pytest.raises(
        HeedfulError, match=r"adapter_config\.json names no model: give it, heedful convert .*adapter OUT --base MODEL"
    ):
        heedful.load(folder)
    assert heedful.load(folder, base=tmp_path / "base").config.head.kind == "masked_lm"  # type: ignore[union-attr]
    with pytest.raises(HeedfulError, match=r"is an adapter of .* which is an adapter too: merge that one first"):
        heedful.load(folder, base=folder)
    with pytest.raises(HeedfulError, match="is no adapter, so base='base' has no use"):
        heedful.load(tmp_path / "base", base="base")
    without_base = write_adapter(tmp_path / "other", factors(QUERY.format(0), 32, 32), tmp_path / "gone")
    with pytest.raises(
        HeedfulError, match=r"other is an adapter of .*gone.* or give it, heedful convert .*load\(\.\.\., base"
    ):
        heedful.load(without_base)
    named = write_adapter(tmp_path / "named", factors(QUERY.format(0), 32, 32), tmp_path / "base")
    assert config_of(named).model.width == 32
    names = [
        "base/config.json",
        "named/adapter_config.json",
        "named/adapter_model.safetensors",
        "base/model.safetensors",
    ]
    assert [str(path.relative_to(tmp_path)) for path in weight_files(named)] == names


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only 'LORA' can be loaded: only plain LoRA is supported"),
        ({"use_dora": True}, "use_dora is True"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices is"),
        ({"target_parameters": ["experts"]}, "target_parameters is"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
        ({"r": 8}, r"has factors \[4, 32\] and \[32, 4\], but r is 8"),
        ({"rank_pattern": {"query": 2.5}}, r"rank_pattern has 'query': 2\.5; expected names and numbers"),
        ({"rank_pattern": {".*query": 2}}, r"rank_pattern has '\.\*query': 2; expected names and numbers"),
        ({"alpha_pattern": ["query"]}, "alpha_pattern is"),
        ({"task_type": "DREAM"}, "task_type is 'DREAM'; expected one of SEQ_CLS"),
        ({"task_type": "CAUSAL_LM"}, "its head is language_model, but this family has pooler"),
        ({"lora_gamma": 1}, "does not know the key 'lora_gamma'"),
    ],
)
def test_adapters_other_than_plain_lora_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    save_tiny(tmp_path / "base", "bert", "BertModel")
    write_adapter(tmp_path / "adapter", factors(QUERY.format(0), 32, 32), tmp_path / "base", **changed)
    with pytest.raises(HeedfulError, match=message):
        heedful.load(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (factors("bert.encoder.layer.9.attention.self.query", 32, 32), "which the model does not have"),
        (factors(QUERY.format(0), 32, 16), r"as \[32, 16\], but the model's is \[32, 32\]"),
        ({f"{QUERY.format(0)}.lora_A.weight": random_tensor(4, 32)}, "has one factor of two"),
        (
            factors(QUERY.format(0), 32, 32) | {f"{QUERY.format(0)}.lora_magnitude_vector": random_tensor(32)},
            "lora_magnitude_vector is no factor of plain LoRA",
        ),
        (
            factors(QUERY.format(0), 32, 32) | {"bert.strange.weight": random_tensor(3)},
            "not expected: bert.strange.weight",
        ),
        (
            {
                f"bert.embeddings.word_embeddings.lora_embedding_{part}": random_tensor(*shape)
                for part, shape in (("A", (4, 99)), ("B", (32, 4)))
            },
            "which the model uses twice, as tokens and as output",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    save_tiny(tmp_path / "base", "bert", "BertForMaskedLM")
    write_adapter(tmp_path / "adapter", tensors, tmp_path / "base")
    with pytest.raises(HeedfulError, match=message):
        heedful.load(tmp_path / "adapter")


def test_an_adapter_without_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", "bert", "BertModel")
    folder = write_adapter(tmp_path / "adapter", factors(QUERY.format(0), 32, 32), tmp_path / "base")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(HeedfulError, match=r"has its weights in adapter_model\.bin"):
        heedful.load(folder)
