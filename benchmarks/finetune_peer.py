"""Fine-tune transformers' model with a plain PyTorch loop, as a peer of Heedful's fine-tuning in finetune.py.

The optimizer is AdamW (decay 0.01 except for biases and norms, betas 0.9 and 0.999, eps 1e-8). The learning rate warms
up for 10 % of the steps and then falls linearly to 0, gradients are clipped to a norm of 1, each epoch has a new random
order, and each batch is padded to its longest sequence. Scores are those of scikit-learn, SciPy and seqeval, in per
cent, on float32 predictions after the last step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from engines import minilm
from finetune_data import PLANS, Plan, Task, load, sample
from lengths import digest
from report import check_destination, facts, machine_busy
from torch import Tensor, nn

from heedful.data import LabelledExample, QuestionExample, ScoredExample, TaggedExample

WARM_UP, DECAY, CLIP, EPS, BETAS = 0.1, 0.01, 1.0, 1e-8, (0.9, 0.999)
NO_LABEL = -100
HELD_BATCH = 64
EVERY = 50  # steps between two lines of the log


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Tokenized sequences with their targets."""

    ids: list[list[int]]
    segments: list[list[int]]
    targets: list[Any]  # of each sequence: the index of a label, a score, or the index of a label for each token
    cut: int  # number of sequences that were longer than the plan allows, and were truncated


def encode(
    tokenizer: Any,
    task: Task,
    examples: Sequence[LabelledExample | ScoredExample | TaggedExample | QuestionExample],
    longest: int,
) -> Encoded:
    """Tokenize the examples and truncate them to the `longest` number of tokens; of a pair, the longer text first."""
    first_texts: list[Any] = []
    second_texts = []
    for example in examples:
        match example:
            case TaggedExample():
                first_texts.append(list(example.words))
            case LabelledExample() | ScoredExample():
                first_texts.append(example.text)
                if example.text_pair is not None:
                    second_texts.append(example.text_pair)
            case QuestionExample():
                raise AssertionError("question answering is not measured with transformers")
    assert len(second_texts) in (0, len(first_texts)), "some examples are pairs, and some are not"
    texts = (first_texts, second_texts) if second_texts else (first_texts,)
    are_words = task.kind == "tag"
    encoded = tokenizer(*texts, is_split_into_words=are_words)
    cut = sum(len(ids) > longest for ids in encoded["input_ids"])
    if cut:
        encoded = tokenizer(*texts, is_split_into_words=are_words, truncation=True, max_length=longest)
    targets: list[Any] = []
    for index, example in enumerate(examples):
        match example:
            case LabelledExample():
                targets.append(task.labels.index(example.label))
            case ScoredExample():
                targets.append(example.score)
            case TaggedExample():
                labels = [task.labels.index(tag) for tag in example.tags]
                targets.append(labels_of_tokens(encoded.word_ids(index), labels))
    return Encoded(ids=encoded["input_ids"], segments=encoded["token_type_ids"], targets=targets, cut=cut)


def labels_of_tokens(word_of_token: Sequence[int | None], labels: Sequence[int]) -> list[int]:
    """Return the label of each word at its first token, and NO_LABEL at other tokens.

    Args:
        word_of_token: The index of each token's word, or None for special tokens.
        labels: The index of each word's label.
    """
    token_labels = []
    previous = None
    for word in word_of_token:
        token_labels.append(NO_LABEL if word is None or word == previous else labels[word])
        previous = word
    return token_labels


def build(task: Task, folder: str) -> tuple[nn.Module, list[str]]:
    """Return transformers' model with a new head, and the names of its weights that are not in the checkpoint."""
    classes = {
        "classify": transformers.AutoModelForSequenceClassification,
        "regress": transformers.AutoModelForSequenceClassification,
        "tag": transformers.AutoModelForTokenClassification,
    }
    model, loading_info = classes[task.kind].from_pretrained(
        folder, num_labels=max(len(task.labels), 1), dtype=torch.float32, output_loading_info=True
    )
    new = sorted(loading_info["missing_keys"])
    assert new == ["classifier.bias", "classifier.weight"], f"weights that are not in the checkpoint: {new}"
    return model, new


def logits(model: nn.Module, data: Encoded, batch: Sequence[int]) -> Tensor:
    """Return the logits of these sequences, padded to the longest of them, on the model's device."""
    longest = max(len(data.ids[index]) for index in batch)
    device = next(model.parameters()).device

    def padded(rows: list[list[int]]) -> Tensor:
        return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows]).to(device)

    output: Tensor = model(
        input_ids=padded([data.ids[index] for index in batch]),
        token_type_ids=padded([data.segments[index] for index in batch]),
        attention_mask=padded([[1] * len(data.ids[index]) for index in batch]),
    ).logits
    return output.float()


def loss_of(task: Task, scores: Tensor, targets: Sequence[Any]) -> Tensor:
    """Return the loss of a batch.

    It is the mean squared error of a regression, and otherwise the mean cross-entropy of the sequences or of the
    labelled tokens.
    """
    if task.kind == "regress":
        return F.mse_loss(scores.squeeze(-1), torch.tensor(targets, dtype=torch.float32).to(scores.device))
    if task.kind == "tag":
        longest = scores.shape[1]
        rows = torch.tensor([[*target, *[NO_LABEL] * (longest - len(target))] for target in targets])
        return F.cross_entropy(scores.flatten(0, 1), rows.flatten().to(scores.device), ignore_index=NO_LABEL)
    return F.cross_entropy(scores, torch.tensor(targets).to(scores.device))


def batches(count: int, plan: Plan, generator: torch.Generator) -> Iterator[list[int]]:
    """Yield the indices of each batch of all epochs. Each epoch has a new order, and its last batch may be smaller."""
    for _ in range(plan.epochs):
        order = torch.randperm(count, generator=generator).tolist()
        yield from (order[start : start + plan.batch] for start in range(0, count, plan.batch))


def make_optimizer(model: nn.Module, rate: float) -> torch.optim.AdamW:
    """Return the optimizer, which decays no biases and norms."""
    biases_and_norms = [weight for weight in model.parameters() if weight.ndim < 2]
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": biases_and_norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, eps=EPS, fused=True)


def train(model: nn.Module, task: Task, data: Encoded, plan: Plan, seed: int, precision: str) -> dict[str, float]:
    """Train to the end; return the numbers of steps and tokens, the time, and the share of other processes."""
    steps = plan.epochs * math.ceil(len(data.ids) / plan.batch)
    optimizer = make_optimizer(model, plan.rate)
    schedule = transformers.get_linear_schedule_with_warmup(  # type: ignore[no-untyped-call]
        optimizer, int(WARM_UP * steps), steps
    )
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device.type
    model.train()
    start, start_busy, start_own = time.perf_counter(), machine_busy(), time.process_time()
    tokens = 0
    recent_loss = 0.0  # sum since the last line of output
    for step, batch in enumerate(batches(len(data.ids), plan, generator), 1):
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
            scores = logits(model, data, batch)
        loss = loss_of(task, scores, [data.targets[index] for index in batch])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tokens += sum(len(data.ids[index]) for index in batch)
        recent_loss += loss.item()
        if step % EVERY == 0 or step == steps:
            elapsed = time.perf_counter() - start
            mean_loss = recent_loss / ((step - 1) % EVERY + 1)
            line = f"step {step}/{steps} loss {mean_loss:.4f} {tokens / elapsed:.0f} tokens/s"
            print(f"{line} {elapsed:.0f} s of {elapsed / step * steps:.0f}", flush=True)
            recent_loss = 0.0
    seconds = time.perf_counter() - start
    busy = machine_busy() - start_busy - (time.process_time() - start_own)
    others = max(busy, 0.0) / seconds / (os.cpu_count() or 1)
    return {
        "steps": steps,
        "seconds": seconds,
        "tokens": tokens,
        "tokens per second": tokens / seconds,
        "others": others,
    }


@torch.inference_mode()
def predict(model: nn.Module, task: Task, data: Encoded) -> list[Any]:
    """Predict in float32; return predictions in the form of `Encoded.targets`."""
    model.eval()
    longest_first = sorted(range(len(data.ids)), key=lambda index: -len(data.ids[index]))
    predictions: dict[int, Any] = {}
    for start in range(0, len(longest_first), HELD_BATCH):
        batch = longest_first[start : start + HELD_BATCH]
        scores = logits(model, data, batch)
        predicted = scores.squeeze(-1) if task.kind == "regress" else scores.argmax(-1)
        predictions.update(zip(batch, predicted.tolist(), strict=True))
    return [predictions[index] for index in range(len(data.ids))]


def measure(name: str, task: Task, data: Encoded, predicted: Sequence[Any]) -> dict[str, float]:
    """Return the scores of a task in per cent, by scikit-learn, SciPy or seqeval."""
    from sklearn import metrics

    if task.kind == "tag":
        return entities(task, data, predicted)
    if task.kind == "regress":
        from scipy import stats

        pearson, spearman = stats.pearsonr(data.targets, predicted), stats.spearmanr(data.targets, predicted)
        return {"pearson": 100 * float(pearson.statistic), "spearman": 100 * float(spearman.statistic)}
    scores = {"accuracy": 100 * float(metrics.accuracy_score(data.targets, predicted))}
    if name == "MRPC":
        scores["f1"] = 100 * float(metrics.f1_score(data.targets, predicted))
    if name == "CoLA":
        scores["matthews"] = 100 * float(metrics.matthews_corrcoef(data.targets, predicted))
    return scores


def entities(task: Task, data: Encoded, predicted: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the scores of entities, which count as by conlleval (seqeval's default), in per cent."""
    from seqeval import metrics  # type: ignore[import-untyped]

    gold_tags, predicted_tags = [], []
    for targets, labels in zip(data.targets, predicted, strict=True):
        first_tokens = [position for position, target in enumerate(targets) if target != NO_LABEL]
        gold_tags.append([task.labels[targets[position]] for position in first_tokens])
        predicted_tags.append([task.labels[labels[position]] for position in first_tokens])
    return {
        "f1": 100 * float(metrics.f1_score(gold_tags, predicted_tags)),
        "precision": 100 * float(metrics.precision_score(gold_tags, predicted_tags)),
        "recall": 100 * float(metrics.recall_score(gold_tags, predicted_tags)),
        "words": float(sum(map(len, gold_tags))),
    }


def parsed_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=[name for name in PLANS if name != "SQuAD"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, help="default, as of --rate and --batch: PLANS in finetune_data.py")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--limit", type=int, help="train on a sample of this many examples")
    parser.add_argument("--limit-held", type=int, help="rehearse: score a sample of this many examples")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Train one task with one seed, score it and write the result."""
    options = parsed_options()
    check_destination(options.out)
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    changes = {
        name: getattr(options, name) for name in ("epochs", "rate", "batch") if getattr(options, name) is not None
    }
    plan, task, folder = replace(PLANS[options.task], **changes), load(options.task), minilm()
    task = replace(task, train=sample(task.train, options.limit), held=sample(task.held, options.limit_held))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    train_data, held = (encode(tokenizer, task, examples, plan.longest) for examples in (task.train, task.held))
    if task.kind == "tag":
        words = sum(len(example.words) for example in task.held if isinstance(example, TaggedExample))
        labels = sum(target != NO_LABEL for targets in held.targets for target in targets)
        assert labels == words, "some words have no prediction"
    print(f"{options.task}: {task.about}; {len(train_data.ids)} and {len(held.ids)} sequences", flush=True)
    torch.manual_seed(options.seed)
    model, new = build(task, folder)
    model.to(options.device)
    training = train(model, task, train_data, plan, options.seed, options.precision)
    start = time.perf_counter()
    scores = measure(options.task, task, held, predict(model, task, held))
    result = {
        "task": options.task,
        "seed": options.seed,
        "plan": asdict(plan),
        "precision": options.precision,
        "metrics": scores,
        "training": training,
        "seconds of measuring": time.perf_counter() - start,
        "data": {
            "about": task.about,
            "train": len(train_data.ids),
            "held": len(held.ids),
            "cut in train": train_data.cut,
            "cut in held": held.cut,
            "inputs of train": digest(train_data.ids),
            "inputs of held": digest(held.ids),
            "rehearsal": options.limit_held is not None,
        },
        "new weights": new,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "machine": facts(),
        "measured by": {name: version(name) for name in ("scikit-learn", "scipy", "seqeval")},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    part = options.out.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    part.replace(options.out)
    print(json.dumps(scores), flush=True)


if __name__ == "__main__":
    main()
