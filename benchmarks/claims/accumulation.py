"""Compare one update whose eight samples are split into micro-batches: transformers' Trainer and Heedful's.

Both train the same small random BERT without dropout on the same eight samples of one length. The reference is plain
PyTorch: all eight in one batch, the loss averaged over all targets. A difference is |update - reference| over
|reference|, of all parameters as one vector; a length is |update| over |reference|, where 1 is right. Gradient
descent at rate 1 shows the gradient, whose direction is compared after scaling it to the right length; AdamW with a
clip at norm 1 is the usual optimizer, and its first step hides most of a factor. The script needs accelerate, which is
no dependency: pip install accelerate
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import logging

import heedful
from heedful.objectives import Batch, Loss, Objective, Sample
from heedful.objectives.base import pack_samples, weighted_loss
from heedful.train.optim import AdamW, Constant
from heedful.train.trainer import Trainer, TrainSettings

HEADS = {
    "masked language model": transformers.BertForMaskedLM,
    "classification": transformers.BertForSequenceClassification,
}
CUTS = ((1, 8), (4, 2), (8, 1))  # micro-batches, and samples of each
SAMPLES = 8
LENGTH = 12  # tokens of a sample
VOCABULARY = 1000
MASK = 4  # id of the mask token
NO_LABEL = -100
CLIPPED = AdamW(lr=1e-3)  # eps 1e-8, decay 0.01, clip 1
# gradient descent at rate 1, as sums of gradients are far below eps: p <- p - rate g / (0 + eps) = p - g
DESCENT = AdamW(lr=1e6, eps=1e6, betas=(0.0, 0.0), weight_decay=0.0, bias_correction=False, max_grad_norm=None)
OPTIMISERS = {"gradient descent": DESCENT, "AdamW": CLIPPED}


class Done(NamedTuple):
    """The result of one training step."""

    update: Tensor  # of all parameters, concatenated
    loss: float  # as the trainer reports it


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A sequence with labels of some positions, or with one label."""

    tokens: list[int]
    positions: tuple[int, ...]  # of the labels; empty if the label is that of the sequence
    labels: tuple[int, ...]


class FixedLabels(Objective):
    """An objective without random choices: the labels of the examples."""

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return the samples as one batch; the target of each is (positions, labels)."""
        packed = pack_samples(samples)
        rows = [
            start + position
            for start, sample in zip(packed.bounds, samples, strict=False)
            for position in sample.target[0]
        ]
        targets = torch.tensor([label for sample in samples for label in sample.target[1]])
        weights = torch.ones(len(targets))
        return Batch(packed=packed, targets=targets, weights=weights, rows=torch.tensor(rows) if rows else None)

    def loss(self, loaded: heedful.ModelBundle, batch: Batch) -> Loss:
        """Return the sum of the cross-entropies."""
        assert loaded.head is not None
        states = loaded.model(batch.packed)
        scores = loaded.head(states if batch.rows is None else states[batch.rows], batch.packed)
        return weighted_loss(F.cross_entropy(scores, batch.targets, reduction="none"), batch)


def examples(head: str) -> list[Example]:
    """Return eight random examples: the first has one masked token, the last eight; or each has a class."""
    generator = torch.Generator().manual_seed(0)
    random_examples = []
    for index in range(SAMPLES):
        tokens = torch.randint(MASK + 1, VOCABULARY, (LENGTH,), generator=generator).tolist()
        positions = tuple(range(1, index + 2)) if head == "masked language model" else ()
        labels = tuple(tokens[position] for position in positions) or (index % 2,)
        masked = [MASK if position in positions else token for position, token in enumerate(tokens)]
        random_examples.append(Example(tokens=masked, positions=positions, labels=labels))
    return random_examples


def columns(example: Example) -> dict[str, Any]:
    """Return the example as keyword arguments of transformers' models."""
    label_at = dict(zip(example.positions, example.labels, strict=False))
    labels = [label_at.get(position, NO_LABEL) for position in range(LENGTH)] if label_at else example.labels[0]
    return {"input_ids": example.tokens, "attention_mask": [1] * LENGTH, "labels": labels}


def create(head: str, folder: Path) -> None:
    """Write the model with which all trainers start."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    HEADS[head](config).save_pretrained(folder)


def update_of(before: Path, after: Path) -> Tensor:
    """Return the differences of the tensors of two model folders, concatenated."""
    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert old.keys() == new.keys(), old.keys() ^ new.keys()
    return torch.cat([(new[name].double() - old[name].double()).flatten() for name in sorted(old)])


def optimizer(model: Any, settings: AdamW) -> torch.optim.Optimizer:
    """Return torch's optimizer with the same settings."""
    if settings is DESCENT:
        return torch.optim.SGD(model.parameters(), lr=1.0)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def reference(head: str, folder: Path, settings: AdamW) -> Done:
    """Train with plain PyTorch in one batch."""
    model = HEADS[head].from_pretrained(folder).train()
    rows = [columns(example) for example in examples(head)]
    loss = model(**{name: torch.tensor([row[name] for row in rows]) for name in rows[0]}).loss
    torch_optimizer = optimizer(model, settings)
    loss.backward()
    if settings.max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    torch_optimizer.step()
    with tempfile.TemporaryDirectory() as out:
        model.save_pretrained(out)
        return Done(update_of(folder, Path(out)), loss.item())


def theirs(head: str, folder: Path, settings: AdamW, parts: int, size: int) -> Done:
    """Train with transformers' Trainer in `parts` micro-batches of `size` samples."""
    model = HEADS[head].from_pretrained(folder)
    torch_optimizer = optimizer(model, settings)
    constant = torch.optim.lr_scheduler.LambdaLR(torch_optimizer, lambda step: 1.0)
    with tempfile.TemporaryDirectory() as out:
        arguments = transformers.TrainingArguments(
            output_dir=out,
            use_cpu=True,
            max_steps=1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=parts,
            max_grad_norm=settings.max_grad_norm or 0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        rows: Any = [columns(example) for example in examples(head)]
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            optimizers=(torch_optimizer, constant),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        loss = trainer.train().training_loss
        model.save_pretrained(out)
        return Done(update_of(folder, Path(out)), loss)


def ours(head: str, folder: Path, settings: AdamW, parts: int, size: int) -> Done:
    """Train with Heedful's Trainer, whose budget of tokens is that of `size` samples."""
    samples = [
        Sample.of([example.tokens], [[0] * LENGTH], target=(example.positions, example.labels))
        for example in examples(head)
    ]
    train_settings = TrainSettings(
        max_steps=1,
        batch_size=SAMPLES,
        max_tokens_per_microbatch=size * LENGTH,
        optimizer=settings,
        schedule=Constant(),
        precision="float32",
    )
    loaded = heedful.load(folder)
    loss = Trainer(loaded, FixedLabels(), samples, train_settings).train_step().loss
    with tempfile.TemporaryDirectory() as out:
        heedful.save(loaded, Path(out) / "model")
        return Done(update_of(folder, Path(out) / "model"), loss)


def lines(head: str, folder: Path) -> Iterator[str]:
    """Yield the rows of one head's table."""
    expected = {name: reference(head, folder, settings) for name, settings in OPTIMISERS.items()}
    yield row("plain PyTorch", f"1 × {SAMPLES}", expected, expected)
    for name, train in (("transformers", theirs), ("heedful", ours)):
        for parts, size in CUTS:
            done = {kind: train(head, folder, settings, parts, size) for kind, settings in OPTIMISERS.items()}
            yield row(name, f"{parts} × {size}", done, expected)


def row(name: str, cut: str, done: Mapping[str, Done], references: Mapping[str, Done]) -> str:
    """Format the loss, the length, the difference before and after scaling to the right length, and AdamW's."""
    gradient, expected = done["gradient descent"].update, references["gradient descent"].update
    length = float(gradient.norm() / expected.norm())
    cells = [
        f"{done['gradient descent'].loss:.6f}",
        f"{length:.6f}",
        f"{difference(gradient, expected):.1e}",
        f"{difference(gradient / length, expected):.1e}",
        f"{difference(done['AdamW'].update, references['AdamW'].update):.1e}",
    ]
    return f"| {name} | {cut} | {' | '.join(cells)} |"


def difference(update: Tensor, expected: Tensor) -> float:
    """Return the length of the difference over that of the expected update."""
    return float((update - expected).norm() / expected.norm())


def main() -> int:
    """Print the tables, and return the exit code."""
    try:
        import accelerate  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError:
        print("transformers' Trainer needs accelerate: pip install accelerate", file=sys.stderr)
        return 2
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    names = ("heedful", "transformers", "accelerate", "torch")
    print(", ".join(f"{name} {version(name)}" for name in names))
    for head in HEADS:
        counts = ", ".join(str(len(example.labels)) for example in examples(head))
        print(f"\n## {head}: {SAMPLES} samples with {counts} targets\n")
        print("| trainer | micro-batches × samples | loss | gradient: length | difference | of its direction | AdamW |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        with tempfile.TemporaryDirectory() as folder:
            create(head, Path(folder))
            for line in lines(head, Path(folder)):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
