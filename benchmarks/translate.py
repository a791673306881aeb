"""Recurrent nets without and with attention, and a small Transformer: Multi30k, German to English, test 2016.

HEEDFUL_DATA=folder python benchmarks/translate.py none attention transformer --folder runs
HEEDFUL_DATA=folder python benchmarks/translate.py transformer --rehearse     # speed alone; records nothing

The texts are lower-cased, as in the published figures. An arm whose run is finished is only measured; one that was
stopped resumes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from report import RESULTS, check_destination, facts, grid, write

import heedful
from heedful.data import Seq2SeqExample, read
from heedful.model.decode import BeamSearch
from heedful.runs.evaluate import build_eval_task
from heedful.runs.finetune.dry_run import dry_run
from heedful.runs.finetune.run import finetune
from heedful.study import multi30k
from heedful.tasks.generation import GenerationConfig
from heedful.train.fit import EvalResult, Reporter
from heedful.train.journal import read_journal
from heedful.train.trainer import Step, Trainer

BEAMS = 5
BATCH = 256  # pairs whose loss is found at once
EVERY = 100  # steps between two lines
SAID = {  # published on these data: torchtext's BLEU, and the perplexity of its words
    "none": "14, perplexity 43.8",
    "attention": "28, perplexity 23.2",
    "transformer": "36.52, perplexity 5.316",
}
ARMS = dict(zip(SAID, multi30k.RECIPES.values(), strict=True))


def data(folder: Path) -> Path:
    """The pairs of each split, lower-cased, as files that Heedful reads."""
    return multi30k.write_pairs(Path(os.environ.get("HEEDFUL_DATA", "absent")), folder / "data")


def words(text: str) -> list[str]:
    """Words and single marks, about as the published figures' tokenizer splits them."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def counted_bleu(written: Sequence[str], golds: Sequence[str]) -> float:
    """torchtext's: exp(min(0, 1 - r / c) + mean log p_n), n to 4, of `words`, not smoothed: 0 where some p_n is 0."""
    right, total, lengths = [0] * 4, [0] * 4, [0, 0]
    for pair in zip(written, golds, strict=True):
        text_words, gold = (words(text) for text in pair)
        lengths = [lengths[0] + len(text_words), lengths[1] + len(gold)]
        for n in range(1, 5):
            a, b = (
                Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)) for tokens in (text_words, gold)
            )
            right[n - 1] += (a & b).total()
            total[n - 1] += a.total()
    if not all(right):
        return 0.0
    logs = sum(math.log(a / b) for a, b in zip(right, total, strict=True)) / 4
    return 100 * math.exp(min(0.0, 1 - lengths[1] / lengths[0]) + logs)


def scores(written: list[str], golds: list[str]) -> dict[str, Any]:
    """BLEU by sacrebleu with its signature, and by torchtext's definition, which sacrebleu has to confirm."""
    from sacrebleu.metrics.bleu import BLEU

    usual = BLEU(lowercase=True, force=True)
    bleu = usual.corpus_score(written, [golds]).score
    split = [[" ".join(words(text)) for text in texts] for texts in (written, golds)]
    plain = BLEU(tokenize="none", smooth_method="none", force=True).corpus_score(split[0], [split[1]]).score
    counted = counted_bleu(written, golds)
    assert abs(plain - counted) < 1e-6, (plain, counted)
    return {"sacrebleu": bleu, "signature": str(usual.get_signature()), "torchtext": counted}


@torch.inference_mode()
def perplexity(loaded: heedful.ModelBundle, folder: Path) -> dict[str, float]:
    """exp of the mean -log p, the right beginning given: of each token with the end, and of each word with the end."""
    source = read(folder, Seq2SeqExample)
    task, loaded = build_eval_task(loaded, source, "test")
    examples = list(source.examples("test"))
    samples = task.encode_split(examples).samples
    total = count = 0.0
    for start in range(0, len(samples), BATCH):
        part = samples[start : start + BATCH]
        loss = task.loss(loaded, task.batch(part, [0] * len(part)))
        total, count = total + float(loss.sum), count + loss.count
    spoken = sum(len(words(example.rewritten)) + 1 for example in examples)
    return {"of tokens": math.exp(total / count), "of words": math.exp(total / spoken)}


def curve(run: Path) -> dict[str, Any]:
    """The mean loss of each hundredth of the training steps, and what dev said at each look."""
    lines = list(read_journal(run / "journal.jsonl"))
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    size = max(1, len(losses) // 100)
    parts = [losses[start : start + size] for start in range(0, len(losses), size)]
    looks = [[line["step"], line["dev"].get("bleu")] for line in lines if "dev" in line]
    return {"loss": [[part[-1][0], statistics.fmean(loss for _, loss in part)] for part in parts], "dev bleu": looks}


class Told(Reporter):
    """Says how it goes."""

    def step(self, step: Step, trainer: Trainer) -> None:
        if step.number % EVERY == 0:
            speed = trainer.tokens_seen / trainer.seconds
            print(
                f"step {step.number} of {trainer.total_steps}, loss {step.loss:.3f}, {speed:,.0f} tokens/s", flush=True
            )

    def evaluated(self, step: int, result: EvalResult, best: bool) -> None:
        print(f"step {step}: bleu on dev {result.metric_value:.4f}{', the best' if best else ''}", flush=True)

    def message(self, text: str) -> None:
        print(text, flush=True)


def measured(arm: str, folder: Path, seed: int) -> dict[str, Any]:
    """Train an arm, or resume it, and measure it on test."""
    pairs, run = data(folder), folder / f"{arm}-{seed}"
    wishes = (*ARMS[arm], f"train.seed={seed}")
    done = finetune("seq2seq", pairs, run, assignments=wishes, reporter=Told())
    if done.status != "completed":
        raise SystemExit(130)
    loaded = heedful.load(run)
    examples = list(read(pairs, Seq2SeqExample).examples("test"))
    golds, results = [example.rewritten for example in examples], {}
    for name, writing in (
        ("greedy", GenerationConfig(max_new_tokens=60)),
        ("beams", GenerationConfig(how=BeamSearch(num_beams=BEAMS), max_new_tokens=60)),
    ):
        start = time.perf_counter()
        written = [
            answer["text"] for answer in heedful.Engine(loaded, writing=writing)([example.text for example in examples])
        ]
        results[name] = scores(written, golds) | {"seconds": time.perf_counter() - start}
    return {
        "settings": list(wishes),
        "parameters": loaded.count(),
        "training seconds": done.results["seeds"][0]["seconds"],
        "best step": done.results["seeds"][0]["best_step"],
        "perplexity": perplexity(loaded, pairs),
        "curve": curve(run),
        **results,
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Format the results as Markdown."""
    columns = ["arm", "parameters", "training", "sacrebleu, greedy", f"sacrebleu, {BEAMS} beams", "torchtext, greedy"]
    rows = [
        [
            name,
            f"{result['parameters']:,}",
            f"{result['training seconds'] / 60:.0f} min",
            *(f"{value:.2f}" for value in (result["greedy"]["sacrebleu"], result["beams"]["sacrebleu"])),
            f"{result['greedy']['torchtext']:.2f}",
            *(f"{result['perplexity'][of]:.2f}" for of in ("of tokens", "of words")),
            SAID[name],
        ]
        for name, result in results.items()
    ]
    return grid([*columns, "perplexity of tokens", "of words", "published (torchtext)"], rows)


def main() -> None:
    """Each arm after the other; what was found so far is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+", choices=list(ARMS))
    parser.add_argument(
        "--folder", type=Path, help="for data and runs, so that runs can resume; default: a temporary folder"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rehearse", action="store_true", help="a few steps of each arm, and how long all would take")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    check_destination(options.output)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if options.rehearse:
            for arm in options.arms:
                estimate = dry_run("seq2seq", data(folder), folder / arm, assignments=ARMS[arm])
                print(arm, json.dumps(estimate.to_dict()), flush=True)
            return
        results: dict[str, dict[str, Any]] = {}
        for arm in options.arms:
            results[arm] = measured(arm, folder, options.seed)
            print(arm, json.dumps({name: value for name, value in results[arm].items() if name != "curve"}), flush=True)
            about = (
                "Multi30k, German to English, 29,000 pairs, lower-cased; test 2016 (1,000 pairs). BLEU by sacrebleu, "
                f"{results[arm]['greedy']['signature']}, and by torchtext's definition over words and single marks. "
                "The epoch with the best BLEU on dev is measured."
            )
            path = write(f"translate-{options.seed}", about, [table(results)], results, options.output)
            print(path, facts()["date"], flush=True)


if __name__ == "__main__":
    main()
