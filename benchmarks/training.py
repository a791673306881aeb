"""Measure how fast a classifier is trained on the CPU: packed batches (Heedful) against padded ones (transformers).

The model is all-MiniLM-L6-v2 with a new head. pretraining.py and gpu_arms.py import `load_peer` and `make_update`.
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
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lengths
from engines import minilm
from harness import Arm, Bound, Prepared, measure, serve
from report import RESULTS, Table, check_destination, write

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = """{title}: all-MiniLM-L6-v2 with a two-label head, all weights trained, on random token ids and labels.
A step takes {batch} sequences; hidden dropout is {hidden}, attention dropout {attention}. AdamW (torch's fused kernel),
rate {rate}, constant; decay 0.01 but for biases and norms; the norm clipped to 1. A round is {steps} steps and takes
every sequence once, in an order that all arms share; grouped arms cut the same round, sorted by length, into batches
and shuffle those. Padding or packing and reading the loss of each step are counted, tokenising is not. bfloat16 is that
of autocast, and left out where the processor cannot multiply it; weights and moments are float32. Each arm is a process
of its own, one runs at a time, and ratios are of real tokens a second, taken in each round, to the fastest peer of that
round. Before timing, every arm makes {checks} updates on the same batch without dropout: `difference` is the largest
one between their losses and the first arm's, over the largest loss, and an arm beyond {float32.difference} in float32
or {bfloat16.difference} in bfloat16 stops the run. Peers take the faster of transformers' attentions ({attentions}),
but for the first, which is what people run.
Heedful's processes keep freed memory, as its command line does; peers have the C library's own settings."""
BOUNDS = {"float32": Bound(difference=1e-5, cosine=0.99999), "bfloat16": Bound(difference=0.002, cosine=0.9999)}
ATTENTIONS = ("sdpa", "eager")
LABELS = ("no", "yes")
HIDDEN = 0.1  # dropout of hidden states
RATE = 2e-5  # learning rate
SEED = 1
CHECKS = 4  # updates before timing, whose losses are compared


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The size of a round; its lengths are the distribution of the same name in lengths.py."""

    batch: int  # sequences of a step
    steps: int  # steps of a round, which takes the fastest arm some seconds


CASES = {"sst2": Case(batch=32, steps=48), "mean150": Case(batch=16, steps=16)}
QUICK = Case(batch=4, steps=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The work of an arm's process, which is sent as JSON on its command line."""

    engine: str
    precision: str
    case: str
    batch: int
    steps: int
    timed: str  # folder of the model
    checked: str  # folder of the same model without dropout
    grouped: bool = False  # whether batches have similar lengths
    attention: str | None = None  # implementation in transformers; if None, the arm chooses the faster one


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """The training examples."""

    ids: Sequence[Sequence[int]]
    labels: Sequence[int]

    def first(self, count: int) -> Examples:
        """Return the first examples."""
        return Examples(ids=self.ids[:count], labels=self.labels[:count])


Epoch = Callable[[], list[float]]  # trains once over the examples and returns the loss of each step


def packed(job: Job, folder: str, data: Examples) -> Epoch:
    """Return an epoch of Heedful's trainer, in a process that keeps freed memory as the command line does."""
    import heedful
    from heedful.objectives import Sample
    from heedful.tasks.classify import Classify
    from heedful.train.memory import disable_malloc_trim
    from heedful.train.optim import AdamW, Constant
    from heedful.train.trainer import Trainer, TrainSettings

    disable_malloc_trim()
    loaded = heedful.load(folder)
    assert loaded.tokenizer is not None
    samples = [
        Sample.of([ids], [[0] * len(ids)], target=label) for ids, label in zip(data.ids, data.labels, strict=True)
    ]
    settings = TrainSettings(
        max_steps=10**9,
        batch_size=job.batch,
        optimizer=AdamW(lr=RATE),
        schedule=Constant(),
        precision="bfloat16" if job.precision == "bfloat16" else "float32",
        seed=SEED,
    )
    trainer = Trainer(loaded, Classify(tokenizer=loaded.tokenizer, limit=None, labels=LABELS), samples, settings)
    return lambda: [trainer.train_step().loss for _ in range(trainer.order.steps_per_epoch)]


def padded(job: Job, folder: str, data: Examples) -> Epoch:
    """Return an epoch of transformers' model in a plain PyTorch loop."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.utils.rnn import pad_sequence

    from heedful.data.sampler import BatchSampler

    model = load_peer("AutoModelForSequenceClassification", folder, job.attention)
    update = make_update(model, RATE)
    order = BatchSampler(num_samples=len(data.ids), batch_size=job.batch, seed=SEED)
    tokens = [torch.tensor(ids) for ids in data.ids]
    labels = torch.tensor(data.labels)
    indices_of_steps = (order.plan(step).indices.tolist() for step in count())

    def step(batch: list[int]) -> float:
        mask = pad_sequence([torch.ones_like(tokens[index]) for index in batch], batch_first=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bfloat16"):
            padded_tokens = pad_sequence([tokens[index] for index in batch], batch_first=True)
            scores: Tensor = model(input_ids=padded_tokens, attention_mask=mask).logits
        loss = cross_entropy(scores.float(), labels[batch])
        loss.backward()
        update()
        return loss.item()

    def epoch() -> list[float]:
        batches = [next(indices_of_steps) for _ in range(order.steps_per_epoch)]
        return [step(batch) for batch in (regrouped(batches, data.ids) if job.grouped else batches)]

    return epoch


def load_peer(class_name: str, folder: str, attention: str | None) -> Any:
    """Load a model of transformers in training mode, without log messages and progress bars."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model_class: Any = getattr(transformers, class_name)
    return model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).train()


def make_update(model: Any, rate: float) -> Callable[[], None]:
    """Return a function that updates the model by its gradients with Heedful's default optimizer, and clears them."""
    import torch

    from heedful.train.optim import AdamW

    settings = AdamW(lr=rate)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)

    def update() -> None:
        assert settings.max_grad_norm is not None
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def regrouped(batches: Sequence[Sequence[int]], ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Regroup the indices of all batches into batches of the same size with similar lengths, in random order."""
    size = len(batches[0])
    indices = sorted(chain.from_iterable(batches), key=lambda index: -len(ids[index]))
    chunks = [indices[start : start + size] for start in range(0, len(indices), size)]
    random.Random(str(batches)).shuffle(chunks)
    return chunks


ENGINES: dict[str, Callable[[Job, str, Examples], Epoch]] = {"packed": packed, "padded": padded}


def prepare(job: Job) -> Prepared:
    """Prepare a job's arm; its sample is the losses of CHECKS updates without dropout."""
    import torch

    ids = lengths.sequences(job.case, job.batch * job.steps)
    generator = random.Random(f"labels {job.case}")
    examples = Examples(ids=ids, labels=[generator.randrange(len(LABELS)) for _ in ids])
    must_choose = job.engine == "padded" and job.attention is None  # the faster attention
    if must_choose:
        job = replace(job, attention=_faster(job, examples.first(len(ids) // 4)))
    check = ENGINES[job.engine](job, job.checked, examples.first(job.batch))
    check_losses = [loss for _ in range(CHECKS) for loss in check()]
    torch.manual_seed(SEED)
    order = "like lengths together" if job.grouped else "arrival order"
    choices = f"{job.attention}{' (the faster)' if must_choose else ''}, {order}, " if job.attention else ""
    return Prepared(
        run=ENGINES[job.engine](job, job.timed, examples),
        sample=lambda losses: [check_losses],
        tokens=sum(map(len, ids)),
        sequences=len(ids),
        inputs=lengths.digest([*ids, examples.labels]),
        settings=f"{choices}{job.batch} sequences a step, {torch.get_num_threads()} threads",
    )


def _faster(job: Job, examples: Examples) -> str:
    """Return the attention implementation whose second epoch over the examples takes the least time."""
    times = {}
    for attention in ATTENTIONS:
        epoch = padded(replace(job, attention=attention), job.timed, examples)
        epoch()
        start = time.perf_counter()
        epoch()
        times[attention] = time.perf_counter() - start
    return min(times, key=times.__getitem__)


def arms(case: str, size: Case, timed: str, checked: str, *, quick: bool) -> list[Arm]:
    """Return the arms whose precision this machine computes fast; the first is the reference.

    Args:
        case: The name of the distribution of lengths.
        size: The size of a round.
        timed: Folder of the model with dropout.
        checked: Folder of the model without dropout.
        quick: Whether all arms take the usual attention, without finding out which is faster.
    """
    from heedful.device import multiplies_bfloat16

    packed = Job(
        engine="packed",
        precision="float32",
        case=case,
        batch=size.batch,
        steps=size.steps,
        timed=timed,
        checked=checked,
    )
    usual = replace(packed, engine="padded", attention=ATTENTIONS[0])
    best = usual if quick else replace(usual, attention=None)
    jobs = {
        "transformers float32, arrival": usual,
        "transformers float32, grouped": replace(best, grouped=True),
        "transformers bfloat16, arrival": replace(best, precision="bfloat16"),
        "transformers bfloat16, grouped": replace(best, precision="bfloat16", grouped=True),
        "heedful float32": packed,
        "heedful bfloat16": replace(packed, precision="bfloat16"),
    }
    return [
        Arm(
            name=name,
            command=(sys.executable, __file__, "--arm", json.dumps(asdict(job))),
            is_heedful=job.engine == "packed",
            bound=BOUNDS[job.precision],
        )
        for name, job in jobs.items()
        if job.precision != "bfloat16" or multiplies_bfloat16()
    ]


def models(folder: Path, attention: float) -> tuple[str, str]:
    """Write two models with the same weights and return their folders: `timed` with dropout, `checked` without."""
    import heedful
    from heedful.checkpoint.new_head import with_head

    bundle = with_head(heedful.load(minilm()), "sequence_classification", labels=LABELS, seed=SEED)
    for name, hidden, attention_dropout in (("timed", HIDDEN, attention), ("checked", 0.0, 0.0)):
        heedful.save(bundle, folder / name)
        path = folder / name / "config.json"
        dropouts = {
            "hidden_dropout_prob": hidden,
            "attention_probs_dropout_prob": attention_dropout,
            "classifier_dropout": hidden,
        }
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | dropouts), "utf-8")
    return str(folder / "timed"), str(folder / "checked")


def record(table: Table, size: Case, attention: float, folder: Path) -> Path:
    """Write the record and return its path."""
    about = ABOUT.format(
        title=table.title,
        batch=size.batch,
        steps=size.steps,
        hidden=HIDDEN,
        attention=attention,
        rate=RATE,
        checks=CHECKS,
        attentions=" and ".join(ATTENTIONS),
        **BOUNDS,
    )
    return write(f"training-{table.title}-{attention}", about, [table.text()], [asdict(table)], folder)


def main() -> None:
    """Measure the arms, print the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(CASES), default="sst2")
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
    if options.output or not options.quick:
        check_destination(options.output or RESULTS)
    size = QUICK if options.quick else CASES[options.case]
    with tempfile.TemporaryDirectory() as temporary:
        folders = models(Path(temporary), options.attention_dropout)
        table = measure(options.case, arms(options.case, size, *folders, quick=options.quick), options.rounds)
    print(table.text(), flush=True)
    if options.output or not options.quick:
        print(record(table, size, options.attention_dropout, options.output or RESULTS))


if __name__ == "__main__":
    main()
