"""The engines of inference libraries: OpenVINO, ONNX Runtime and CTranslate2, each as its makers offer it.

forward.py, latency.py and encode.py time them; `peer_models.py` makes their models. OpenVINO's precision is set by
INFERENCE_PRECISION_HINT and CTranslate2's by compute_type; ONNX Runtime's follows from the model.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lengths
import numpy as np
from engines import Job, Round, Sequences, fastest, in_batches, restore
from numpy.typing import NDArray

Array = NDArray[Any]
Vectors = NDArray[np.float32]
Spans = list[tuple[int, int]]  # start and stop of each sequence in the concatenated rows of a batch
Sent = tuple[Array, ...]  # the inputs of a model
Infer = Callable[[Iterable[Sent]], list[Array]]  # returns the output of each batch, in order

NEEDS = {"openvino": ("openvino", "nncf"), "onnxruntime": ("onnxruntime", "onnx"), "ctranslate2": ("ctranslate2",)}
TITLES = {"openvino": "OpenVINO", "onnxruntime": "ONNX Runtime", "ctranslate2": "CTranslate2"}
# for each engine of each peer: the end of its arms' names, and its precisions on a CPU
OFFERS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "openvino": {
        "openvino latency": (", latency", ("float32", "bfloat16", "int8")),
        "openvino throughput": (", throughput", ("float32", "bfloat16", "int8")),
        "openvino rows": (", our packed rows", ("bfloat16",)),
    },
    "onnxruntime": {"onnxruntime": ("", ("float32", "int8"))},
    "ctranslate2": {"ctranslate2": ("", ("float32", "int8"))},
}
SEVERAL = ("openvino throughput", "openvino rows")  # engines that are made for several sequences at once
SHAPES = ("minilm", "base")  # models that peer_models.py can convert
WIDTHS = (64, 128, 256, 512)  # tokens of packed rows; a sequence is in a row of the least width that it fits into
BUDGET = 4096  # tokens of a batch of packed rows, padding included


# -- available peers ------------------------------------------------------------------------------------------


def missing(peer: str) -> list[str]:
    """Return the packages that a peer needs and that are not installed."""
    return [name for name in NEEDS[peer] if importlib.util.find_spec(name) is None]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose peers to the options of a script."""
    parser.add_argument("--peers", nargs="*", choices=list(NEEDS), default=list(NEEDS), help="default: all")
    parser.add_argument("--models", type=Path, help="folder that keeps the peers' models for the next run")


def make_models(
    shape: str, requested: Sequence[str], folder: str, models: Path, calibration: Path | None = None
) -> tuple[list[str], str]:
    """Make the models of the peers that are requested and available, unless `models` has them.

    Args:
        shape: The name of the model.
        requested: The peers that the user asked for.
        folder: The folder of the model that is converted.
        models: The folder of the peers' models.
        calibration: A JSON file with token ids for static quantisation. If None, they are random.

    Returns:
        The available peers, and a sentence that names the others and why they are not measured.
    """
    available, reasons = [], {}
    for peer, title in TITLES.items():
        if peer not in requested:
            reasons[title] = "was not asked for"
        elif shape not in SHAPES:
            reasons[title] = "takes BERT's shape only here"
        elif absent := missing(peer):
            reasons[title] = f"is not installed ({', '.join(absent)}): pip install 'heedful[bench]'"
        else:
            available.append(peer)
    unmeasured = ""
    if reasons:
        unmeasured = f" Not measured: {'; '.join(f'{title} {reason}' for title, reason in reasons.items())}."
        print(unmeasured.strip(), file=sys.stderr, flush=True)
    for peer in available:
        if not (models / peer / "made").exists():
            print(f"making {TITLES[peer]}'s models", file=sys.stderr, flush=True)
            script = Path(__file__).with_name("peer_models.py")
            command = [sys.executable, str(script), peer, folder, str(models / peer)]
            if calibration:
                command.append(str(calibration))
            subprocess.run(command, check=True, stdout=sys.stderr)
    return available, unmeasured


def jobs(peers: Iterable[str], models: Path, common: Job, *, alone: bool = False) -> dict[str, Job]:
    """Return the jobs of these peers by arm name.

    Args:
        peers: The names of the peers.
        models: The folder of the peers' models.
        common: The job without a peer's engine, precision and folder.
        alone: Whether to leave out engines that are made for several sequences at once.
    """
    jobs_by_arm = {}
    for peer in peers:
        for engine, (mode, precisions) in OFFERS[peer].items():
            if alone and engine in SEVERAL:
                continue
            for precision in precisions:
                job = replace(common, engine=engine, precision=precision, folder=str(models / peer))
                jobs_by_arm[f"{TITLES[peer]} {precision}{mode}"] = job
    return jobs_by_arm


def threads() -> int:
    """Return the number of threads that torch uses by default, which peers get too."""
    return int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)


# -- engines --------------------------------------------------------------------------------------------------


def openvino(job: Job, hint: str) -> tuple[Round, str]:
    """Return OpenVINO on padded batches, one after another (LATENCY) or several at once (THROUGHPUT)."""
    infer, about = _openvino(job, "padded-int8" if job.precision == "int8" else "padded", hint)

    def embed_batches(batches: Iterable[Sequences]) -> Vectors:
        return np.concatenate(infer(pad(batch) for batch in batches))

    return in_batches(job, embed_batches, about)


def openvino_rows(job: Job) -> tuple[Round, str]:
    """Return OpenVINO on Heedful's packed rows, in the faster of its two modes.

    This arm shows what packing gains without Heedful's kernels.
    """
    models = {hint: _openvino(job, "rows", hint) for hint in ("LATENCY", "THROUGHPUT")}

    def round_of(infer: Infer) -> Round:
        def run(sequences: Sequences) -> Vectors:
            batches = list(rows(sequences))
            outputs = infer(batch.sent for batch in batches)
            pairs = zip(outputs, batches, strict=True)
            vectors = [means(output.reshape(-1, output.shape[-1]), batch.spans) for output, batch in pairs]
            restored: Vectors = restore(np.concatenate(vectors), [batch.indices for batch in batches])
            return restored

        return run

    ways = {hint: round_of(infer) for hint, (infer, _) in models.items()}
    hint = "LATENCY" if job.size else fastest(ways, lengths.sequences(job.distribution, job.count))
    widths = ", ".join(map(str, WIDTHS))
    return ways[hint], f"rows of {widths}, {BUDGET} places a batch, {models[hint][1]}"


def _openvino(job: Job, name: str, hint: str) -> tuple[Infer, str]:
    """Compile a model, and return it with its settings as text.

    Args:
        job: The job, with the folder of the model. With int8 weights, the precision of activations is OpenVINO's
            default.
        name: The name of the model's file.
        hint: LATENCY to infer one batch after another, or THROUGHPUT to infer several at once.
    """
    import openvino

    settings: dict[str, Any] = {"PERFORMANCE_HINT": hint, "INFERENCE_NUM_THREADS": threads()}
    if job.precision != "int8":
        settings["INFERENCE_PRECISION_HINT"] = {"float32": "f32", "bfloat16": "bf16"}[job.precision]
    compiled = openvino.Core().compile_model(str(Path(job.folder) / f"{name}.xml"), "CPU", settings)
    streams = compiled.get_property("NUM_STREAMS")
    precision = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    about = f"{hint.lower()}, {streams} streams, {precision}, {compiled.get_property('INFERENCE_NUM_THREADS')} threads"
    if hint == "LATENCY":
        request = compiled.create_infer_request()
        return lambda batches: [request.infer(list(sent), share_inputs=True)[0] for sent in batches], about
    queue = openvino.AsyncInferQueue(compiled)
    results: dict[int, Array] = {}

    def store(request: Any, index: int) -> None:
        results[index] = request.get_output_tensor(0).data.copy()

    def infer(batches: Iterable[Sent]) -> list[Array]:
        results.clear()
        references = []  # a request reads its shared inputs until it is done
        for index, sent in enumerate(batches):
            references.append(sent)
            queue.start_async(list(sent), index, share_inputs=True)
        queue.wait_all()
        return [results[index] for index in range(len(references))]

    queue.set_callback(store)
    return infer, f"{about}, {len(queue)} requests"


def onnxruntime(job: Job) -> tuple[Round, str]:
    """Return ONNX Runtime on padded batches; its transformer fusions and its dynamic int8 are in the model's file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads()
    path = Path(job.folder) / f"{job.precision}.onnx"
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    fused = (Path(job.folder) / "fused").read_text("utf-8")

    def embed_batches(batches: Iterable[Sequences]) -> Vectors:
        inputs_of_batches = (dict(zip(("tokens", "mask"), pad(batch), strict=True)) for batch in batches)
        return np.concatenate([session.run(None, inputs)[0] for inputs in inputs_of_batches])

    return in_batches(job, embed_batches, f"fused {fused}, {threads()} threads")


def ctranslate2(job: Job) -> tuple[Round, str]:
    """Return CTranslate2's encoder, which leaves out padding where it can and quantises to int8 when it loads."""
    import ctranslate2

    encoder = ctranslate2.Encoder(job.folder, device="cpu", compute_type=job.precision, intra_threads=threads())

    def embed(sequences: Sequences) -> Vectors:
        tokens, mask = (array.astype(np.int32) for array in pad(sequences))
        counts = mask.sum(1, dtype=np.int32)
        view = ctranslate2.StorageView.from_array
        states = np.array(encoder.forward_batch(view(tokens), view(counts)).last_hidden_state)
        starts = range(0, tokens.size, tokens.shape[1])
        spans = [(start, start + count) for start, count in zip(starts, counts, strict=True)]
        return means(states.reshape(-1, states.shape[-1]), spans)

    def embed_batches(batches: Iterable[Sequences]) -> Vectors:
        return np.concatenate([embed(batch) for batch in batches])

    return in_batches(job, embed_batches, f"{encoder.compute_type}, {threads()} threads")


ENGINES: dict[str, Callable[[Job], tuple[Round, str]]] = {
    "openvino latency": partial(openvino, hint="LATENCY"),
    "openvino throughput": partial(openvino, hint="THROUGHPUT"),
    "openvino rows": openvino_rows,
    "onnxruntime": onnxruntime,
    "ctranslate2": ctranslate2,
}


# -- batches --------------------------------------------------------------------------------------------------


def pad(sequences: Sequences) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the padded token ids and their mask, [sequences, longest]."""
    tokens = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
    mask = np.zeros_like(tokens)
    for index, sequence in enumerate(sequences):
        tokens[index, : len(sequence)] = sequence
        mask[index, : len(sequence)] = 1
    return tokens, mask


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A batch of rows with several sequences each."""

    sent: Sent  # tokens and positions [rows, width], and the mask [rows, 1, width, width] that is added to scores
    spans: Spans  # of all sequences, over the concatenated rows
    indices: list[int]  # index of the sequence in each span


def rows(sequences: Sequences) -> Iterator[Rows]:
    """Pack sequences into rows by best-fit decreasing, and yield batches of rows.

    The rows of a batch are as narrow as its fullest row allows, in steps of 16 tokens.
    """
    from heedful.nn.kernels import best_fit

    sizes = [len(sequence) for sequence in sequences]
    assert max(sizes) <= WIDTHS[-1]
    for width, narrower in zip(WIDTHS, (0, *WIDTHS), strict=False):
        lines = best_fit([index for index, size in enumerate(sizes) if narrower < size <= width], sizes, width)
        count = BUDGET // width
        for start in range(0, len(lines), count):
            batch = lines[start : start + count]
            fullest = max(sum(sizes[index] for index in line) for line in batch)
            yield _rows(sequences, batch, min(width, -(-fullest // 16) * 16))


def _rows(sequences: Sequences, lines: Sequence[Sequence[int]], width: int) -> Rows:
    """Lay out sequences in rows.

    Args:
        sequences: All sequences.
        lines: The indices of the sequences of each row.
        width: Tokens of a row, padding included.
    """
    tokens = np.zeros((len(lines), width), np.int64)
    positions = np.zeros_like(tokens)
    sequence_of_token = np.full(tokens.shape, -1, np.int32)
    spans, indices = [], []
    for row, line in enumerate(lines):
        start = 0
        for index in line:
            stop = start + len(sequences[index])
            tokens[row, start:stop] = sequences[index]
            sequence_of_token[row, start:stop] = index
            positions[row, start:stop] = np.arange(stop - start)
            spans.append((row * width + start, row * width + stop))
            indices.append(index)
            start = stop
    sees = sequence_of_token[:, None, :, None] == sequence_of_token[:, None, None, :]
    mask = np.where(sees, np.float32(0), np.float32(-1e4))
    return Rows(sent=(tokens, positions, mask), spans=spans, indices=indices)


def means(flat: Array, spans: Spans) -> Vectors:
    """Return the mean vector of each span, [spans, hidden size]."""
    edges = np.array(spans)
    ends = edges.ravel()[: -1 if edges[-1, 1] == len(flat) else None]  # reduceat takes no edge at the end of the array
    sums: Vectors = np.add.reduceat(flat, ends)[::2]
    counts = (edges[:, 1] - edges[:, 0])[:, None].astype(np.float32)
    return np.asarray(sums / counts, np.float32)
