"""ONNX export: onnxruntime computes the outputs of transformers on padded batches; graphs that differ are rejected."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import heedful
from heedful.checkpoint import BundleConfig, create
from heedful.checkpoint.new_head import with_head
from heedful.cli import main
from heedful.infer.export import export
from heedful.infer.export import onnx_export as module
from heedful.infer.export.onnx_graph import Graph
from heedful.model.config import (
    Buckets,
    Classes,
    DynamicNtk,
    EmbeddingConfig,
    Head,
    Learned,
    LinearScaling,
    ModelConfig,
    Pooling,
    Rotary,
    SentenceEmbedding,
    Shaw,
    Sinusoidal,
    StackConfig,
    Yarn,
)
from tests.support.model_folders import make_model_dir
from tests.support.tiny_models import hf_outputs, random_sequences, randomise, save_tiny

pytest.importorskip("onnx", reason="onnx is not installed: pip install 'heedful[export]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'heedful[export]'")

MODELS = [
    ("bert", "BertForSequenceClassification"),
    ("bert", "BertForPreTraining"),
    ("bert", "BertForMultipleChoice"),
    ("bert", "BertModel"),
    ("roberta", "RobertaForTokenClassification"),
    ("distilbert", "DistilBertForQuestionAnswering"),
    ("albert", "AlbertForMaskedLM"),
    ("electra", "ElectraForPreTraining"),
    ("modernbert", "ModernBertForSequenceClassification"),
    ("t5", "T5EncoderModel"),
    ("mpnet", "MPNetForSequenceClassification"),
    ("nomic_bert", "NomicBertModel"),
    ("gte", "GteForSequenceClassification"),
    ("jina_embeddings_v3", "JinaEmbeddingsV3ForTokenClassification"),
    ("deberta-v2", "DebertaV2ForSequenceClassification"),
    ("eurobert", "EuroBertForSequenceClassification"),
    ("eurobert", "EuroBertForMaskedLM"),
    ("gpt2", "GPT2ForTokenClassification"),
    ("llama", "LlamaForSequenceClassification"),
    ("qwen3", "Qwen3ForQuestionAnswering"),
    ("qwen3", "Qwen3Model"),
]
POOLINGS: tuple[Pooling, ...] = ("mean", "first", "max", "mean_sqrt_length", "last")


def session(path: Path) -> Any:
    """Open a file in onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def pad(rows: list[list[int]], mask: np.ndarray) -> np.ndarray:
    """Return rows as a matrix, with the id 1 at the positions that the mask leaves out."""
    grid = np.ones(mask.shape, np.int64)
    grid[mask] = np.concatenate(rows)
    return grid


@pytest.mark.parametrize(("family", "architecture"), MODELS)
def test_outputs_equal_those_of_transformers(tmp_path: Path, family: str, architecture: str) -> None:
    reference = save_tiny(tmp_path / "model", family, architecture)
    exported = export(heedful.load(tmp_path / "model"), tmp_path / "out" / "it.onnx")
    assert exported.difference <= 5e-6
    ids, types = random_sequences(family)
    with torch.no_grad():
        expected = [output.numpy() for output in hf_outputs(reference, family, ids, types)]
    if "start_logits" in exported.outputs:
        expected = [expected[0][:, 0], expected[0][:, 1]]
    right_padded = np.arange(max(map(len, ids))) < np.array([len(row) for row in ids])[:, None]
    for mask in (right_padded, right_padded[:, ::-1]):
        feeds = {
            "input_ids": pad(ids, mask),
            "attention_mask": mask.astype(np.int64),
            "token_type_ids": pad(types, mask),
        }
        if "MultipleChoice" in architecture:
            feeds = {name: grid.reshape(2, 2, -1) for name, grid in feeds.items()}
        names = exported.outputs[-len(expected) :]  # a model with a pooler also outputs hidden states
        outputs = session(exported.path).run(list(names), {name: feeds[name] for name in exported.inputs})
        for output, expected_output in zip(outputs, expected, strict=True):
            unpadded = (output[mask] if len(expected_output) == mask.sum() else output).reshape(expected_output.shape)
            assert np.abs(unpadded - expected_output).max() <= 3e-6 * max(1.0, np.abs(expected_output).max())


STACK_SIZES: dict[str, Any] = {"width": 24, "layers": 3, "heads": 3, "head_width": 10, "inner_width": 20}
EMBEDDING = EmbeddingConfig(vocabulary=50, width=24, types=3, norm="layer")
SCALED_ROTARY = Rotary(
    base=50.0,
    local_base=99.0,
    scaling=Yarn(factor=3.0, trained=5, magnitude=1.2, fast=2.0, slow=0.5),
    local_scaling=LinearScaling(factor=2.0),
)
CONFIGS: dict[str, tuple[EmbeddingConfig, StackConfig, Head]] = {
    "sinusoids, gated, causal": (
        replace(EMBEDDING, positions=Sinusoidal(), scale=3.0),
        StackConfig(**STACK_SIZES, activation="silu", gated=True, causal=True, blocks=2),
        Classes(labels=("a", "b"), pooling="last", activation="relu", norm_eps=1e-5),
    ),
    "relative position vectors": (
        replace(EMBEDDING, positions=Sinusoidal(layout="halves", join="concatenate", width=6), types=0, norm="rms"),
        StackConfig(**STACK_SIZES, activation="relu", relation=Shaw(reach=4), norm_at="pre", final_norm=True),
        SentenceEmbedding(pooling=POOLINGS, normalise=True),
    ),
    "rotary, local attention": (
        replace(EMBEDDING, positions=Learned(count=12, offset=2)),
        StackConfig(
            **STACK_SIZES, activation="tanh", relation=SCALED_ROTARY, window=2, attention_bias=False, global_layers=(1,)
        ),
        SentenceEmbedding(pooling=("max",)),
    ),
    "shared keys, normalised q and k": (
        replace(EMBEDDING, types=0),
        StackConfig(**STACK_SIZES, relation=Rotary(), kv_heads=1, qk_norm=True, norm="rms", attention_bias=False),
        SentenceEmbedding(),
    ),
    "buckets": (
        replace(EMBEDDING, types=0, norm=None),
        StackConfig(**STACK_SIZES, gated=True, activation="gelu_tanh", norm="rms", relation=Buckets(count=8, reach=20)),
        SentenceEmbedding(),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_equal_those_of_the_packed_model(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_POSITIONS", 70)  # the limit shortens the second batch
    embedding, encoder, head = CONFIGS[name]
    bundle = create(BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=encoder), head=head))
    randomise(bundle)
    exported = export(bundle, tmp_path / "out.onnx")
    assert exported.difference <= 5e-6
    assert exported.max_length == {"buckets": None, "rotary, local attention": 10}.get(name, 70)
    assert exported.inputs == ("input_ids", "attention_mask", "token_type_ids")[: 3 if embedding.types else 2]
    notes = session(exported.path).get_modelmeta().custom_metadata_map
    assert notes["head"] == head.kind and json.loads(notes["config"])["model_type"] == "heedful"
    assert ("labels" in notes) == isinstance(head, Classes)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("windows", [{}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}])
def test_sentence_vectors_of_a_decoder(tmp_path: Path, windows: dict[str, Any], pooling: Pooling) -> None:
    """The vectors do not depend on whether the padding is before or after the text."""
    save_tiny(tmp_path / "model", "qwen3", "Qwen3Model", **windows)
    bundle = with_head(heedful.load(tmp_path / "model"), "embedding")
    bundle.config = replace(bundle.config, head=SentenceEmbedding(pooling=(pooling,), normalise=True))
    bundle = heedful.ModelBundle(bundle.config)
    randomise(bundle)
    exported = export(bundle, tmp_path / "out.onnx")
    assert exported.difference <= 5e-6 and "sentence_embedding" in exported.outputs
    ids, _ = random_sequences("qwen3")
    with torch.no_grad():
        expected = bundle.eval()(heedful.Packed.of(ids)).numpy()
    right_padded = np.arange(max(map(len, ids))) < np.array([len(row) for row in ids])[:, None]
    for mask in (right_padded, right_padded[:, ::-1]):
        feeds = {"input_ids": pad(ids, mask), "attention_mask": mask.astype(np.int64)}
        (vectors,) = session(exported.path).run(["sentence_embedding"], feeds)
        assert np.abs(vectors - expected).max() <= 3e-6


def test_rotations_that_depend_on_the_length_are_rejected(tmp_path: Path) -> None:
    encoder = StackConfig(**STACK_SIZES, relation=Rotary(scaling=DynamicNtk(factor=2.0, trained=8)))
    bundle = create(BundleConfig(family="heedful", model=ModelConfig(embedding=EMBEDDING, encoder=encoder)))
    with pytest.raises(heedful.HeedfulError, match=r"depend on a text's length \(.*\) cannot be exported"):
        export(bundle, tmp_path / "out.onnx")


def exit_status(*command: str) -> int:
    """Run the command line, and return its exit status."""
    with pytest.raises(SystemExit) as raised:
        main(command)
    return int(raised.value.code or 0)


def test_a_folder_has_graph_config_and_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model_dir(tmp_path / "model", "multiple")
    command = ["export", str(tmp_path / "model"), str(tmp_path / "out")]
    assert exit_status(*command, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["outputs"] == ["logits"] and summary["difference"] <= summary["tolerance"] == 1e-4
    assert summary["written"] == str(tmp_path / "out" / "model.onnx") and summary["max_length"] == 48
    assert {"model.onnx", "config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    notes = session(Path(summary["written"])).get_modelmeta().custom_metadata_map
    assert (
        json.loads(notes["labels"]) == ["bad", "fair", "good"] and notes["problem_type"] == "multi_label_classification"
    )
    assert exit_status(*command) == 2
    assert "exists and is not empty: give another name" in capsys.readouterr().err
    assert exit_status(*command, "--overwrite") == 0
    assert "of the largest output of the model" in capsys.readouterr().out


def test_weights_of_a_model_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_model_dir(tmp_path / "model", "multiple")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert exit_status("export", str(folder), str(folder), "--overwrite") == 2
    assert "holds a model's weights (model.safetensors), which would be lost" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert exit_status("export", str(folder), str(folder / "model.onnx")) == 0
    assert (folder / "model.onnx").is_file() and (folder / "model.safetensors").is_file()


def test_a_graph_with_other_outputs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_model(self: Graph, metadata: Any, to_model_proto: Any = Graph.to_model_proto) -> Any:
        self.tensors["head.out.bias"] = self.tensors["head.out.bias"] + np.float32([0, 0.01, 0])
        return to_model_proto(self, metadata)

    make_model_dir(tmp_path / "model", "single")
    bundle = heedful.load(tmp_path / "model")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Graph, "to_model_proto", wrong_model)
    for out in ("out/it.onnx", "out/folder"):
        with pytest.raises(heedful.HeedfulError, match=r"does not compute what the model does: logits by \d"):
            export(bundle, tmp_path / out)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("family", "architecture", "reason"),
    [
        ("gpt2", "GPT2LMHeadModel", r'\(gpt2\) has a "language_model" head: Heedful exports one stack'),
        ("bart", "BartForSequenceClassification", r"\(bart\) has a decoder beside its encoder: Heedful exports"),
        (
            "t5",
            "T5ForConditionalGeneration",
            r"has a decoder beside its encoder \(without it, .* one of encoder, token_classification\)",
        ),
        ("xlnet", "XLNetForSequenceClassification", "has two-stream attention: Heedful exports"),
    ],
)
def test_models_that_cannot_be_exported_are_rejected(
    tmp_path: Path, family: str, architecture: str, reason: str
) -> None:
    save_tiny(tmp_path / "model", family, architecture)
    with pytest.raises(heedful.HeedfulError, match=reason):
        export(heedful.load(tmp_path / "model"), tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_a_model_in_another_dtype_is_rejected(tmp_path: Path) -> None:
    bundle = heedful.load(make_model_dir(tmp_path / "model", "single"), dtype=torch.bfloat16)
    with pytest.raises(heedful.HeedfulError, match=r"load it with dtype=torch\.float32 on the CPU"):
        export(bundle, tmp_path / "out.onnx")


def test_a_missing_package_is_an_error_with_its_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(heedful.HeedfulError, match=r"onnxruntime is not installed: pip install 'heedful\[export\]'"):
        export(heedful.load(make_model_dir(tmp_path / "model", "single")), tmp_path / "out.onnx")
