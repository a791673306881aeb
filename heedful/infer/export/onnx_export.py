"""Export of an encoder or a decoder with its head to ONNX; the file is written only if it computes the same outputs.

onnx_model.py builds the graph from ONNX operators. Heedful's modules read sequences end to end, without padding;
torch.onnx could only trace a second, padded implementation. Building the graph directly takes about thirty operators,
needs no private API of PyTorch, and depends on `onnx` only.
The graph is tested before it is written: onnxruntime runs the bytes of the file on batches of sequences with different
lengths, and the outputs are compared with those of the packed model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from heedful.atomic_io import atomic_path, make_folder, write_synced
from heedful.checkpoint import ModelBundle, sentence_transformers, write_config
from heedful.checkpoint.atomic_folder import atomic_folder
from heedful.checkpoint.bundle import cascade_refusal, pruned_refusal
from heedful.errors import HeedfulError
from heedful.infer.export.onnx_graph import Output
from heedful.infer.export.onnx_model import SEQUENCE, build_graph
from heedful.model.config import (
    Classes,
    Disentangled,
    ModelConfig,
    Pooled,
    Rotary,
    SentenceEmbedding,
    Sinusoidal,
    SpanScores,
    TokenClasses,
)
from heedful.packed import Packed

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, NodeArg

# maximum accepted difference relative to the largest absolute value of the model's output; other orders of float32 sums
# cause differences of 1e-6
TOLERANCE = 1e-4
# tokens of the sequences of two batches to compare; the second is padded left. Each batch has an even number of
# sequences, since multiple choice takes them as questions with two candidates
LENGTHS = ((17, 5, 1, 64), (300, 40))
MAX_POSITIONS = 8192  # length of tables of positions if neither the model nor its tokenizer has a limit
MAX_BYTES = 2**31 - 2**20  # an ONNX file without external data must be smaller than 2 GiB
FILE = "model.onnx"  # name of the ONNX file in a folder

Grid = Int[np.ndarray, "sequences positions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The exported file, and the differences of its outputs from those of the model."""

    path: Path  # the .onnx file
    size: int  # bytes
    inputs: tuple[str, ...]  # names of the inputs
    outputs: tuple[str, ...]  # names of the outputs
    max_length: int | None  # maximum tokens of a text, or None without a limit
    # largest difference relative to the largest absolute value of the model's output, by name of the output
    differences: Mapping[str, float]

    @property
    def difference(self) -> float:
        """The largest of `differences`."""
        return max(self.differences.values())


def export(bundle: ModelBundle, output: str | Path, *, overwrite: bool = False) -> Exported:
    """Write a model as an ONNX graph for padded batches.

    Nothing is written if an output differs from the packed model's by more than TOLERANCE.

    Args:
        bundle: The model, in float32 on the CPU.
        output: A file that ends with .onnx; otherwise a folder for model.onnx, config.json, the files of the tokenizer
            and, for sentence embeddings, those of sentence-transformers.
        overwrite: Whether an existing file or folder may be replaced.

    Raises:
        HeedfulError: If the model cannot be exported, the graph's outputs differ, or the file cannot be written.
    """
    output = Path(output)
    if bundle.early_stages:
        raise cascade_refusal(bundle.source, "exported")
    if bundle.token_pruning is not None:
        raise pruned_refusal(bundle.source, "exported")
    _require("onnx")
    _require("onnxruntime")
    _check_replaceable(output, overwrite)
    if {(parameter.dtype, parameter.device.type) for parameter in bundle.parameters()} != {(torch.float32, "cpu")}:
        raise HeedfulError(
            f"{bundle.source} is exported in float32 from the CPU: load it with dtype=torch.float32 on the CPU"
        )
    limit = _limit(bundle.config.model, bundle.max_length)
    graph = build_graph(bundle, max_positions=limit or 0)  # 0: no tables of positions
    if graph.size > MAX_BYTES:
        raise HeedfulError(
            f"{bundle.source} has {graph.size:,} bytes of weights: an ONNX file has at most {MAX_BYTES:,}"
        )
    config = write_config(bundle.config) | {"dtype": "float32"}
    data = graph.to_model_proto(_metadata(bundle, config, limit)).SerializeToString()
    was_training = bundle.training
    bundle.eval()
    try:
        differences = _differences(bundle, data, graph.outputs, limit)
    finally:
        bundle.train(was_training)
    if too_large := {name: difference for name, difference in differences.items() if not difference <= TOLERANCE}:
        listed = ", ".join(f"{name} by {difference:.1e}" for name, difference in too_large.items())
        raise HeedfulError(
            f"the graph of {bundle.source} does not compute what the model does: {listed} relative to the largest "
            f"absolute value of the model's output, and {TOLERANCE:.0e} is allowed. Nothing was written; this is a "
            "fault of Heedful: report it with config.json"
        )
    path = _write(output, data, bundle, config, overwrite)
    names = {"inputs": tuple(graph.inputs), "outputs": tuple(graph.outputs)}
    return Exported(path=path, size=len(data), max_length=limit, differences=differences, **names)


def _require(package: str) -> None:
    """Raise a HeedfulError if a package is not installed."""
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        raise HeedfulError(f"{error.name} is not installed: pip install 'heedful[export]'") from None


def _check_replaceable(out: Path, overwrite: bool) -> None:
    """Raise a HeedfulError if the path exists and must not be replaced, or if model weights would be lost."""
    if overwrite and out.is_dir() and (weights := sorted(out.glob("*.safetensors")) + sorted(out.glob("*.bin"))):
        raise HeedfulError(
            f"{out} holds a model's weights ({weights[0].name}), which would be lost: give another folder, or "
            f"{out / FILE} to put the graph beside them"
        )
    if overwrite or not (out.exists() or out.is_symlink()) or (out.is_dir() and not any(out.iterdir())):
        return
    raise HeedfulError(
        f"{out} exists{' and is not empty' if out.is_dir() else ''}: give another name, or overwrite=True "
        "(on the command line --overwrite)"
    )


def _limit(model: ModelConfig, limit: int | None) -> int | None:
    """Return the maximum tokens of a text in the graph, or None without a limit.

    A model without a limit gets one in the graph if the graph has a table of its positions (sinusoids, rotary or
    disentangled).
    """
    stack = model.encoder or model.decoder
    relation = stack.relation if stack else None
    needs_table = isinstance(model.embedding.positions, Sinusoidal) or isinstance(relation, Rotary | Disentangled)
    return MAX_POSITIONS if limit is None and needs_table else limit


def _metadata(bundle: ModelBundle, config: Mapping[str, object], limit: int | None) -> dict[str, str]:
    """Return the metadata of the file by name; values other than strings are written as JSON."""
    head = bundle.config.head
    metadata: dict[str, object] = {"head": head.kind if head else "none", "max_length": limit, "config": config}
    if isinstance(head, Classes | TokenClasses):
        metadata["labels"] = head.labels
    if isinstance(head, Classes):
        metadata["problem_type"] = head.problem_type
    if bundle.thresholds:
        metadata["thresholds"] = bundle.thresholds
    if bundle.tokenizer is not None:
        metadata["tokenizer"] = bundle.tokenizer.fingerprint
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in metadata.items()
        if value is not None
    }


# -- the comparison -------------------------------------------------------------------------------------------


def _differences(
    bundle: ModelBundle, data: bytes, outputs: Mapping[str, Output], limit: int | None
) -> dict[str, float]:
    """Return each output's largest difference, relative to the largest absolute value of the packed model's output."""
    session = _session(data)
    generator = np.random.default_rng(0)
    largest = dict.fromkeys(outputs, 0.0)
    for number, lengths in enumerate(LENGTHS):
        mask = _attention_mask(lengths, limit, pad_left=number == 1)
        embedding = bundle.config.model.embedding
        tokens = generator.integers(embedding.vocabulary, size=mask.shape)
        types = generator.integers(max(embedding.types, 1), size=mask.shape)
        arrays = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": types}
        feeds = {node.name: _shaped_for(node, arrays[node.name]) for node in session.get_inputs()}
        exported_outputs = session.run(list(outputs), feeds)
        packed_outputs = _packed_outputs(bundle, tokens, types, mask)
        for (name, output), exported, packed in zip(outputs.items(), exported_outputs, packed_outputs, strict=True):
            expected = packed.numpy()
            without_padding = exported[mask] if SEQUENCE in output.shape else exported
            scale = max(float(np.abs(expected).max()), float(np.finfo(np.float32).tiny))
            difference = np.abs(without_padding.reshape(expected.shape) - expected).max() / scale
            largest[name] = float(np.maximum(largest[name], difference))  # np.maximum preserves NaN, unlike max()
    return largest


def _session(data: bytes) -> InferenceSession:
    """Return an onnxruntime session for the bytes of a file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def _attention_mask(
    lengths: tuple[int, ...], limit: int | None, *, pad_left: bool
) -> Bool[np.ndarray, "sequences positions"]:
    """Return a mask of the positions that hold tokens in a padded batch; lengths are reduced to the limit."""
    limited_lengths = np.array([min(length, limit or length) for length in lengths])
    mask: Bool[np.ndarray, "sequences positions"] = np.arange(limited_lengths.max()) < limited_lengths[:, None]
    return mask[:, ::-1] if pad_left else mask


def _shaped_for(node: NodeArg, grid: Bool[np.ndarray, ...] | Int[np.ndarray, ...]) -> Int[np.ndarray, ...]:
    """Return an array in the shape of a graph input; for multiple choice, with two candidates per question.

    The batches of LENGTHS have an even number of sequences, as this needs.
    """
    numbers = grid.astype(np.int64)
    return numbers.reshape(-1, 2, numbers.shape[-1]) if len(node.shape) == 3 else numbers


def _packed_outputs(
    bundle: ModelBundle, tokens: Grid, types: Grid, mask: Bool[np.ndarray, "sequences positions"]
) -> list[Tensor]:
    """Return the outputs of the packed model for the same tokens, in the order of the graph's outputs."""
    ids = [row[row_mask].tolist() for row, row_mask in zip(tokens, mask, strict=True)]
    type_ids = [row[row_mask].tolist() for row, row_mask in zip(types, mask, strict=True)]
    batch, head = Packed.of(ids, type_ids), bundle.config.head
    with torch.inference_mode():
        rows = bundle.hidden_states(batch)
        scores = [] if bundle.head is None else bundle.head(rows, batch)
    head_outputs = [scores] if isinstance(scores, Tensor) else list(scores)
    if isinstance(head, SpanScores):
        return list(head_outputs[0].unbind(-1))
    return [rows, *head_outputs] if isinstance(head, Pooled | SentenceEmbedding | None) else head_outputs


# -- writing --------------------------------------------------------------------------------------------------


def _write(out: Path, data: bytes, bundle: ModelBundle, config: Mapping[str, object], overwrite: bool) -> Path:
    """Write the ONNX file if `out` ends with .onnx, else a folder with it and the other files.

    Returns:
        The path of the ONNX file.
    """
    try:
        if out.suffix == ".onnx":
            make_folder(out.absolute().parent)
            with atomic_path(out) as part:
                write_synced(part, [data])
            return out
        with atomic_folder(out, overwrite=overwrite) as folder:
            write_synced(folder / FILE, [data])
            write_synced(
                folder / "config.json",
                [(json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()],
            )
            if bundle.tokenizer is not None:
                bundle.tokenizer.save(folder, types=bundle.config.model.uses_token_types)
            if isinstance(bundle.config.head, SentenceEmbedding):
                sentence_transformers.write_modules(
                    folder, bundle.config.head, bundle.config.model.width, bundle.named_tensors()
                )
    except OSError as error:
        raise HeedfulError(f"{out} could not be written: {error.strerror or error}") from error
    return out / FILE
