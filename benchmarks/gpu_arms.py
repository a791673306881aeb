"""Training arms of `gpu.py`: the same sequences and hidden tokens for Heedful's packed rows and padded batches."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import lengths
import numpy as np
from lengths import CLS, FIRST_WORD, SEP
from pretraining import regrouped
from pretraining_data import PAD, SEED, SHARE
from pretraining_data import objective as of_words
from training import mover, peer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from heedful.objectives import Sample
    from heedful.objectives.base import Batch
    from heedful.objectives.masked_lm import MaskedLM

RATE, CHECKS, ROOM, FULL = 1e-4, 3, 1.3, 0.975
Losses = list[float]
Inputs = dict[str, Any]  # of transformers' model: tensors by name
Text = tuple[list[int], list[int]]  # ids as they are read, labels: -100 where nothing is asked


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A shape, and what it learns from."""

    name: str
    layers: int
    width: int
    vocabulary: int
    distribution: str | int  # of lengths.py, or the one length of all
    tokens: int  # of a step
    steps: int  # of a round
    most: int = 512  # tokens of a sequence
    dropout: float = 0.0  # of hidden states and of attention weights
    precision: str = "bfloat16"  # of products, by autocast; or "float32"

    @property
    def inner(self) -> int:
        """The inner width of the MLP."""
        return 4 * self.width

    @property
    def heads(self) -> int:
        """64 numbers each, or two of a narrow model."""
        return max(2, self.width // 64)

    @property
    def asked(self) -> int:
        """Masked tokens to predict in a step: somewhat below the share, so that every step has that number."""
        return int(0.97 * SHARE * FULL * self.tokens)

    def flop(self, squares: float, tokens: float) -> float:
        """Return the floating-point operations of a step: 3 (L (24 d^2 T + 4 d sum of s^2) + m (2 d^2 + 2 d V))."""
        d, head = self.width, self.asked * (2 * self.width**2 + 2 * self.width * self.vocabulary)
        return 3 * (self.layers * (24 * d * d * tokens + 4 * d * squares) + head)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Given:
    """A round."""

    case: Case
    samples: list[Sample]  # a step each, all of one shape
    texts: list[list[Text]]  # the sequences of each step, without what fills it up
    digest: str
    flop: float

    @property
    def tokens(self) -> int:
        """Real ones."""
        return sum(len(ids) for step in self.texts for ids, _ in step)

    @property
    def sequences(self) -> int:
        """Real ones."""
        return sum(map(len, self.texts))

    def first(self) -> Given:
        """The first step alone."""
        return replace(self, samples=self.samples[:1], texts=self.texts[:1])

    def batches(self, device: torch.device) -> list[Batch]:
        """Return the batches of Heedful's objective, on the device."""
        from heedful.data.sampler import derive_seed

        drawn = objective(self.case)
        return [
            drawn.batch([sample], [derive_seed(SEED, 0, number)]).to(device)
            for number, sample in enumerate(self.samples)
        ]


def objective(case: Case) -> MaskedLM:
    """A constant number of hidden tokens in each step, the same ones in each round."""
    from heedful.objectives.masked_lm import MaskedLM

    return MaskedLM(tokenizer=of_words(case.vocabulary).tokenizer, num_static_masks=1, target_count=case.asked)


def given(case: Case) -> Given:
    """Sequences of random words in rows of one shape, and what is hidden in them."""
    from heedful.data.sampler import derive_seed

    samples, drawn, texts = rows(case), objective(case), []
    for number, sample in enumerate(samples):
        batch = drawn.batch([sample], [derive_seed(SEED, 0, number)])
        assert batch.rows is not None and bool(batch.weights.all()), "fewer tokens than are to be hidden"
        read, labels = batch.packed.tokens.numpy(), np.full(len(sample), -100)
        labels[batch.rows.numpy()] = batch.targets.numpy()
        real = [span for span in pairwise(sample.bounds) if sample.tokens[span[0]] == CLS]
        texts.append([(read[start:stop].tolist(), labels[start:stop].tolist()) for start, stop in real])
    sizes = [[len(ids) for ids, _ in step] for step in texts]
    flop = sum(case.flop(sum(size**2 for size in step), sum(step)) for step in sizes)
    digest = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
    return Given(case=case, samples=samples, texts=texts, digest=digest, flop=flop)


def rows(case: Case) -> list[Sample]:
    """A step each, of sequences in random order: as many tokens and sequences in all of them."""
    from heedful.objectives import Sample
    from heedful.objectives.packing import FixedShape

    draw = random.Random(SEED)

    def words(length: int) -> list[int]:
        return [CLS, *(draw.randrange(FIRST_WORD, case.vocabulary) for _ in range(length - 2)), SEP]

    def sample(predicted: Sequence[int]) -> Sample:
        return Sample.of([words(length) for length in predicted], [[0] * length for length in predicted])

    if isinstance(case.distribution, int):
        count = case.tokens // case.distribution
        return [sample([case.distribution] * count) for _ in range(case.steps)]
    mean = (lengths.DISTRIBUTIONS | lengths.TRAINING)[case.distribution].mean
    several = np.array(lengths.draw(case.distribution, int(ROOM * (case.steps + 1) * case.tokens / mean)))
    several = np.minimum(several, case.most)
    steady = FixedShape(sequences=int(1.2 * case.tokens / mean) + 10, pad=PAD)
    room, most = steady.room(case.tokens)
    full: list[list[int]] = []
    row: list[int] = []
    for number, length in enumerate(several.tolist()):
        filled = int(several[row].sum())
        if filled + length > room or len(row) == most:
            if filled < FULL * case.tokens:
                continue  # too long for the rest of the row
            full.append(row)
            row = []
        row.append(number)
    assert len(full) >= case.steps, f"{len(full)} full rows of {case.steps}: draw more lengths"
    return [steady.pad_sample(sample(several[row].tolist()), case.tokens) for row in full[: case.steps]]


def models(case: Case, folder: str) -> str:
    """Fresh weights, in the folder."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = transformers.BertConfig(
        vocab_size=case.vocabulary,
        num_hidden_layers=case.layers,
        hidden_size=case.width,
        num_attention_heads=case.heads,
        intermediate_size=case.inner,
        max_position_embeddings=max(512, case.most),
        hidden_dropout_prob=case.dropout,
        attention_probs_dropout_prob=case.dropout,
    )
    torch.manual_seed(SEED)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    return folder


# -- arms ---------------------------------------------------------------------------------------------------------


def autocast(case: Case, device: torch.device) -> torch.autocast:
    """Return the context of the forward pass."""
    import torch

    return torch.autocast(device.type, torch.bfloat16, enabled=case.precision == "bfloat16")


Make = Callable[[Given, str, "torch.device", ExitStack, str], Callable[[Given], Callable[[], Losses]]]


def packed(inputs: Given, folder: str, device: torch.device, stack: ExitStack, backend: str) -> Any:
    """Heedful's model, objective and optimizer in a plain loop, on batches that lie on the device."""
    import heedful
    from heedful.train.compiled import CompiledBlocks
    from heedful.train.optim import AdamW, Optimizer

    loaded, drawn = heedful.load(folder).to(device).train(), objective(inputs.case)
    if backend:
        stack.enter_context(CompiledBlocks(loaded, backend=backend))
    parameters = {name: tensor for name, tensor in loaded.named_tensors().items() if tensor.requires_grad}
    optimizer = Optimizer(parameters, AdamW(lr=RATE))

    def step(batch: Batch) -> float:
        with autocast(inputs.case, device):
            loss = drawn.loss(loaded, batch)
        loss.sum.backward()
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        scale = 1 / loss.count
        norm = optimizer.grad_norm(gradients, scale=scale)
        optimizer.step(gradients, lr_factor=1.0, scale=scale, grad_norm=norm)
        for parameter in parameters.values():
            parameter.grad = None
        return loss.sum.item() * scale

    def rounds(part: Given) -> Callable[[], Losses]:
        batches = part.batches(device)
        return lambda: [step(batch) for batch in batches]

    return rounds


def trainer(inputs: Given, folder: str, device: torch.device, stack: ExitStack, backend: str) -> Any:
    """Heedful's trainer with all that it does: hiding tokens, packing and sending them are counted."""
    import heedful
    from heedful.train.compiled import CompiledBlocks
    from heedful.train.optim import AdamW, Constant
    from heedful.train.trainer import Trainer, TrainSettings

    loaded = heedful.load(folder).to(device)
    if backend:
        stack.enter_context(CompiledBlocks(loaded, backend=backend))
    precision: Any = inputs.case.precision
    settings = TrainSettings(
        max_steps=10**9, batch_size=1, optimizer=AdamW(lr=RATE), schedule=Constant(), precision=precision, seed=SEED
    )

    def rounds(part: Given) -> Callable[[], Losses]:
        loaded.flush()  # of the trainer of another part
        made_trainer = Trainer(loaded, objective(part.case), part.samples, settings)
        return lambda: [made_trainer.train_step().loss for _ in range(made_trainer.order.steps_per_epoch)]

    return rounds


def theirs(inputs_of: Callable[[Given, torch.device], list[Inputs]], *, dynamic: bool = False) -> Make:
    """transformers' model in a plain loop, on batches that lie on the device.

    Args:
        inputs_of: Makes the arguments of the model for each step.
        dynamic: Whether their shapes differ from step to step.
    """

    def make(inputs: Given, folder: str, device: torch.device, stack: ExitStack, backend: str) -> Any:
        import torch

        model = peer("AutoModelForMaskedLM", folder, "sdpa").to(device)
        move = mover(model, RATE)
        called: Any = torch.compile(model, backend=backend, dynamic=dynamic) if backend else model

        def step(batch: Inputs) -> float:
            with autocast(inputs.case, device):
                loss = called(**batch).loss
            loss.float().backward()
            move()
            return float(loss.detach())

        def rounds(part: Given) -> Callable[[], Losses]:
            batches = inputs_of(part, device)
            return lambda: [step(batch) for batch in batches]

        return rounds

    return make


def padded(part: Given, device: torch.device, *, grouped: bool) -> list[Inputs]:
    """Return the arguments of each padded step, see `pad`."""
    names = ("input_ids", "attention_mask", "labels")
    return [dict(zip(names, batch, strict=True)) for batch in pad(part, device, grouped=grouped)]


def pack(part: Given, device: torch.device) -> list[Inputs]:
    """Return the arguments of each step with sequences end to end in rows; a mask hides other sequences of a row.

    transformers' own path without padding needs the package flash-attn; its BERT takes masks of two dimensions for each
    row, and positions, in every attention.
    """
    import torch

    from heedful.objectives.packing import pack_best_fit

    batches, most = [], part.case.most
    for step in part.texts:
        rows = pack_best_fit(np.array([len(ids) for ids, _ in step]), most, SEED)
        ids, labels, positions, owners = (np.full((len(rows), most), empty) for empty in (PAD, -100, 0, -1))
        for line, row in enumerate(rows):
            start = 0
            for number in row.tolist():
                read, asked = step[number]
                span = slice(start, start := start + len(read))
                ids[line, span], labels[line, span] = read, asked
                positions[line, span], owners[line, span] = np.arange(len(read)), number
        owner = torch.from_numpy(owners).to(device)
        columns = {"input_ids": ids, "position_ids": positions, "labels": labels}
        batch = {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
        batches.append(batch | {"attention_mask": owner[:, None, :, None] == owner[:, None, None, :]})
    return batches


def pad(part: Given, device: torch.device, *, grouped: bool) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    """Ids, mask (none where nothing is padded) and labels of each step; grouped: sequences of like lengths together.

    Grouped steps are padded to a multiple of 8; others to the longest that there may be.
    """
    import torch

    texts = list(chain(*part.texts))
    bounds = np.cumsum([0, *map(len, part.texts)])
    steps = [list(range(start, stop)) for start, stop in pairwise(bounds.tolist())]
    if grouped:
        steps = regrouped(steps, np.array([len(ids) for ids, _ in texts]))
    arms = []
    for step in steps:
        longest = max(len(texts[number][0]) for number in step)
        width = -(-longest // 8) * 8 if grouped else max(longest, part.case.most)
        ids, mask, labels = (torch.full((len(step), width), empty) for empty in (PAD, 0, -100))
        for line, number in enumerate(step):
            read, asked = texts[number]
            ids[line, : len(read)], mask[line, : len(read)] = torch.tensor(read), 1
            labels[line, : len(read)] = torch.tensor(asked)
        whole = None if bool(mask.all()) else mask.to(device)
        arms.append((ids.to(device), whole, labels.to(device)))
    return arms


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How an arm learns."""

    make: Make
    is_heedful: bool
    compiled: bool = False


PADDED, GROUPED = theirs(partial(padded, grouped=False)), theirs(partial(padded, grouped=True), dynamic=True)
PACKED = theirs(pack, dynamic=True)
WAYS: Mapping[str, Way] = {
    "transformers, padded": Way(make=PADDED, is_heedful=False),
    "transformers, grouped": Way(make=GROUPED, is_heedful=False),
    "transformers, packed": Way(make=PACKED, is_heedful=False),
    "heedful": Way(make=packed, is_heedful=True),
    "heedful, its trainer": Way(make=trainer, is_heedful=True),
    "transformers, grouped, compiled": Way(make=GROUPED, is_heedful=False, compiled=True),
    "transformers, packed, compiled": Way(make=PACKED, is_heedful=False, compiled=True),
    "heedful, compiled": Way(make=packed, is_heedful=True, compiled=True),
    "heedful, its trainer, compiled": Way(make=trainer, is_heedful=True, compiled=True),
}
