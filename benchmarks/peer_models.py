"""Turns a folder of BERT's shape into what a peer runs: python peer_models.py PEER FOLDER OUT [CALIBRATION].

From token ids to mean-pooled vectors, from float32 weights; a file `made` says that all of it is there. CALIBRATION, a
JSON file with lists of token ids, is what static quantisation sees in place of random ids.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lengths
import torch
from engines import minilm
from torch import Tensor, nn

SAMPLE = 64  # sequences that static quantisation sees
FAR = -10_000.0  # added to a score that must not count


class Padded(nn.Module):
    """Tokens and mask [sequences, longest] to mean-pooled vectors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """The mean of the hidden states where the mask is 1."""
        rows: Tensor = self.model(input_ids=tokens, attention_mask=self.added(mask)).last_hidden_state
        real = mask[:, :, None].float()
        return (rows * real).sum(1) / real.sum(1)

    def added(self, mask: Tensor) -> Tensor:
        """Return the values that are added to the scores."""
        return (1.0 - mask[:, None, None, :].float()) * FAR


class Known(Padded):
    """A padded model whose mask has the form that ONNX Runtime's attention fusion recognises."""

    def added(self, mask: Tensor) -> Tensor:
        """Filled instead of multiplied."""
        absent = 1.0 - mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1).float()
        return absent.masked_fill(absent.bool(), FAR)


class Rows(nn.Module):
    """Tokens and positions [rows, width] and an added mask [rows, 1, width, width] to hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Hidden states of all places."""
        rows: Tensor = self.model(input_ids=tokens, position_ids=positions, attention_mask=mask).last_hidden_state
        return rows


def source(folder: str, attention: str) -> Any:
    """transformers' model, from which all are converted."""
    from transformers import BertModel

    model: Any = BertModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, add_pooling_layer=False
    )
    return model.eval()


def openvino(folder: str, out: Path) -> None:
    """Float models of padded batches and of packed rows; int8 by nncf's static quantisation, calibrated on samples."""
    import nncf
    import openvino

    model = source(folder, "sdpa")
    tokens = torch.ones(2, 16, dtype=torch.long)
    padded = openvino.convert_model(Padded(model), example_input=(tokens, tokens))
    padded.reshape({port: [-1, -1] for port in padded.inputs})
    rows = openvino.convert_model(Rows(model), example_input=(tokens, tokens, torch.zeros(2, 1, 16, 16)))
    rows.reshape(dict(zip(rows.inputs, ([-1, -1], [-1, -1], [-1, 1, -1, -1]), strict=True)))
    sample = [[torch.tensor([sequence]).numpy() for sequence in (array, [1] * len(array))] for array in calibration()]
    quantised = nncf.quantize(
        padded, nncf.Dataset(sample), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(sample)
    )
    for name, variant in (("padded", padded), ("rows", rows), ("padded-int8", quantised)):
        openvino.save_model(variant, out / f"{name}.xml", compress_to_fp16=False)


def calibration() -> list[list[int]]:
    """Sequences that no arm is timed on: those of the file that was named, else of the middle distribution."""
    if len(sys.argv) > 4:
        sequences: list[list[int]] = json.loads(Path(sys.argv[4]).read_text("utf-8"))
        return sequences
    return lengths.sequences("MIXED", SAMPLE, seed=1)


def onnxruntime(folder: str, out: Path) -> None:
    """The exported model with ONNX Runtime's transformer fusions, and its dynamic quantisation to int8."""
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    model = source(folder, "eager")
    tokens = torch.ones(2, 16, dtype=torch.long)
    names = ["tokens", "mask"]
    torch.onnx.export(
        Known(model),
        (tokens, tokens),
        str(out / "exported.onnx"),
        input_names=names,
        output_names=["vectors"],
        dynamic_axes={name: {0: "sequences", 1: "longest"} for name in names} | {"vectors": {0: "sequences"}},
        opset_version=17,
        dynamo=False,  # the fusions know this exporter's graphs
    )
    fused = optimizer.optimize_model(
        str(out / "exported.onnx"),
        model_type="bert",
        num_heads=model.config.num_attention_heads,
        hidden_size=model.config.hidden_size,
        optimization_options=FusionOptions("bert"),
    )
    counts = {name: count for name, count in fused.get_fused_operator_statistics().items() if count}
    assert "Attention" in counts, f"ONNX Runtime fused no attention, only {counts}: it does not know this graph"
    (out / "fused").write_text(", ".join(f"{count} {name}" for name, count in counts.items()), "utf-8")
    fused.save_model_to_file(str(out / "float32.onnx"))
    quantize_dynamic(
        out / "float32.onnx",
        out / "int8.onnx",
        weight_type=QuantType.QInt8,
        per_channel=True,
        extra_options={"DefaultTensorType": TensorProto.FLOAT},  # that of fused operators is not inferred
    )
    (out / "exported.onnx").unlink()


def ctranslate2(folder: str, out: Path) -> None:
    """The float32 model; its converter wants a tokenizer beside the weights, and a setting of old folders."""
    from ctranslate2.converters import TransformersConverter

    with tempfile.TemporaryDirectory() as temporary:
        whole = Path(temporary, "whole")
        shutil.copytree(minilm(), whole, ignore=shutil.ignore_patterns("*.safetensors"))
        for path in Path(folder).iterdir():
            if path.is_file():
                shutil.copy(path, whole)
        config = whole / "config.json"
        config_values = {"position_embedding_type": "absolute"}
        config.write_text(json.dumps(config_values | json.loads(config.read_text("utf-8"))), "utf-8")
        TransformersConverter(str(whole)).convert(str(out), force=True)


def main() -> None:
    """One peer's models."""
    peer, folder, destination = sys.argv[1:4]
    out = Path(destination)
    out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")  # of conversion: it is compared with the others before timing
    with torch.no_grad():
        {"openvino": openvino, "onnxruntime": onnxruntime, "ctranslate2": ctranslate2}[peer](folder, out)
    (out / "made").touch()


if __name__ == "__main__":
    main()
