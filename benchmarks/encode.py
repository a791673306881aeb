"""Measure how fast texts become sentence vectors, tokenizing included: `Engine.encode` against sentence-transformers.

The texts are of data sets, in the folder that HEEDFUL_DATA names: python benchmarks/encode.py
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import peers
import tokenizers
from engines import BOUNDS, OURS, SIZES, Job, fastest, minilm
from finetune_data import load
from forward import SAMPLE, against, fast_here, prepared, text
from harness import Arm, Prepared, measure, serve
from numpy.typing import NDArray
from report import RESULTS, check_destination, write

from heedful.data import LabelledExample
from heedful.infer.precision import Precision

ABOUT = """Normalised sentence vectors of all-MiniLM-L6-v2 from texts of SST-2's dev split and of IMDB's test split; the
first {longest} tokens of each are read. Tokenizing, sorting, packing or padding, and restoring the order are counted.
`heedful` is `Engine.encode`. `sentence-transformers` is `SentenceTransformer.encode` with PyTorch, in float32 or
bfloat16. ONNX Runtime and OpenVINO get token ids from `encode_batch_fast` of `tokenizers`, all texts in one call, are
fed with padded batches sorted by length, and their vectors are averaged and normalised by numpy, which is less work
than their backends in sentence-transformers do. OpenVINO's int8 model is calibrated on {calibration} texts of the train
splits. Every peer takes the batch size of {sizes} that is fastest on all
texts. Each arm is a process of its own, one runs at a time, and ratios are of real tokens a second, taken in each
round, to the fastest peer of that round. Before timing {sample} vectors are compared with the first arm's.
{unmeasured}"""
COUNTS = {"SST-2": 872, "IMDB": 128}  # texts of a round
LONGEST = 256  # tokens that the model reads, by its sentence_bert_config.json
QUICK = 12  # texts of a rehearsal
CALIBRATION = 64  # texts of the train split of each data set
Encode = Callable[[Sequence[str]], NDArray[np.float32]]


def texts_of(name: str, count: int) -> list[str]:
    """Return the first texts of a data set's held-out split, in its order."""
    examples = [example for example in load(name).held if isinstance(example, LabelledExample)]
    return [str(example.text) for example in examples[:count]]


def train_texts(name: str) -> list[str]:
    """Return texts for calibration, evenly spread over a data set's train split."""
    train = load(name).train
    examples = [train[index * len(train) // CALIBRATION] for index in range(CALIBRATION)]
    return [str(example.text) for example in examples if isinstance(example, LabelledExample)]


def prepare(job: Job) -> Prepared:
    """Prepare a job's arm: read its texts and load its engine."""
    texts = texts_of(job.distribution, job.count)
    encode, settings = ENGINES[job.engine](job, texts)
    return prepared(lambda: encode(texts), token_ids_of(texts), settings)


def tokenizer(longest: int = LONGEST) -> tokenizers.Tokenizer:
    """Return the model's tokenizer, which cuts texts to `longest` tokens and adds no padding."""
    backend = tokenizers.Tokenizer.from_file(f"{minilm()}/tokenizer.json")
    backend.no_padding()
    backend.enable_truncation(longest)
    return backend


def token_ids_of(texts: Sequence[str], longest: int = LONGEST) -> list[list[int]]:
    """Return the token ids that the model reads of each text, at most `longest`."""
    backend = tokenizer(longest)
    return [encoding.ids for encoding in backend.encode_batch_fast(list(texts))]


def heedful_encode(job: Job, texts: Sequence[str]) -> tuple[Encode, str]:
    """Return `Engine.encode` in the job's precision, and its settings as text."""
    import heedful

    engine = heedful.Engine(job.folder, precision=cast("Precision", job.precision))
    return engine.encode, f"{engine.token_budget} tokens a batch, {engine.plan.linears if engine.plan else 'plain'}"


def transformers_encode(job: Job, texts: Sequence[str]) -> tuple[Encode, str]:
    """Return `SentenceTransformer.encode` in the job's dtype with its fastest batch size, and that size as text."""
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(job.folder, device="cpu", model_kwargs={"dtype": getattr(torch, job.precision)})

    def encoder(size: int) -> Encode:
        return lambda batch: np.asarray(model.encode(list(batch), batch_size=size, show_progress_bar=False), np.float32)

    size = job.size or fastest({size: encoder(size) for size in SIZES}, texts)
    return encoder(size), f"{size} texts a batch"


def tokenized_encode(
    engine: Callable[[Job], tuple[Any, str]], job: Job, texts: Sequence[str], longest: int = LONGEST
) -> tuple[Encode, str]:
    """Return an engine of padded batches behind `tokenizers` with its fastest batch size, and its settings as text."""
    backend = tokenizer(longest)

    def encoder(size: int) -> tuple[Encode, str]:
        run, settings = engine(replace(job, size=size))

        def encode(batch: Sequence[str]) -> NDArray[np.float32]:
            token_ids = [encoding.ids for encoding in backend.encode_batch_fast(list(batch))]
            vectors = np.asarray(run(token_ids), np.float32)
            normalised: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
            return normalised

        return encode, settings

    if job.size:
        return encoder(job.size)
    encoders = {size: encoder(size) for size in SIZES}
    return encoders[fastest({size: encode for size, (encode, _) in encoders.items()}, texts)]


ENGINES: dict[str, Callable[[Job, Sequence[str]], tuple[Encode, str]]] = {
    "packed": heedful_encode,
    "sentence-transformers": transformers_encode,
    **{name: partial(tokenized_encode, engine) for name, engine in peers.ENGINES.items()},
}


def compared(best: Job, models: Path, available: Sequence[str]) -> dict[str, Job]:
    """Return all jobs by arm name; the first is the reference."""
    from heedful.device import auto_precision

    others = peers.jobs([name for name in available if name != "ctranslate2"], models, best)
    refused = ("bfloat16",) if auto_precision() == "float32" else ()  # by the engine, since float32 is faster
    return {
        "sentence-transformers float32": replace(best, engine="sentence-transformers", precision="float32"),
        "sentence-transformers bfloat16": replace(best, engine="sentence-transformers", precision="bfloat16"),
        **{name: job for name, job in others.items() if job.engine != "openvino rows"},
        **{f"heedful {name}": replace(best, engine="packed", precision=name) for name in OURS if name not in refused},
    }


def main() -> None:
    """Measure each data set, print its tables and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=list(COUNTS), default=list(COUNTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help=f"rehearse on {QUICK} texts, without a record")
    parser.add_argument("--output", type=Path, default=RESULTS, help="another folder for the record")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    peers.options(parser)
    options = parser.parse_args()
    if options.arm:
        return serve(lambda: prepare(Job(**json.loads(options.arm))))
    if not options.quick:
        check_destination(options.output)
    shown, data = [], []
    with tempfile.TemporaryDirectory() as temporary:
        models = (options.models or Path(temporary, "models")) / "minilm-texts"
        calibration = Path(temporary, "calibration.json")
        calibration.write_text(json.dumps(token_ids_of([text for name in COUNTS for text in train_texts(name)])))
        available, unmeasured = peers.make_models("minilm", options.peers, minilm(), models, calibration)
        for name in options.sets:
            count = QUICK if options.quick else COUNTS[name]
            size = SIZES[0] if options.quick else None
            best = Job(engine="packed", precision="float32", folder=minilm(), distribution=name, count=count, size=size)
            jobs = {arm: job for arm, job in compared(best, models, available).items() if fast_here(job)}
            rounds = 1 if options.quick else options.rounds
            table = measure(name, [arm(name, job) for name, job in jobs.items()], rounds)
            ratios = against(table, jobs)
            shown += [table.text(), text(ratios)]
            spreads = {
                heedful_arm: {group: asdict(spread) for group, spread in groups.items()}
                for heedful_arm, groups in ratios.items()
            }
            data.append(asdict(table) | {"times as fast as": spreads})
            print(*shown[-2:], sep="\n", flush=True)
    if not options.quick:
        sizes = ", ".join(map(str, SIZES))
        about = ABOUT.format(
            longest=LONGEST,
            sizes=sizes,
            sample=SAMPLE,
            unmeasured=unmeasured,
            calibration=len(COUNTS) * CALIBRATION,
        )
        print(write("encode-minilm", about, shown, data, options.output))


def arm(name: str, job: Job) -> Arm:
    """Return the arm that runs a job in a process."""
    return Arm(
        name=name,
        command=(sys.executable, __file__, "--arm", json.dumps(asdict(job))),
        is_heedful=job.engine == "packed",
        bound=BOUNDS[job.precision],
    )


if __name__ == "__main__":
    main()
