"""Training arms of `gpu.py`: ways to pre-train a model, by Heedful and by transformers, on the same masked sequences.

gpu_measures.py trains and times the arms, which `WAYS` lists.
"""

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
from training import load_peer, make_update

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from heedful.objectives import Sample
    from heedful.objectives.base import Batch
    from heedful.objectives.masked_lm import MaskedLM

RATE = 1e-4  # learning rate
CHECKS = 3  # updates before timing, whose losses are compared
SPARE = 1.3  # lengths that are drawn for each length that is needed, since some do not fit into any step
FULL = 0.975  # the least share of a step's tokens that are real; padding fills the rest
Losses = list[float]  # of the steps of a round
Inputs = dict[str, Any]  # arguments of transformers' model for one step: tensors by name
Text = tuple[list[int], list[int]]  # token ids after masking, and labels: -100 for tokens that are not masked


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The size of a model, and the data on which it is trained."""

    name: str
    layers: int
    width: int  # hidden size
    vocabulary: int
    distribution: str | int  # name of a distribution of lengths.py, or the length of all sequences
    tokens: int  # tokens of a step, padding included
    steps: int  # steps of a round
    most: int = 512  # most tokens of a sequence
    dropout: float = 0.0  # probability, for hidden states and attention weights
    precision: str = "bfloat16"  # precision of matrix products under autocast, or "float32"
    rotary: bool = False  # whether it is a ModernBERT: rotary positions, local attention, gated MLPs; else a BERT

    @property
    def inner(self) -> int:
        """The inner width of the MLP."""
        return 3 * self.width // 2 if self.rotary else 4 * self.width

    @property
    def heads(self) -> int:
        """The number of attention heads: their size is 64, but a narrow model has two smaller ones."""
        return max(2, self.width // 64)

    @property
    def masked(self) -> int:
        """The masked tokens of a step: 97 % of what SHARE would mask, so that every step has this number."""
        return int(0.97 * SHARE * FULL * self.tokens)

    def flop(self, squares: float, tokens: float) -> float:
        """Return the floating-point operations of a step: 3 (L (24 d^2 T + 4 d sum of s^2) + m (2 d^2 + 2 d V)).

        A rotary model has 17 d^2 instead of 24 d^2; its local layers are counted as if they attended to s tokens.
        """
        d = self.width
        matrices = 3 if self.rotary else 2  # of the MLP
        layers = self.layers * ((8 * d * d + 2 * matrices * d * self.inner) * tokens + 4 * d * squares)
        head = self.masked * (2 * d * d + 2 * d * self.vocabulary)
        return 3 * (layers + head)  # backward takes twice as much as forward


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundData:
    """The data of a round of training, which are the same for all arms."""

    case: Case
    samples: list[Sample]  # one sample for each step, with its sequences and padding; all have the same shape
    texts: list[list[Text]]  # the sequences of each step, without padding
    digest: str  # hash of `texts`
    flop: float  # floating-point operations of a round, without those on padding

    @property
    def tokens(self) -> int:
        """The number of tokens, without padding."""
        return sum(len(ids) for step in self.texts for ids, _ in step)

    @property
    def sequences(self) -> int:
        """The number of sequences, without padding."""
        return sum(map(len, self.texts))

    def first(self) -> RoundData:
        """Return the data of the first step alone."""
        return replace(self, samples=self.samples[:1], texts=self.texts[:1])

    def batches(self, device: torch.device) -> list[Batch]:
        """Return the batches of Heedful's objective, on the device."""
        from heedful.data.sampler import derive_seed

        masked_lm = objective(self.case)
        return [
            masked_lm.batch([sample], [derive_seed(SEED, 0, index)]).to(device)
            for index, sample in enumerate(self.samples)
        ]


def objective(case: Case) -> MaskedLM:
    """Return an objective that masks `case.masked` tokens in each step, the same ones in each round."""
    from heedful.objectives.masked_lm import MaskedLM

    return MaskedLM(tokenizer=of_words(case.vocabulary).tokenizer, num_static_masks=1, target_count=case.masked)


def make_round(case: Case) -> RoundData:
    """Make sequences of random words, and mask some of their tokens."""
    from heedful.data.sampler import derive_seed

    samples, masked_lm, texts = make_samples(case), objective(case), []
    for index, sample in enumerate(samples):
        batch = masked_lm.batch([sample], [derive_seed(SEED, 0, index)])
        assert batch.rows is not None and bool(batch.weights.all()), "fewer tokens than are to be masked"
        ids, labels = batch.packed.tokens.numpy(), np.full(len(sample), -100)
        labels[batch.rows.numpy()] = batch.targets.numpy()
        # sequences of padding do not start with [CLS]
        spans = [(start, stop) for start, stop in pairwise(sample.bounds) if sample.tokens[start] == CLS]
        texts.append([(ids[start:stop].tolist(), labels[start:stop].tolist()) for start, stop in spans])
    flop = 0.0
    for step in texts:
        step_lengths = [len(ids) for ids, _ in step]
        flop += case.flop(squares=sum(length**2 for length in step_lengths), tokens=sum(step_lengths))
    digest = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
    return RoundData(case=case, samples=samples, texts=texts, digest=digest, flop=flop)


def make_samples(case: Case) -> list[Sample]:
    """Return one sample for each step, with sequences of random words in random order.

    All samples have the same number of tokens and, padding included, of sequences.
    """
    from heedful.objectives import Sample
    from heedful.objectives.packing import FixedShape

    generator = random.Random(SEED)

    def words(length: int) -> list[int]:
        return [CLS, *(generator.randrange(FIRST_WORD, case.vocabulary) for _ in range(length - 2)), SEP]

    def sample(sequence_lengths: Sequence[int]) -> Sample:
        return Sample.of([words(length) for length in sequence_lengths], [[0] * length for length in sequence_lengths])

    if isinstance(case.distribution, int):
        count = case.tokens // case.distribution
        return [sample([case.distribution] * count) for _ in range(case.steps)]
    mean = (lengths.DISTRIBUTIONS | lengths.TRAINING)[case.distribution].mean
    drawn_lengths = lengths.draw(case.distribution, int(SPARE * (case.steps + 1) * case.tokens / mean))
    drawn_lengths = [min(length, case.most) for length in drawn_lengths]
    shape = FixedShape(sequences=int(1.2 * case.tokens / mean) + 10, pad=PAD)
    max_tokens, max_sequences = shape.room(case.tokens)
    full_steps: list[list[int]] = []
    step: list[int] = []  # lengths of the sequences of the step that is being filled
    for length in drawn_lengths:
        if sum(step) + length > max_tokens or len(step) == max_sequences:
            if sum(step) < FULL * case.tokens:
                continue  # a shorter sequence may still fit into this step
            full_steps.append(step)
            step = []
        step.append(length)
    assert len(full_steps) >= case.steps, f"only {len(full_steps)} of {case.steps} steps are full: draw more lengths"
    return [shape.pad_sample(sample(step), case.tokens) for step in full_steps[: case.steps]]


def models(case: Case, folder: str) -> str:
    """Write a model with random weights into the folder, and return the folder."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    settings: dict[str, Any] = {
        "vocab_size": case.vocabulary,
        "num_hidden_layers": case.layers,
        "hidden_size": case.width,
        "num_attention_heads": case.heads,
        "intermediate_size": case.inner,
        "max_position_embeddings": max(512, case.most),
    }
    torch.manual_seed(SEED)
    model: Any
    if case.rotary:
        ids = {"pad": PAD, "bos": CLS, "cls": CLS, "eos": SEP, "sep": SEP}
        settings |= {f"{name}_token_id": token_id for name, token_id in ids.items()}
        model = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**settings))
    else:
        settings |= {"hidden_dropout_prob": case.dropout, "attention_probs_dropout_prob": case.dropout}
        model = transformers.BertForMaskedLM(transformers.BertConfig(**settings))
    model.save_pretrained(folder)
    return folder


# -- arms ---------------------------------------------------------------------------------------------------------


def autocast(case: Case, device: torch.device) -> torch.autocast:
    """Return the context of a forward pass in the case's precision."""
    import torch

    return torch.autocast(device.type, torch.bfloat16, enabled=case.precision == "bfloat16")


Train = Callable[[], Losses]  # trains for one round
PrepareRound = Callable[[RoundData], Train]  # moves the data of a round to the device
# loads the model of a folder; the last argument is the backend of torch.compile, or "" to compile nothing
LoadArm = Callable[[RoundData, str, "torch.device", ExitStack, str], PrepareRound]


def heedful_loop(data: RoundData, folder: str, device: torch.device, stack: ExitStack, backend: str) -> PrepareRound:
    """Train with Heedful's model, objective and optimizer in a plain loop, on batches that lie on the device."""
    import heedful
    from heedful.train.compiled import CompiledBlocks
    from heedful.train.optim import AdamW, Optimizer

    loaded, masked_lm = heedful.load(folder).to(device).train(), objective(data.case)
    if backend:
        stack.enter_context(CompiledBlocks(loaded, backend=backend))
    parameters = {name: tensor for name, tensor in loaded.named_tensors().items() if tensor.requires_grad}
    optimizer = Optimizer(parameters, AdamW(lr=RATE))

    def step(batch: Batch) -> float:
        with autocast(data.case, device):
            loss = masked_lm.loss(loaded, batch)
        loss.sum.backward()
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        scale = 1 / loss.count
        norm = optimizer.grad_norm(gradients, scale=scale)
        optimizer.step(gradients, lr_factor=1.0, scale=scale, grad_norm=norm)
        for parameter in parameters.values():
            parameter.grad = None
        return loss.sum.item() * scale

    def prepare_round(round_data: RoundData) -> Train:
        batches = round_data.batches(device)
        return lambda: [step(batch) for batch in batches]

    return prepare_round


def heedful_trainer(data: RoundData, folder: str, device: torch.device, stack: ExitStack, backend: str) -> PrepareRound:
    """Train with Heedful's trainer, whose masking, packing and copying to the device are timed too."""
    import heedful
    from heedful.train.compiled import CompiledBlocks
    from heedful.train.optim import AdamW, Constant
    from heedful.train.trainer import Trainer, TrainSettings

    loaded = heedful.load(folder).to(device)
    if backend:
        stack.enter_context(CompiledBlocks(loaded, backend=backend))
    precision: Any = data.case.precision
    settings = TrainSettings(
        max_steps=10**9, batch_size=1, optimizer=AdamW(lr=RATE), schedule=Constant(), precision=precision, seed=SEED
    )

    def prepare_round(round_data: RoundData) -> Train:
        loaded.flush()  # apply pending updates of the trainer of the round before
        trainer = Trainer(loaded, objective(round_data.case), round_data.samples, settings)
        return lambda: [trainer.train_step().loss for _ in range(trainer.order.steps_per_epoch)]

    return prepare_round


def transformers_loop(
    inputs_of: Callable[[RoundData, torch.device], list[Inputs]], *, dynamic: bool = False
) -> LoadArm:
    """Train transformers' model in a plain loop, on batches that lie on the device.

    Args:
        inputs_of: Makes the arguments of the model for each step.
        dynamic: Whether the shapes of these arguments differ from step to step.
    """

    def load_arm(data: RoundData, folder: str, device: torch.device, stack: ExitStack, backend: str) -> PrepareRound:
        import torch

        model = load_peer("AutoModelForMaskedLM", folder, "sdpa").to(device)
        update = make_update(model, RATE)
        maybe_compiled: Any = torch.compile(model, backend=backend, dynamic=dynamic) if backend else model

        def step(batch: Inputs) -> float:
            with autocast(data.case, device):
                loss = maybe_compiled(**batch).loss
            loss.float().backward()
            update()
            return float(loss.detach())

        def prepare_round(round_data: RoundData) -> Train:
            batches = inputs_of(round_data, device)
            return lambda: [step(batch) for batch in batches]

        return prepare_round

    return load_arm


def padded(data: RoundData, device: torch.device, *, grouped: bool) -> list[Inputs]:
    """Return the arguments of each padded step, see `pad`."""
    names = ("input_ids", "attention_mask", "labels")
    return [dict(zip(names, batch, strict=True)) for batch in pad(data, device, grouped=grouped)]


def pack(data: RoundData, device: torch.device) -> list[Inputs]:
    """Return the arguments of each step, with several sequences in each row of `case.most` tokens.

    The mask, [rows, 1, most, most], keeps the sequences of a row apart, and each sequence has positions from 0. This is
    what transformers offers without the package flash-attn, which its own path without padding needs.
    """
    import torch

    from heedful.objectives.packing import pack_best_fit

    batches, most = [], data.case.most
    for texts in data.texts:
        rows = pack_best_fit(np.array([len(text_ids) for text_ids, _ in texts]), most, SEED)
        ids, labels, positions, sequences = (np.full((len(rows), most), empty) for empty in (PAD, -100, 0, -1))
        for row, text_indices in enumerate(rows):
            start = 0
            for index in text_indices.tolist():
                text_ids, text_labels = texts[index]
                span = slice(start, start + len(text_ids))
                ids[row, span], labels[row, span] = text_ids, text_labels
                positions[row, span], sequences[row, span] = np.arange(len(text_ids)), index
                start += len(text_ids)
        sequence = torch.from_numpy(sequences).to(device)
        columns = {"input_ids": ids, "position_ids": positions, "labels": labels}
        batch = {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
        batches.append(batch | {"attention_mask": sequence[:, None, :, None] == sequence[:, None, None, :]})
    return batches


def pad(data: RoundData, device: torch.device, *, grouped: bool) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    """Return token ids, mask (None without padding) and labels of each step.

    Args:
        grouped: Whether the steps have other sequences, of similar lengths, padded to a multiple of 8. Otherwise the
            sequences are padded to `case.most` tokens.
    """
    import torch

    texts = list(chain(*data.texts))
    bounds = np.cumsum([0, *map(len, data.texts)])
    steps = [list(range(start, stop)) for start, stop in pairwise(bounds.tolist())]
    if grouped:
        steps = regrouped(steps, np.array([len(text_ids) for text_ids, _ in texts]))
    batches = []
    for step in steps:
        longest = max(len(texts[index][0]) for index in step)
        width = -(-longest // 8) * 8 if grouped else max(longest, data.case.most)
        ids, mask, labels = (torch.full((len(step), width), empty) for empty in (PAD, 0, -100))
        for row, index in enumerate(step):
            text_ids, text_labels = texts[index]
            ids[row, : len(text_ids)] = torch.tensor(text_ids)
            mask[row, : len(text_ids)] = 1
            labels[row, : len(text_ids)] = torch.tensor(text_labels)
        mask_or_none = None if bool(mask.all()) else mask.to(device)
        batches.append((ids.to(device), mask_or_none, labels.to(device)))
    return batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How an arm trains."""

    load_arm: LoadArm
    is_heedful: bool
    compiled: bool = False


PADDED = transformers_loop(partial(padded, grouped=False))
GROUPED = transformers_loop(partial(padded, grouped=True), dynamic=True)
PACKED = transformers_loop(pack, dynamic=True)
WAYS: Mapping[str, Way] = {
    "transformers, padded": Way(load_arm=PADDED, is_heedful=False),
    "transformers, grouped": Way(load_arm=GROUPED, is_heedful=False),
    "transformers, packed": Way(load_arm=PACKED, is_heedful=False),
    "heedful": Way(load_arm=heedful_loop, is_heedful=True),
    "heedful, its trainer": Way(load_arm=heedful_trainer, is_heedful=True),
    "transformers, grouped, compiled": Way(load_arm=GROUPED, is_heedful=False, compiled=True),
    "transformers, packed, compiled": Way(load_arm=PACKED, is_heedful=False, compiled=True),
    "heedful, compiled": Way(load_arm=heedful_loop, is_heedful=True, compiled=True),
    "heedful, its trainer, compiled": Way(load_arm=heedful_trainer, is_heedful=True, compiled=True),
}
