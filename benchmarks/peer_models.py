"""Convert a model of BERT's shape into a peer's format: python peer_models.py PEER FOLDER OUT [CALIBRATION].

peers.py runs this script. The models compute mean-pooled vectors from token ids, and have float32 or int8 weights. The
file `made` in the folder OUT is written last, when all models are complete. CALIBRATION is a JSON file with lists of
token ids for static quantisation; without it they are random.
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

SAMPLE = 64  # random sequences for static quantisation
FAR = -10_000.0  # added to the attention scores of padding, which get a weight of 0


class Padded(nn.Module):
    """A model that computes mean-pooled vectors from token ids and a mask, both [sequences, longest]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the mean of the hidden states where the mask is 1."""
        added = self.score_mask(mask)
        states: Tensor = self.model(input_ids=tokens, attention_mask=added).last_hidden_state
        real = mask[:, :, None].float()
        return (states * real).sum(1) / real.sum(1)

    def score_mask(self, mask: Tensor) -> Tensor:
        """Return the values that are added to the attention scores, [sequences, 1, 1, longest]."""
        return (1.0 - mask[:, None, None, :].float()) * FAR


class PaddedForFusion(Padded):
    """A padded model whose mask is computed in the way that ONNX Runtime's attention fusion recognises."""

    def score_mask(self, mask: Tensor) -> Tensor:
        """Return the values that are added to the attention scores, [sequences, 1, longest, longest]."""
        absent = 1.0 - mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1).float()
        return absent.masked_fill(absent.bool(), FAR)


class Rows(nn.Module):
    """A model that computes hidden states from tokens and positions [rows, width] and a mask [rows, 1, width, width].

    The mask is added to the attention scores.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return the hidden states of all tokens, padding included."""
        states: Tensor = self.model(input_ids=tokens, position_ids=positions, attention_mask=mask).last_hidden_state
        return states


def source(folder: str, attention: str) -> Any:
    """Load transformers' model with the given attention implementation."""
    from transformers import BertModel

    model: Any = BertModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, add_pooling_layer=False
    )
    return model.eval()


def openvino(folder: str, out: Path) -> None:
    """Write float models for padded batches and for packed rows, and an int8 model by nncf's static quantisation."""
    import nncf
    import openvino

    model = source(folder, "sdpa")
    tokens = torch.ones(2, 16, dtype=torch.long)
    padded = openvino.convert_model(Padded(model), example_input=(tokens, tokens))
    padded.reshape({port: [-1, -1] for port in padded.inputs})
    rows = openvino.convert_model(Rows(model), example_input=(tokens, tokens, torch.zeros(2, 1, 16, 16)))
    rows.reshape(dict(zip(rows.inputs, ([-1, -1], [-1, -1], [-1, 1, -1, -1]), strict=True)))
    inputs = []
    for token_ids in calibration():
        mask = [1] * len(token_ids)
        inputs.append([torch.tensor([token_ids]).numpy(), torch.tensor([mask]).numpy()])
    quantised = nncf.quantize(
        padded, nncf.Dataset(inputs), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(inputs)
    )
    for name, variant in (("padded", padded), ("rows", rows), ("padded-int8", quantised)):
        openvino.save_model(variant, out / f"{name}.xml", compress_to_fp16=False)


def calibration() -> list[list[int]]:
    """Return token ids for static quantisation: those of the file CALIBRATION, or random ones."""
    if len(sys.argv) > 4:
        sequences: list[list[int]] = json.loads(Path(sys.argv[4]).read_text("utf-8"))
        return sequences
    return lengths.sequences("MIXED", SAMPLE, seed=1)


def onnxruntime(folder: str, out: Path) -> None:
    """Write the exported model with ONNX Runtime's transformer fusions, and its dynamic quantisation to int8."""
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    model = source(folder, "eager")
    tokens = torch.ones(2, 16, dtype=torch.long)
    names = ["tokens", "mask"]
    torch.onnx.export(
        PaddedForFusion(model),
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
        extra_options={"DefaultTensorType": TensorProto.FLOAT},  # types of fused operators are not inferred
    )
    (out / "exported.onnx").unlink()


def ctranslate2(folder: str, out: Path) -> None:
    """Write the float32 model.

    The converter needs a tokenizer beside the weights, and `position_embedding_type` in the config, which new versions
    of transformers do not write.
    """
    from ctranslate2.converters import TransformersConverter

    with tempfile.TemporaryDirectory() as temporary:
        complete = Path(temporary, "whole")
        shutil.copytree(minilm(), complete, ignore=shutil.ignore_patterns("*.safetensors"))
        for path in Path(folder).iterdir():
            if path.is_file():
                shutil.copy(path, complete)
        config_file = complete / "config.json"
        config = {"position_embedding_type": "absolute"} | json.loads(config_file.read_text("utf-8"))
        config_file.write_text(json.dumps(config), "utf-8")
        TransformersConverter(str(complete)).convert(str(out), force=True)


def main() -> None:
    """Write one peer's models."""
    peer, folder, destination = sys.argv[1:4]
    out = Path(destination)
    out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")  # converters warn about much; harness.py compares the models' results
    with torch.no_grad():
        {"openvino": openvino, "onnxruntime": onnxruntime, "ctranslate2": ctranslate2}[peer](folder, out)
    (out / "made").touch()


if __name__ == "__main__":
    main()
