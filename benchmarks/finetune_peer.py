"""Fine-tune transformers' model with a plain PyTorch loop: what Heedful's fine-tuning is compared with.

AdamW (decay 0.01 but for biases and norms, betas 0.9 and 0.999, eps 1e-8), 10 % warm-up and a linear fall to 0,
gradients clipped to norm 1, a new random order in each epoch, each batch padded to its longest sequence. Scores are
those of scikit-learn, SciPy and seqeval, in per cent, on float32 predictions after the last step.
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
    """Sequences of token ids with what is to be learned of them."""

    ids: list[list[int]]
    segments: list[list[int]]
    words: list[list[int | None]]  # the word of each token; only of tagged sentences
    targets: list[Any]  # a label's number, a score, or a label's number for each token
    cut: int  # sequences that were longer than the plan allows


def encode(
    tokenizer: Any,
    task: Task,
    examples: Sequence[LabelledExample | ScoredExample | TaggedExample | QuestionExample],
    longest: int,
) -> Encoded:
    """Tokenise as the checkpoint says; the longer text of a pair is cut first, and how many were cut is counted."""
    known = [example for example in examples if not isinstance(example, QuestionExample)]
    assert len(known) == len(examples), "this arm has no such task"
    first: list[Any] = [
        list(example.words) if isinstance(example, TaggedExample) else example.text for example in known
    ]
    second = [
        example.text_pair
        for example in known
        if not isinstance(example, TaggedExample) and example.text_pair is not None
    ]
    texts = (first, second) if second else (first,)
    assert len(second) in (0, len(first))
    split = task.kind == "tag"
    whole = tokenizer(*texts, is_split_into_words=split)
    cut = sum(len(ids) > longest for ids in whole["input_ids"])
    if cut:
        whole = tokenizer(*texts, is_split_into_words=split, truncation=True, max_length=longest)
    words = [whole.word_ids(number) for number in range(len(first))] if split else []
    targets: list[Any] = []
    for number, labelled_example in enumerate(examples):
        match labelled_example:
            case LabelledExample():
                targets.append(task.labels.index(labelled_example.label))
            case ScoredExample():
                targets.append(labelled_example.score)
            case TaggedExample():
                targets.append(first_pieces(words[number], [task.labels.index(tag) for tag in labelled_example.tags]))
    return Encoded(ids=whole["input_ids"], segments=whole["token_type_ids"], words=words, targets=targets, cut=cut)


def first_pieces(words: Sequence[int | None], labels: Sequence[int]) -> list[int]:
    """The label of a word at its first token, and none elsewhere."""
    return [
        NO_LABEL if word is None or (number and words[number - 1] == word) else labels[word]
        for number, word in enumerate(words)
    ]


def build(task: Task, folder: str) -> tuple[nn.Module, list[str]]:
    """Transformers' model with a new head, and the weights that the checkpoint lacks: only the head's."""
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
    longest = max(len(data.ids[number]) for number in batch)
    device = next(model.parameters()).device

    def padded(rows: list[list[int]], value: int) -> Tensor:
        filled = [[*rows[number], *[value] * (longest - len(rows[number]))] for number in batch]
        return torch.tensor(filled).to(device)

    mask = torch.tensor([[1] * len(data.ids[number]) + [0] * (longest - len(data.ids[number])) for number in batch])
    output: Tensor = model(
        input_ids=padded(data.ids, 0), token_type_ids=padded(data.segments, 0), attention_mask=mask.to(device)
    ).logits
    return output.float()


def loss_of(task: Task, scores: Tensor, targets: Sequence[Any]) -> Tensor:
    """Cross-entropy, averaged over the sequences or the labelled tokens of the batch; of numbers the squared error."""
    if task.kind == "regress":
        return F.mse_loss(scores.squeeze(-1), torch.tensor(targets, dtype=torch.float32).to(scores.device))
    if task.kind == "tag":
        longest = scores.shape[1]
        rows = torch.tensor([[*target, *[NO_LABEL] * (longest - len(target))] for target in targets])
        return F.cross_entropy(scores.flatten(0, 1), rows.flatten().to(scores.device), ignore_index=NO_LABEL)
    return F.cross_entropy(scores, torch.tensor(targets).to(scores.device))


def batches(count: int, plan: Plan, generator: torch.Generator) -> Iterator[list[int]]:
    """Each epoch in a new order; its last batch may be smaller."""
    for _ in range(plan.epochs):
        order = torch.randperm(count, generator=generator).tolist()
        yield from (order[start : start + plan.batch] for start in range(0, count, plan.batch))


def train(model: nn.Module, task: Task, data: Encoded, plan: Plan, seed: int, precision: str) -> dict[str, float]:
    """The loop; returns what it took."""
    steps = plan.epochs * math.ceil(len(data.ids) / plan.batch)
    plain = [weight for weight in model.parameters() if weight.ndim < 2]  # biases and norms
    decayed = [weight for weight in model.parameters() if weight.ndim >= 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.rate, betas=BETAS, eps=EPS, fused=True)
    schedule = transformers.get_linear_schedule_with_warmup(  # type: ignore[no-untyped-call]
        optimizer, int(WARM_UP * steps), steps
    )
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device.type
    model.train()
    start, start_busy, start_own = time.perf_counter(), machine_busy(), time.process_time()
    tokens, recent = 0, 0.0
    for step, batch in enumerate(batches(len(data.ids), plan, generator), 1):
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
            scores = logits(model, data, batch)
        loss = loss_of(task, scores, [data.targets[number] for number in batch])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tokens += sum(len(data.ids[number]) for number in batch)
        recent += loss.item()
        if step % EVERY == 0 or step == steps:
            taken = time.perf_counter() - start
            line = f"step {step}/{steps} loss {recent / ((step - 1) % EVERY + 1):.4f} {tokens / taken:.0f} tokens/s"
            print(f"{line} {taken:.0f} s of {taken / step * steps:.0f}", flush=True)
            recent = 0.0
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
    """For each sequence a label's number, a number, or the number of a label for each token; in float32."""
    model.eval()
    order = sorted(range(len(data.ids)), key=lambda number: -len(data.ids[number]))
    parameters: dict[int, Any] = {}
    for start in range(0, len(order), HELD_BATCH):
        batch = order[start : start + HELD_BATCH]
        scores = logits(model, data, batch)
        best = scores.squeeze(-1) if task.kind == "regress" else scores.argmax(-1)
        parameters.update(zip(batch, best.tolist(), strict=True))
    return [parameters[number] for number in range(len(data.ids))]


def measure(name: str, task: Task, data: Encoded, predicted: Sequence[Any]) -> dict[str, float]:
    """The scores of a task in per cent, by the libraries that everybody takes."""
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
    """Entities as conlleval counts them (seqeval's default); every word has a prediction, nothing was cut."""
    from seqeval import metrics  # type: ignore[import-untyped]

    words, tags = [], []
    for targets, numbers in zip(data.targets, predicted, strict=True):
        marked = [place for place, target in enumerate(targets) if target != NO_LABEL]
        words.append([task.labels[targets[place]] for place in marked])
        tags.append([task.labels[numbers[place]] for place in marked])
    return {
        "f1": 100 * float(metrics.f1_score(words, tags)),
        "precision": 100 * float(metrics.precision_score(words, tags)),
        "recall": 100 * float(metrics.recall_score(words, tags)),
        "words": float(sum(map(len, words))),
    }


def main() -> None:
    """Train one task with one seed and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=[name for name in PLANS if name != "SQuAD"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, help="default: the plan of the task in finetune_data.py; so with these:")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--limit", type=int, help="train on a sample of that many examples")
    parser.add_argument("--limit-held", type=int, help="a rehearsal: measure on a sample")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
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
    learned, held = (encode(tokenizer, task, part, plan.longest) for part in (task.train, task.held))
    if task.kind == "tag":
        words = sum(len(example.words) for example in task.held if isinstance(example, TaggedExample))
        assert words == sum(target != NO_LABEL for targets in held.targets for target in targets), "words are lost"
    print(f"{options.task}: {task.about}; {len(learned.ids)} and {len(held.ids)} sequences", flush=True)
    torch.manual_seed(options.seed)
    model, new = build(task, folder)
    model.to(options.device)
    took = train(model, task, learned, plan, options.seed, options.precision)
    start = time.perf_counter()
    scores = measure(options.task, task, held, predict(model, task, held))
    result = {
        "task": options.task,
        "seed": options.seed,
        "plan": asdict(plan),
        "precision": options.precision,
        "metrics": scores,
        "training": took,
        "seconds of measuring": time.perf_counter() - start,
        "data": {
            "about": task.about,
            "train": len(learned.ids),
            "held": len(held.ids),
            "cut in train": learned.cut,
            "cut in held": held.cut,
            "inputs of train": digest(learned.ids),
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
