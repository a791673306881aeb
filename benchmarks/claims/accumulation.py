"""One update whose eight samples are split into micro-batches: transformers' Trainer beside Heedful's.

Both train the same small random BERT without dropout on the same eight samples of one length. The reference is plain
PyTorch: all eight in one batch, the loss averaged over all targets. A difference is |update - reference| over
|reference|, of all parameters as one vector; a length is |update| over |reference|, where 1 is right. Gradient
descent at rate 1 shows the gradient itself, whose direction is compared after scaling it to the right length; AdamW
with a clip at norm 1 is what people run, and its first step hides most of a factor. It needs accelerate, which is no
dependency: pip install accelerate
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
CUTS = ((1, 8), (4, 2), (8, 1))  # micro-batches, samples of each
SAMPLES, LENGTH, VOCABULARY, MASK, NO_LABEL = 8, 12, 1000, 4, -100
CLIPPED = AdamW(lr=1e-3)  # eps 1e-8, decay 0.01, clip 1
# sums of gradients far below eps: p <- p - rate g / (0 + eps) = p - g
DESCENT = AdamW(lr=1e6, eps=1e6, betas=(0.0, 0.0), weight_decay=0.0, bias_correction=False, max_grad_norm=None)
OPTIMISERS = {"gradient descent": DESCENT, "AdamW": CLIPPED}


class Done(NamedTuple):
    """The result of one training step."""

    update: Tensor  # of all parameters, end to end
    loss: float  # as the trainer reports it


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Tokens, and labels: of some places, or of the whole (no places)."""

    tokens: list[int]
    places: tuple[int, ...]
    labels: tuple[int, ...]


class Given(Objective):
    """An objective without chance: the labels of the examples."""

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Samples as one batch; each target is (places, labels)."""
        packed = pack_samples(samples)
        rows = [
            start + place for start, sample in zip(packed.bounds, samples, strict=False) for place in sample.target[0]
        ]
        targets = torch.tensor([label for sample in samples for label in sample.target[1]])
        weights = torch.ones(len(targets))
        return Batch(packed=packed, targets=targets, weights=weights, rows=torch.tensor(rows) if rows else None)

    def loss(self, loaded: heedful.ModelBundle, batch: Batch) -> Loss:
        """The sum of the cross-entropies."""
        assert loaded.head is not None
        rows = loaded.model(batch.packed)
        scores = loaded.head(rows if batch.rows is None else rows[batch.rows], batch.packed)
        return weighted_loss(F.cross_entropy(scores, batch.targets, reduction="none"), batch)


def examples(head: str) -> list[Example]:
    """Eight; to find are one token of the first and eight of the last, or one label of each."""
    generator = torch.Generator().manual_seed(0)
    positions = []
    for number in range(SAMPLES):
        tokens = torch.randint(MASK + 1, VOCABULARY, (LENGTH,), generator=generator).tolist()
        places = tuple(range(1, number + 2)) if head == "masked language model" else ()
        labels = tuple(tokens[place] for place in places) or (number % 2,)
        hidden = [MASK if place in places else token for place, token in enumerate(tokens)]
        positions.append(Example(tokens=hidden, places=places, labels=labels))
    return positions


def columns(example: Example) -> dict[str, Any]:
    """Return the example as keyword arguments of transformers' models."""
    known = dict(zip(example.places, example.labels, strict=False))
    labels = [known.get(place, NO_LABEL) for place in range(LENGTH)] if known else example.labels[0]
    return {"input_ids": example.tokens, "attention_mask": [1] * LENGTH, "labels": labels}


def create(head: str, folder: Path) -> None:
    """Write the model that all of them start from."""
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


def moved(before: Path, after: Path) -> Tensor:
    """The difference of two folders' tensors, end to end."""
    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert old.keys() == new.keys(), old.keys() ^ new.keys()
    return torch.cat([(new[name].double() - old[name].double()).flatten() for name in sorted(old)])


def optimizer(model: Any, settings: AdamW) -> torch.optim.Optimizer:
    """Torch's, with our settings."""
    if settings is DESCENT:
        return torch.optim.SGD(model.parameters(), lr=1.0)
    groups = [
        {
            "params": [parameter for parameter in model.parameters() if parameter.ndim >= 2],
            "weight_decay": settings.weight_decay,
        },
        {"params": [parameter for parameter in model.parameters() if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def reference(head: str, folder: Path, settings: AdamW) -> Done:
    """Plain PyTorch, one batch."""
    model = HEADS[head].from_pretrained(folder).train()
    rows = [columns(example) for example in examples(head)]
    loss = model(**{name: torch.tensor([columns_of[name] for columns_of in rows]) for name in rows[0]}).loss
    chosen = optimizer(model, settings)
    loss.backward()
    if settings.max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    chosen.step()
    with tempfile.TemporaryDirectory() as out:
        model.save_pretrained(out)
        return Done(moved(folder, Path(out)), loss.item())


def theirs(head: str, folder: Path, settings: AdamW, parts: int, size: int) -> Done:
    """transformers' Trainer."""
    model = HEADS[head].from_pretrained(folder)
    chosen = optimizer(model, settings)
    constant = torch.optim.lr_scheduler.LambdaLR(chosen, lambda step: 1.0)
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
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(chosen, constant))
        trainer.remove_callback(transformers.PrinterCallback)
        loss = trainer.train().training_loss
        model.save_pretrained(out)
        return Done(moved(folder, Path(out)), loss)


def ours(head: str, folder: Path, settings: AdamW, parts: int, size: int) -> Done:
    """Heedful's Trainer; a micro-batch is as many samples as fit into the budget of tokens."""
    samples = [
        Sample.of([example.tokens], [[0] * LENGTH], target=(example.places, example.labels))
        for example in examples(head)
    ]
    chosen = TrainSettings(
        max_steps=1,
        batch_size=SAMPLES,
        max_tokens_per_microbatch=size * LENGTH,
        optimizer=settings,
        schedule=Constant(),
        precision="float32",
    )
    loaded = heedful.load(folder)
    loss = Trainer(loaded, Given(), samples, chosen).train_step().loss
    with tempfile.TemporaryDirectory() as out:
        heedful.save(loaded, Path(out) / "model")
        return Done(moved(folder, Path(out) / "model"), loss)


def lines(head: str, folder: Path) -> Iterator[str]:
    """The rows of one head's table."""
    right = {name: reference(head, folder, settings) for name, settings in OPTIMISERS.items()}
    yield row("plain PyTorch", f"1 × {SAMPLES}", right, right)
    for name, train in (("transformers", theirs), ("heedful", ours)):
        for parts, size in CUTS:
            done = {kind: train(head, folder, settings, parts, size) for kind, settings in OPTIMISERS.items()}
            yield row(name, f"{parts} × {size}", done, right)


def row(name: str, cut: str, done: Mapping[str, Done], right: Mapping[str, Done]) -> str:
    """One row: loss, length, the difference before and after scaling to the right length, AdamW's difference."""
    gradient, expected = done["gradient descent"].update, right["gradient descent"].update
    length = float(gradient.norm() / expected.norm())
    cells = [
        f"{done['gradient descent'].loss:.6f}",
        f"{length:.6f}",
        f"{difference(gradient, expected):.1e}",
        f"{difference(gradient / length, expected):.1e}",
        f"{difference(done['AdamW'].update, right['AdamW'].update):.1e}",
    ]
    return f"| {name} | {cut} | {' | '.join(cells)} |"


def difference(update: Tensor, expected: Tensor) -> float:
    """Over the expected one's length."""
    return float((update - expected).norm() / expected.norm())


def main() -> int:
    """Print the tables; an exit code."""
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
