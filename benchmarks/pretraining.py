"""How fast a masked language model is pre-trained on the CPU: packed rows against padded batches and against blocks."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from harness import Arm, Bound, Prepared, measure, serve
from lengths import FIRST_WORD, VOCABULARY
from numpy.typing import NDArray
from pretraining_data import LENGTH, PAD, SEED, SHARE, Case, Round, blocks, corpus, objective, windows
from report import RESULTS, Table, check_destination, write
from training import ATTENTIONS, Epoch, mover, peer

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = """Masked language modelling with BERT-Mini's shape ({layers} layers, {width} wide, {heads} heads, inner
{inner}), fresh weights and a vocabulary of {vocabulary:,}, on random token ids. Documents have {document:.0f} tokens
on average and sentences {sentence:.0f}, both lognormal. `windows` are whole sentences of a document, up to {length}
tokens with [CLS] and [SEP]: {mean:.0f} on average. `blocks` are those of transformers' run_mlm and its group_texts:
[CLS] and [SEP] around each document, all documents end to end, cut every {length} tokens wherever that is, so that
there is nothing to pad and blocks reach across documents. All arms but those named take windows.
A step takes {tokens:,} real tokens (windows: in rows of {row:,} that they fill to at least {full:.0%}), a round
{steps} steps, in an order that all arms share; grouped arms cut the same round, sorted by length, into steps of about
as many tokens, shuffle those and pad each pass to its longest; `padded` is to {length}. {rate:.0%} of the tokens are
to be found, the same ones in every arm: they were drawn once, and peers read them; Heedful draws them again in every
step, which is counted, as are padding, packing and reading the loss of each step. Hidden dropout is 0, attention
dropout {attention}. AdamW (torch's fused kernel), rate {speed}, constant; decay 0.01 but for biases and norms; the
norm clipped to 1. bfloat16 is that of autocast; weights and moments are float32. Peers score all positions and take
the loss from their own model, as run_mlm does; several passes of a step are weighted by what is to be found in each,
so that the update is that of the whole step. They take the fastest of up to {sizes} sequences a pass and then the
faster of transformers' attentions ({attentions}), but for the first, which is what people run: a step in one pass.
Each arm is a process of its own, one runs at a time, and ratios are of real tokens a second, taken in each round, to
the fastest peer of that round. Before timing, every arm makes {checks} updates on the same step without dropout:
`difference` is the largest one between their losses and the first arm's, over the largest loss, and an arm beyond
{float32.difference} in float32 or {bfloat16.difference} in bfloat16 stops the run; blocks are compared with Heedful
in float32 on the same blocks. Heedful's processes keep freed memory, as its command line does; peers have the C
library's own settings."""
BOUNDS = {"float32": Bound(difference=1e-4, cosine=0.99999), "bfloat16": Bound(difference=0.01, cosine=0.9999)}
LAYERS, WIDTH, HEADS, INNER = 4, 256, 4, 1024
RATE, CHECKS = 1e-4, 3
SIZES = (8, 16, 32, 64)  # sequences in one pass of a padded arm, to choose from
CASE, QUICK = Case(row=1024, batch=4, steps=3), Case(row=512, batch=1, steps=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The job of an arm's process."""

    engine: str
    precision: str
    data: str  # a file with a Round
    vocabulary: int
    batch: int  # rows of a step
    timed: str  # the folder of the model
    checked: str  # of the same one without dropout
    grouped: bool = False  # sequences of like lengths in a step, padded to the longest; else all padded to LENGTH
    size: int | None = None  # sequences of a pass of transformers; None: try
    attention: str | None = None  # of transformers; None: try which is faster


def packed(job: Job, folder: str, data: Round) -> Epoch:
    """Heedful's trainer, in a process that keeps freed memory, as its command line does."""
    import heedful
    from heedful.train.memory import disable_malloc_trim
    from heedful.train.optim import AdamW, Constant
    from heedful.train.trainer import Trainer, TrainSettings

    disable_malloc_trim()
    settings = TrainSettings(
        max_steps=10**9,
        batch_size=job.batch,
        optimizer=AdamW(lr=RATE),
        schedule=Constant(),
        precision="bfloat16" if job.precision == "bfloat16" else "float32",
        seed=SEED,
    )
    trainer = Trainer(heedful.load(folder), objective(job.vocabulary), data.samples(), settings)
    return lambda: [trainer.train_step().loss for _ in range(trainer.order.steps_per_epoch)]


def padded(job: Job, folder: str, data: Round) -> Epoch:
    """transformers' model in a plain PyTorch loop."""
    import torch

    from heedful.data.sampler import BatchSampler

    model = peer("AutoModelForMaskedLM", folder, job.attention)
    move = mover(model, RATE)
    order = BatchSampler(num_samples=len(data.counts), batch_size=job.batch, seed=SEED)
    members = np.split(np.arange(len(data.lengths)), np.cumsum(data.counts)[:-1])  # the sequences of each row
    read, labels = (torch.from_numpy(array).split(data.lengths.tolist()) for array in (data.read, data.labels))
    asked = [int((label >= 0).sum()) for label in labels]
    turns = (np.concatenate([members[row] for row in order.plan(number).indices]).tolist() for number in count())

    def line(parts: Sequence[Tensor], width: int, empty: int) -> Tensor:
        lines = torch.full((len(parts), width), empty)
        for number, part in enumerate(parts):
            lines[number, : len(part)] = part
        return lines

    def step(batch: list[int]) -> float:
        whole, size, total = sum(asked[number] for number in batch), job.size or len(batch), 0.0
        for start in range(0, len(batch), size):
            part = batch[start : start + size]
            width = max(len(read[number]) for number in part) if job.grouped else LENGTH
            mask = line([torch.ones_like(read[number]) for number in part], width, 0)
            rows, wanted = (line([row[n] for n in part], width, no) for row, no in ((read, PAD), (labels, -100)))
            with torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bfloat16"):
                mean = model(input_ids=rows, attention_mask=mask, labels=wanted).loss
            loss = mean.float() * (sum(asked[number] for number in part) / whole)
            loss.backward()
            total += loss.item()
        move()
        return total

    def epoch() -> list[float]:
        batches = [next(turns) for _ in range(order.steps_per_epoch)]
        return [step(batch) for batch in (regrouped(batches, data.lengths) if job.grouped else batches)]

    return epoch


def regrouped(batches: Sequence[Sequence[int]], lengths: NDArray[np.int64]) -> list[list[int]]:
    """Regroup the numbers into as many batches, with similar token counts and lengths, in random order."""
    numbers = np.concatenate([*map(np.array, batches)])
    numbers = numbers[np.argsort(-lengths[numbers], kind="stable")]
    ends = np.cumsum(lengths[numbers])
    cuts = np.searchsorted(ends, [ends[-1] * place / len(batches) for place in range(1, len(batches))], side="right")
    sequences = [part.tolist() for part in np.split(numbers, cuts)]
    random.Random(str(batches)).shuffle(sequences)
    return sequences


ENGINES: dict[str, Callable[[Job, str, Round], Epoch]] = {"packed": packed, "padded": padded}


def prepare(job: Job) -> Prepared:
    """An arm, ready, after it has shown what it learns without dropout."""
    import torch

    data = Round.open(job.data)
    if job.engine == "packed":  # what is really drawn
        data = Round.of(data.samples(), objective(job.vocabulary))
    tried = job.engine == "padded" and None in (job.size, job.attention)
    if tried:
        job = fastest(job, data if job.grouped else data.first(job.batch))
    check = ENGINES[job.engine](job, job.checked, data.first(job.batch))
    learned = [loss for _ in range(CHECKS) for loss in check()]
    torch.manual_seed(SEED)
    how = f"{job.attention}, up to {job.size} a pass{' (the fastest)' if tried else ''}, " if job.attention else ""
    tokens, sequences = int(data.lengths.sum()), len(data.lengths)
    return Prepared(
        run=ENGINES[job.engine](job, job.timed, data),
        sample=lambda losses: [learned],
        tokens=tokens,
        sequences=sequences,
        inputs=data.digest(),
        settings=f"{how}{sequences:,} sequences, {tokens:,} tokens a round, {torch.get_num_threads()} threads",
    )


def fastest(job: Job, data: Round) -> Job:
    """With the size and then the attention that take the least time for these, after they were seen once."""

    def seconds(job: Job) -> float:
        epoch = padded(job, job.timed, data)
        epoch()
        start = time.perf_counter()
        epoch()
        return time.perf_counter() - start

    times: dict[Job, float] = {}
    usual, *others = ATTENTIONS
    for size in (size for size, smaller in zip(SIZES, (0, *SIZES), strict=False) if smaller < len(data.lengths)):
        tried = replace(job, size=size, attention=usual)
        times[tried] = seconds(tried)
    best = min(times, key=times.__getitem__)
    for attention in others:
        tried = replace(best, attention=attention)
        times[tried] = seconds(tried)
    return min(times, key=times.__getitem__)


def arms(common: Job, block: str, *, fast: bool, quick: bool) -> list[Arm]:
    """Every arm, the first is the reference; `block`: a file of blocks; `fast`: the processor has bfloat16 products."""
    usual = replace(common, engine="padded", size=SIZES[-1], attention=ATTENTIONS[0])
    best = usual if quick else replace(usual, size=None, attention=None)
    half = replace(best, precision="bfloat16")
    jobs = {
        "transformers float32, padded": usual,
        "transformers bfloat16, padded": half,
        "transformers bfloat16, grouped": replace(half, grouped=True),
        "transformers float32, blocks": replace(best, data=block),
        "transformers bfloat16, blocks": replace(half, data=block),
        "heedful float32, blocks": replace(common, data=block),
        "heedful float32": common,
    }
    if fast:
        jobs["heedful bfloat16"] = replace(common, precision="bfloat16")
    return [
        Arm(
            name=name,
            command=(sys.executable, __file__, "--arm", json.dumps(asdict(job))),
            is_heedful=job.engine == "packed",
            bound=BOUNDS[job.precision],
            like="heedful float32, blocks" if job.data == block else None,
        )
        for name, job in jobs.items()
    ]


def models(folder: Path, vocabulary: int, attention: float) -> tuple[str, str]:
    """Two folders with the same fresh weights: one with attention dropout, one without."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for name, rate in (("timed", attention), ("checked", 0.0)):
        config = transformers.BertConfig(
            vocab_size=vocabulary,
            num_hidden_layers=LAYERS,
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            intermediate_size=INNER,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=rate,
        )
        torch.manual_seed(SEED)
        transformers.BertForMaskedLM(config).save_pretrained(folder / name)
    return str(folder / "timed"), str(folder / "checked")


def compared(case: Case, vocabulary: int, attention: float, rounds: int, *, quick: bool) -> tuple[Table, str]:
    """Measure all arms; return the table and a description of the data."""
    import torch

    from heedful.device import resolve_dtype
    from heedful.objectives import packing

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        timed, checked = models(folder, vocabulary, attention)
        texts = corpus(4 * case.tokens, vocabulary)
        samples, drawn = windows(texts, case), objective(vocabulary)
        common = Job(
            engine="packed",
            precision="float32",
            data=Round.of(samples, drawn).save(folder / "windows.npz"),
            vocabulary=vocabulary,
            batch=case.batch,
            timed=timed,
            checked=checked,
        )
        block = Round.of(blocks(texts, case), drawn).save(folder / "blocks.npz")
        table = measure("mini", arms(common, block, fast=resolve_dtype("auto") == torch.bfloat16, quick=quick), rounds)
    row_lengths = [length for sample in samples for length in np.diff(sample.bounds).tolist()]
    about = ABOUT.format(
        layers=LAYERS,
        width=WIDTH,
        heads=HEADS,
        inner=INNER,
        vocabulary=vocabulary,
        document=fmean(np.diff(texts.segments[texts.documents])),
        sentence=fmean(np.diff(texts.segments)),
        length=LENGTH,
        mean=fmean(row_lengths),
        tokens=case.row * case.batch,
        row=case.row,
        full=packing.FULL,
        steps=case.steps,
        rate=SHARE,
        speed=RATE,
        attention=attention,
        checks=CHECKS,
        sizes=", ".join(map(str, SIZES)),
        attentions=" and ".join(ATTENTIONS),
        **BOUNDS,
    )
    return table, about


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--attention-dropout", type=float, default=0.0, help="0.0 is the main table, 0.1 the usual one")
    parser.add_argument("--rounds", type=int, default=5, help="at least 5, but for --quick")
    parser.add_argument("--quick", action="store_true", help=f"rehearse {QUICK.steps} small steps, without a record")
    parser.add_argument("--output", type=Path, help="another folder for the record")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        return serve(lambda: prepare(Job(**json.loads(options.arm))))
    if options.rounds < 1 or (options.rounds < 5 and not options.quick):
        parser.error(f"--rounds {options.rounds} are too few to say anything: give at least 5")
    if not 0 <= options.attention_dropout < 1:
        parser.error(f"--attention-dropout is {options.attention_dropout}: give a share from 0 to below 1")
    if options.vocabulary <= FIRST_WORD:
        parser.error(f"--vocabulary is {options.vocabulary}: words begin at {FIRST_WORD}, so give more")
    if options.output or not options.quick:
        check_destination(options.output or RESULTS)
    case = QUICK if options.quick else CASE
    table, about = compared(case, options.vocabulary, options.attention_dropout, options.rounds, quick=options.quick)
    print(table.text(), flush=True)
    if options.output or not options.quick:
        name = f"pretraining-{options.vocabulary}-{options.attention_dropout}"
        print(write(name, about, [table.text()], [asdict(table)], options.output or RESULTS))


if __name__ == "__main__":
    main()
