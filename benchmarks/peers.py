"""The peers that only answer: OpenVINO, ONNX Runtime and CTranslate2, each as its makers offer it, from one folder.

`peer_models.py` makes their models. What computes is chosen explicitly: OpenVINO takes its precision from
INFERENCE_PRECISION_HINT, CTranslate2 from compute_type, and ONNX Runtime from the model alone.
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
Spans = list[tuple[int, int]]  # of sequences in the rows of a batch, laid end to end
Sent = tuple[Array, ...]  # what a model is given
Infer = Callable[[Iterable[Sent]], list[Array]]  # what it returns for each batch, in order

NEEDS = {"openvino": ("openvino", "nncf"), "onnxruntime": ("onnxruntime", "onnx"), "ctranslate2": ("ctranslate2",)}
TITLES = {"openvino": "OpenVINO", "onnxruntime": "ONNX Runtime", "ctranslate2": "CTranslate2"}
OFFERS: dict[
    str, dict[str, tuple[str, tuple[str, ...]]]
] = {  # the engines of each peer, what they add to an arm's name, and the precisions that it has on a CPU
    "openvino": {
        "openvino latency": (", latency", ("float32", "bfloat16", "int8")),
        "openvino throughput": (", throughput", ("float32", "bfloat16", "int8")),
        "openvino rows": (", our packed rows", ("bfloat16",)),
    },
    "onnxruntime": {"onnxruntime": ("", ("float32", "int8"))},
    "ctranslate2": {"ctranslate2": ("", ("float32", "int8"))},
}
SEVERAL = ("openvino throughput", "openvino rows")  # engines for several sequences at once
SHAPES = ("minilm", "base")  # that peer_models.py can convert
WIDTHS = (64, 128, 256, 512)  # of packed rows
BUDGET = 4096  # places of a batch of packed rows


# -- which there are ------------------------------------------------------------------------------------------


def missing(peer: str) -> list[str]:
    """The packages that a peer needs and that are not installed."""
    return [name for name in NEEDS[peer] if importlib.util.find_spec(name) is None]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of scripts with these peers."""
    parser.add_argument("--peers", nargs="*", choices=list(NEEDS), default=list(NEEDS), help="default: all")
    parser.add_argument("--models", type=Path, help="keep their models in this folder, and take those that are there")


def made(
    shape: str, asked: Sequence[str], folder: str, models: Path, calibration: Path | None = None
) -> tuple[list[str], str]:
    """The peers whose models are there now, each made by a process of its own; and a sentence that names the others.

    Args:
        calibration: A JSON file with the token ids that static quantisation sees; None: random ones.
    """
    available, why = [], {}
    for peer, title in TITLES.items():
        if peer not in asked:
            why[title] = "was not asked for"
        elif shape not in SHAPES:
            why[title] = "takes BERT's shape only here"
        elif absent := missing(peer):
            why[title] = f"is not installed ({', '.join(absent)}): pip install 'heedful[bench]'"
        else:
            available.append(peer)
    unmeasured = f" Not measured: {'; '.join(f'{title} {reason}' for title, reason in why.items())}." if why else ""
    if why:
        print(unmeasured.strip(), file=sys.stderr, flush=True)
    for peer in available:
        if not (models / peer / "made").exists():
            print(f"making {TITLES[peer]}'s models", file=sys.stderr, flush=True)
            script = Path(__file__).with_name("peer_models.py")
            more = [str(calibration)] if calibration else []
            command = [sys.executable, str(script), peer, folder, str(models / peer), *more]
            subprocess.run(command, check=True, stdout=sys.stderr)
    return available, unmeasured


def jobs(peers: Iterable[str], models: Path, common: Job, *, alone: bool = False) -> dict[str, Job]:
    """Every arm of these peers, by name; `alone`: those that take one sequence at a time."""
    return {
        f"{TITLES[peer]} {precision}{mode}": replace(
            common, engine=engine, precision=precision, folder=str(models / peer)
        )
        for peer in peers
        for engine, (mode, precisions) in OFFERS[peer].items()
        if not alone or engine not in SEVERAL
        for precision in precisions
    }


def threads() -> int:
    """Return the number of threads that torch uses."""
    return int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)


# -- engines --------------------------------------------------------------------------------------------------


def openvino(job: Job, hint: str) -> tuple[Round, str]:
    """OpenVINO on padded batches, one after another (LATENCY), or as many at once as it likes (THROUGHPUT)."""
    infer, about = _openvino(job, "padded-int8" if job.precision == "int8" else "padded", hint)

    def every(batches: Iterable[Sequences]) -> Vectors:
        return np.concatenate(infer(pad(batch) for batch in batches))

    return in_batches(job, every, about)


def openvino_rows(job: Job) -> tuple[Round, str]:
    """OpenVINO fed with Heedful's packed rows, in the faster of its two modes; no stock peer, but what packing buys."""
    models = {hint: _openvino(job, "rows", hint) for hint in ("LATENCY", "THROUGHPUT")}

    def by(infer: Infer) -> Round:
        def run(sequences: Sequences) -> Vectors:
            batches = list(rows(sequences))
            outputs = infer(batch.sent for batch in batches)
            pairs = zip(outputs, batches, strict=True)
            vectors = [means(output.reshape(-1, output.shape[-1]), batch.spans) for output, batch in pairs]
            restored: Vectors = restore(np.concatenate(vectors), [batch.numbers for batch in batches])
            return restored

        return run

    ways = {hint: by(infer) for hint, (infer, _) in models.items()}
    hint = "LATENCY" if job.size else fastest(ways, lengths.sequences(job.distribution, job.count))
    shown = ", ".join(map(str, WIDTHS))
    return ways[hint], f"rows of {shown}, {BUDGET} places a batch, {models[hint][1]}"


def _openvino(job: Job, name: str, hint: str) -> tuple[Infer, str]:
    """A compiled model; beside int8 it computes in the precision that OpenVINO takes by itself for such a model."""
    import openvino

    precision = {"float32": {"INFERENCE_PRECISION_HINT": "f32"}, "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16"}}
    settings = {"PERFORMANCE_HINT": hint, "INFERENCE_NUM_THREADS": threads(), **precision.get(job.precision, {})}
    compiled = openvino.Core().compile_model(str(Path(job.folder) / f"{name}.xml"), "CPU", settings)
    properties = {what: compiled.get_property(what) for what in ("INFERENCE_PRECISION_HINT", "NUM_STREAMS")}
    about = f"{hint.lower()}, {properties['NUM_STREAMS']} streams, {properties['INFERENCE_PRECISION_HINT'].to_string()}"
    about += f", {compiled.get_property('INFERENCE_NUM_THREADS')} threads"
    if hint == "LATENCY":
        request = compiled.create_infer_request()
        return lambda batches: [request.infer(list(sent), share_inputs=True)[0] for sent in batches], about
    queue, results = openvino.AsyncInferQueue(compiled), {}

    def keep(request: Any, number: int) -> None:
        results[number] = request.get_output_tensor(0).data.copy()

    def infer(batches: Iterable[Sent]) -> list[Array]:
        results.clear()
        held = []  # a request reads them until it is done
        for number, sent in enumerate(batches):
            held.append(sent)
            queue.start_async(list(sent), number, share_inputs=True)
        queue.wait_all()
        return [results[number] for number in range(len(held))]

    queue.set_callback(keep)
    return infer, f"{about}, {len(queue)} requests"


def onnxruntime(job: Job) -> tuple[Round, str]:
    """ONNX Runtime, its transformer fusions made beforehand; int8 is its dynamic quantisation of the fused model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads()
    path = Path(job.folder) / f"{job.precision}.onnx"
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    fused = (Path(job.folder) / "fused").read_text("utf-8")

    def every(batches: Iterable[Sequences]) -> Vectors:
        sent = (dict(zip(("tokens", "mask"), pad(batch), strict=True)) for batch in batches)
        return np.concatenate([session.run(None, inputs)[0] for inputs in sent])

    return in_batches(job, every, f"fused {fused}, {threads()} threads")


def ctranslate2(job: Job) -> tuple[Round, str]:
    """CTranslate2's encoder, which leaves out padding by itself where it can; int8 weights are made at loading."""
    import ctranslate2

    encoder = ctranslate2.Encoder(job.folder, device="cpu", compute_type=job.precision, intra_threads=threads())

    def embed(sequences: Sequences) -> Vectors:
        tokens, mask = (array.astype(np.int32) for array in pad(sequences))
        counts = mask.sum(1, dtype=np.int32)
        view = ctranslate2.StorageView.from_array
        states = np.array(encoder.forward_batch(view(tokens), view(counts)).last_hidden_state)
        starts = range(0, tokens.size, tokens.shape[1])
        return means(states.reshape(-1, states.shape[-1]), [(a, a + n) for a, n in zip(starts, counts, strict=True)])

    def every(batches: Iterable[Sequences]) -> Vectors:
        return np.concatenate([embed(batch) for batch in batches])

    return in_batches(job, every, f"{encoder.compute_type}, {threads()} threads")


ENGINES: dict[str, Callable[[Job], tuple[Round, str]]] = {
    "openvino latency": partial(openvino, hint="LATENCY"),
    "openvino throughput": partial(openvino, hint="THROUGHPUT"),
    "openvino rows": openvino_rows,
    "onnxruntime": onnxruntime,
    "ctranslate2": ctranslate2,
}


# -- batches --------------------------------------------------------------------------------------------------


def pad(sequences: Sequences) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens and mask, [sequences, longest]."""
    tokens = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
    mask = np.zeros_like(tokens)
    for number, sequence in enumerate(sequences):
        tokens[number, : len(sequence)], mask[number, : len(sequence)] = sequence, 1
    return tokens, mask


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A batch of rows that several sequences share."""

    sent: Sent  # tokens and positions [rows, width], and the mask [rows, 1, width, width] that is added to scores
    spans: Spans  # of each sequence
    numbers: list[int]  # and which it is


def rows(sequences: Sequences) -> Iterator[Rows]:
    """All sequences, those of each width packed best-fit-decreasing; a batch is as narrow as its fullest row allows."""
    from heedful.nn.kernels import best_fit

    sizes = [len(sequence) for sequence in sequences]
    assert max(sizes) <= WIDTHS[-1]
    for width, narrower in zip(WIDTHS, (0, *WIDTHS), strict=False):
        lines = best_fit([number for number, size in enumerate(sizes) if narrower < size <= width], sizes, width)
        count = BUDGET // width
        for start in range(0, len(lines), count):
            several = lines[start : start + count]
            fullest = max(sum(sizes[number] for number in line) for line in several)
            yield _rows(sequences, several, min(width, -(-fullest // 16) * 16))


def _rows(sequences: Sequences, lines: Sequence[Sequence[int]], width: int) -> Rows:
    tokens = np.zeros((len(lines), width), np.int64)
    positions, owner = np.zeros_like(tokens), np.full(tokens.shape, -1, np.int32)
    spans, numbers = [], []
    for row, line in enumerate(lines):
        start = 0
        for number in line:
            stop = start + len(sequences[number])
            tokens[row, start:stop], owner[row, start:stop] = sequences[number], number
            positions[row, start:stop] = np.arange(stop - start)
            spans.append((row * width + start, row * width + stop))
            numbers.append(number)
            start = stop
    mask = np.where(owner[:, None, :, None] == owner[:, None, None, :], np.float32(0), np.float32(-1e4))
    return Rows(sent=(tokens, positions, mask), spans=spans, numbers=numbers)


def means(flat: Array, spans: Spans) -> Vectors:
    """The mean of the rows of each span, [spans, width]."""
    edges = np.array(spans)
    ends = edges.ravel()[: -1 if edges[-1, 1] == len(flat) else None]  # the last one may be open
    sums: Vectors = np.add.reduceat(flat, ends)[::2]
    counts = (edges[:, 1] - edges[:, 0])[:, None].astype(np.float32)
    return np.asarray(sums / counts, np.float32)
