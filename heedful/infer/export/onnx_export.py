"""Export: an encoder or a decoder with its head as an ONNX file, written only where it computes the same.

The graph is put together from ONNX operators by hand (see onnx_model.py) and not traced by torch.onnx: a tracer
would need a padded twin of the packed modules, with its own plans for attention, to run through, while the operators
are some thirty calls whose names are those of the formulas. So nothing private is used, names and shapes are ours to
say, and `onnx` alone is needed. What this could get wrong is found by measuring: the file's bytes are run by
onnxruntime on ragged batches, and compared with the packed model.
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
from heedful.checkpoint.bundle import cascade_refusal
from heedful.errors import HeedfulError
from heedful.infer.export.onnx_graph import Output
from heedful.infer.export.onnx_model import SEQUENCE, build_graph
from heedful.model import config as c
from heedful.packed import Packed

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, NodeArg

TOLERANCE = 1e-4  # of the largest number of an output; float32 in another order of sums takes some 1e-6
LENGTHS = ((17, 5, 1, 64), (300, 40))  # of sequences that are compared; the second batch is padded at the front
MOST = 8192  # places in tables of waves, where neither the model nor its tokenizer has a limit
LARGEST = 2**31 - 2**20  # bytes: a file of this kind is shorter than 2 GiB
FILE = "model.onnx"  # in a folder

Grid = Int[np.ndarray, "sequences places"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The exported file, and its largest difference from the model."""

    path: Path  # the .onnx file
    size: int  # bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    max_length: int | None  # tokens of a text; None: any number
    differences: Mapping[str, float]  # of each output, as a part of its largest number

    @property
    def difference(self) -> float:
        """The largest."""
        return max(self.differences.values())


def export(loaded: ModelBundle, output: str | Path, *, overwrite: bool = False) -> Exported:
    """Write a graph that takes padded batches: one file if `output` ends with .onnx, or else a folder.

    A folder has model.onnx, config.json and the tokenizer's files (and those of sentence-transformers). Where any
    output differs by more than TOLERANCE from the packed model's, nothing is written.
    """
    output = Path(output)
    if loaded.early_stages:
        raise cascade_refusal(loaded.source, "exported")
    _need("onnx")
    _need("onnxruntime")
    _check_free(output, overwrite)
    if {(parameter.dtype, parameter.device.type) for parameter in loaded.parameters()} != {(torch.float32, "cpu")}:
        raise HeedfulError(f"{loaded.source} is exported in float32 from the CPU: load it with dtype=torch.float32")
    limit = _limit(loaded.config.model, loaded.max_length)
    graph = build_graph(loaded, limit or 0)
    if graph.size > LARGEST:
        raise HeedfulError(f"{loaded.source} has {graph.size:,} bytes of weights: an ONNX file has at most {LARGEST:,}")
    config = write_config(loaded.config) | {"dtype": "float32"}
    data = graph.model(_notes(loaded, config, limit)).SerializeToString()
    training = loaded.training
    loaded.eval()
    try:
        differences = _differences(loaded, data, graph.outputs, limit)
    finally:
        loaded.train(training)
    if wrong := {name: part for name, part in differences.items() if not part <= TOLERANCE}:
        parts = ", ".join(f"{name} by {part:.1e}" for name, part in wrong.items())
        raise HeedfulError(
            f"the graph of {loaded.source} does not compute what the model does: {parts} of the largest number, and at "
            f"most {TOLERANCE:.0e} passes. Nothing was written; this is a fault of Heedful: report it with config.json"
        )
    path = _write(output, data, loaded, config, overwrite)
    names = {"inputs": tuple(graph.inputs), "outputs": tuple(graph.outputs)}
    return Exported(path=path, size=len(data), max_length=limit, differences=differences, **names)


def _need(package: str) -> None:
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        raise HeedfulError(f"{error.name} is not installed: pip install 'heedful[export]'") from None


def _check_free(out: Path, overwrite: bool) -> None:
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


def _limit(model: c.ModelConfig, limit: int | None) -> int | None:
    """How many tokens the graph takes at once."""
    stack = model.encoder or model.decoder
    relation = stack.relation if stack else None
    waves = isinstance(model.embedding.positions, c.Sinusoidal) or isinstance(relation, c.Rotary | c.Disentangled)
    return MOST if limit is None and waves else limit


def _notes(loaded: ModelBundle, config: Mapping[str, object], limit: int | None) -> dict[str, str]:
    """Return the metadata of the file as texts; lists and objects as JSON."""
    head = loaded.config.head
    notes: dict[str, object] = {"head": head.kind if head else "none", "max_length": limit, "config": config}
    if isinstance(head, c.Classes | c.TokenClasses):
        notes["labels"] = head.labels
    if isinstance(head, c.Classes):
        notes["problem_type"] = head.problem_type
    if loaded.thresholds:
        notes["thresholds"] = loaded.thresholds
    if loaded.tokenizer is not None:
        notes["tokenizer"] = loaded.tokenizer.fingerprint
    present = {name: value for name, value in notes.items() if value is not None}
    return {n: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for n, v in present.items()}


# -- the comparison -------------------------------------------------------------------------------------------


def _differences(
    loaded: ModelBundle, data: bytes, outputs: Mapping[str, Output], limit: int | None
) -> dict[str, float]:
    """The largest difference of each output from the packed model's, as a part of the latter's largest number."""
    session = _session(data)
    generator = np.random.default_rng(0)
    worst = dict.fromkeys(outputs, 0.0)
    for number, lengths in enumerate(LENGTHS):
        shown = _shown(lengths, limit, front=number == 1)
        embedding = loaded.config.model.embedding
        tokens = generator.integers(embedding.vocabulary, size=shown.shape)
        types = generator.integers(max(embedding.types, 1), size=shown.shape)
        feeds = dict(zip(("input_ids", "attention_mask", "token_type_ids"), (tokens, shown, types), strict=True))
        results = session.run(
            list(outputs),
            {input_value.name: _as(input_value, feeds[input_value.name]) for input_value in session.get_inputs()},
        )
        for (name, (_, shape)), exported, packed in zip(
            outputs.items(), results, _packed(loaded, tokens, types, shown), strict=True
        ):
            expected = packed.numpy()
            same = (exported[shown] if SEQUENCE in shape else exported).reshape(expected.shape)
            scale = max(float(np.abs(expected).max()), float(np.finfo(np.float32).tiny))
            worst[name] = float(np.maximum(worst[name], np.abs(same - expected).max() / scale))  # NaN stays
    return worst


def _session(data: bytes) -> InferenceSession:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def _shown(lengths: tuple[int, ...], limit: int | None, *, front: bool) -> Bool[np.ndarray, "sequences places"]:
    """Which places of a padded batch hold tokens."""
    cut = np.array([min(length, limit or length) for length in lengths])
    shown: Bool[np.ndarray, "sequences places"] = np.arange(cut.max()) < cut[:, None]
    return shown[:, ::-1] if front else shown


def _as(wanted: NodeArg, grid: Bool[np.ndarray, ...] | Int[np.ndarray, ...]) -> Int[np.ndarray, ...]:
    """A grid as this input takes it: two candidates for each question, where it has candidates."""
    numbers = grid.astype(np.int64)
    return numbers.reshape(-1, 2, numbers.shape[-1]) if len(wanted.shape) == 3 else numbers


def _packed(
    loaded: ModelBundle, tokens: Grid, types: Grid, shown: Bool[np.ndarray, "sequences places"]
) -> list[Tensor]:
    """Yield the outputs of the packed model for the tokens, one after the other."""
    ids, kinds = ([row[there].tolist() for row, there in zip(grid, shown, strict=True)] for grid in (tokens, types))
    batch, head = Packed.of(ids, kinds), loaded.config.head
    with torch.inference_mode():
        rows = loaded.hidden_states(batch)
        scores = [] if loaded.head is None else loaded.head(rows, batch)
    several = [scores] if isinstance(scores, Tensor) else list(scores)
    if isinstance(head, c.SpanScores):
        return list(several[0].unbind(-1))
    return [rows, *several] if isinstance(head, c.Pooled | c.SentenceEmbedding | None) else several


# -- writing --------------------------------------------------------------------------------------------------


def _write(out: Path, data: bytes, loaded: ModelBundle, config: Mapping[str, object], overwrite: bool) -> Path:
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
            if loaded.tokenizer is not None:
                loaded.tokenizer.save(folder, types=loaded.config.model.uses_token_types)
            if isinstance(loaded.config.head, c.SentenceEmbedding):
                sentence_transformers.write_modules(
                    folder, loaded.config.head, loaded.config.model.width, loaded.named_tensors()
                )
    except OSError as error:
        raise HeedfulError(f"{out} could not be written: {error.strerror or error}") from error
    return out / FILE
