"""Measure how fast a masked language model is pre-trained on the CPU: packed rows against padded batches and blocks.

The data of a round are made by pretraining_data.py. gpu_arms.py imports `regrouped`.
"""

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
from training import ATTENTIONS, Epoch, load_peer, make_update

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
LAYERS, WIDTH, HEADS, INNER = 4, 256, 4, 1024  # BERT-Mini's shape
RATE = 1e-4  # learning rate
CHECKS = 3  # updates before timing, whose losses are compared
SIZES = (8, 16, 32, 64)  # sequences in one pass of a padded arm, from which the fastest is chosen
CASE = Case(row=1024, batch=4, steps=3)
QUICK = Case(row=512, batch=1, steps=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The work of an arm's process, which is sent as JSON on its command line."""

    engine: str
    precision: str
    data: str  # file of a Round
    vocabulary: int
    batch: int  # rows of a step
    timed: str  # folder of the model
    checked: str  # folder of the same model without dropout
    # whether steps have sequences of similar lengths, padded to the longest; otherwise they are padded to LENGTH
    grouped: bool = False
    size: int | None = None  # sequences in a pass of transformers; if None, the arm chooses the fastest
    attention: str | None = None  # implementation in transformers; if None, the arm chooses the faster one


def packed(job: Job, folder: str, data: Round) -> Epoch:
    """Return an epoch of Heedful's trainer, in a process that keeps freed memory as the command line does."""
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
    """Return an epoch of transformers' model in a plain PyTorch loop."""
    import torch

    from heedful.data.sampler import BatchSampler

    model = load_peer("AutoModelForMaskedLM", folder, job.attention)
    update = make_update(model, RATE)
    order = BatchSampler(num_samples=len(data.counts), batch_size=job.batch, seed=SEED)
    sequences_of_row = np.split(np.arange(len(data.lengths)), np.cumsum(data.counts)[:-1])  # indices of sequences
    inputs = torch.from_numpy(data.inputs).split(data.lengths.tolist())
    labels = torch.from_numpy(data.labels).split(data.lengths.tolist())
    masked_counts = [int((label >= 0).sum()) for label in labels]
    indices_of_steps = (
        np.concatenate([sequences_of_row[row] for row in order.plan(step).indices]).tolist() for step in count()
    )

    def pad(sequences: Sequence[Tensor], length: int, value: int) -> Tensor:
        result = torch.full((len(sequences), length), value)
        for row, sequence in enumerate(sequences):
            result[row, : len(sequence)] = sequence
        return result

    def mean_loss(indices: list[int]) -> Tensor:
        """Return the mean loss of the masked tokens of sequences, in one forward pass."""
        length = max(len(inputs[index]) for index in indices) if job.grouped else LENGTH
        with torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bfloat16"):
            loss: Tensor = model(
                input_ids=pad([inputs[index] for index in indices], length, PAD),
                attention_mask=pad([torch.ones_like(inputs[index]) for index in indices], length, 0),
                labels=pad([labels[index] for index in indices], length, -100),
            ).loss
        return loss.float()

    def step(batch: list[int]) -> float:
        """Update the model by the sequences of a step, in passes of `job.size` sequences; return the mean loss."""
        masked_in_step = sum(masked_counts[index] for index in batch)
        size = job.size or len(batch)
        total = 0.0
        for start in range(0, len(batch), size):
            indices = batch[start : start + size]
            masked_in_pass = sum(masked_counts[index] for index in indices)
            loss = mean_loss(indices) * (masked_in_pass / masked_in_step)
            loss.backward()
            total += loss.item()
        update()
        return total

    def epoch() -> list[float]:
        batches = [next(indices_of_steps) for _ in range(order.steps_per_epoch)]
        return [step(batch) for batch in (regrouped(batches, data.lengths) if job.grouped else batches)]

    return epoch


def regrouped(batches: Sequence[Sequence[int]], lengths: NDArray[np.int64]) -> list[list[int]]:
    """Regroup the indices into equally many batches of similar token counts and lengths, in random order."""
    indices = np.concatenate([*map(np.array, batches)])
    indices = indices[np.argsort(-lengths[indices], kind="stable")]
    ends = np.cumsum(lengths[indices])
    targets = [ends[-1] * index / len(batches) for index in range(1, len(batches))]
    groups = [group.tolist() for group in np.split(indices, np.searchsorted(ends, targets, side="right"))]
    random.Random(str(batches)).shuffle(groups)
    return groups


ENGINES: dict[str, Callable[[Job, str, Round], Epoch]] = {"packed": packed, "padded": padded}


def prepare(job: Job) -> Prepared:
    """Prepare a job's arm; its sample is the losses of CHECKS updates without dropout."""
    import torch

    data = Round.open(job.data)
    if job.engine == "packed":  # tokens as Heedful masks them; the digest is computed from these
        data = Round.of(data.samples(), objective(job.vocabulary))
    must_choose = job.engine == "padded" and None in (job.size, job.attention)
    if must_choose:
        job = fastest(job, data if job.grouped else data.first(job.batch))
    check = ENGINES[job.engine](job, job.checked, data.first(job.batch))
    check_losses = [loss for _ in range(CHECKS) for loss in check()]
    torch.manual_seed(SEED)
    choices = ""
    if job.attention:
        choices = f"{job.attention}, up to {job.size} a pass{' (the fastest)' if must_choose else ''}, "
    tokens, sequences = int(data.lengths.sum()), len(data.lengths)
    return Prepared(
        run=ENGINES[job.engine](job, job.timed, data),
        sample=lambda losses: [check_losses],
        tokens=tokens,
        sequences=sequences,
        inputs=data.digest(),
        settings=f"{choices}{sequences:,} sequences, {tokens:,} tokens a round, {torch.get_num_threads()} threads",
    )


def fastest(job: Job, data: Round) -> Job:
    """Return the job with the size, and then the attention, whose second epoch over the data takes the least time."""

    def seconds(job: Job) -> float:
        epoch = padded(job, job.timed, data)
        epoch()
        start = time.perf_counter()
        epoch()
        return time.perf_counter() - start

    times: dict[Job, float] = {}
    usual, *alternatives = ATTENTIONS
    sizes = [size for size, smaller in zip(SIZES, (0, *SIZES), strict=False) if smaller < len(data.lengths)]
    for size in sizes:
        candidate = replace(job, size=size, attention=usual)
        times[candidate] = seconds(candidate)
    best = min(times, key=times.__getitem__)
    for attention in alternatives:
        candidate = replace(best, attention=attention)
        times[candidate] = seconds(candidate)
    return min(times, key=times.__getitem__)


def arms(common: Job, block: str, *, fast: bool, quick: bool) -> list[Arm]:
    """Return all arms; the first is the reference.

    Args:
        common: The job of Heedful in float32, on windows.
        block: The file of a Round of blocks.
        fast: Whether the processor has instructions for bfloat16.
        quick: Whether peers take the usual settings, without finding out which are faster.
    """
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
    """Write two models with the same fresh weights and return their folders: with attention dropout, and without."""
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
    sequence_lengths = [length for sample in samples for length in np.diff(sample.bounds).tolist()]
    about = ABOUT.format(
        layers=LAYERS,
        width=WIDTH,
        heads=HEADS,
        inner=INNER,
        vocabulary=vocabulary,
        document=fmean(np.diff(texts.segments[texts.documents])),
        sentence=fmean(np.diff(texts.segments)),
        length=LENGTH,
        mean=fmean(sequence_lengths),
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
    """Measure the arms, print the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--attention-dropout", type=float, default=0.0, help="0.0, as in the main table, or BERT's 0.1")
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
