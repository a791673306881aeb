"""Measure translation by recurrent nets, without and with attention, and by a small Transformer, on Multi30k.

The direction is German to English; the test split is test 2016.

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
BATCH = 256  # pairs whose loss is computed at once
EVERY = 100  # training steps between two lines of output
PUBLISHED = {  # published results on these data: torchtext's BLEU, and the perplexity of words
    "none": "14, perplexity 43.8",
    "attention": "28, perplexity 23.2",
    "transformer": "36.52, perplexity 5.316",
}
ARMS = dict(zip(PUBLISHED, multi30k.RECIPES.values(), strict=True))


def data(folder: Path) -> Path:
    """Write the lower-cased pairs of each split, and return their folder."""
    return multi30k.write_pairs(Path(os.environ.get("HEEDFUL_DATA", "absent")), folder / "data")


def words(text: str) -> list[str]:
    """Split a text into words and single punctuation marks, about as the tokenizer of the published figures does."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def counted_bleu(written: Sequence[str], golds: Sequence[str]) -> float:
    """Return torchtext's BLEU of the words, in per cent: exp(min(0, 1 - r / c) + mean log p_n), n = 1 to 4.

    r and c are the words of the golds and of the written texts. It is not smoothed: 0 if some precision p_n is 0.
    """
    matches, totals = [0] * 4, [0] * 4
    written_count = gold_count = 0
    for written_text, gold_text in zip(written, golds, strict=True):
        written_words, gold_words = words(written_text), words(gold_text)
        written_count += len(written_words)
        gold_count += len(gold_words)
        for n in range(1, 5):
            written_ngrams, gold_ngrams = (
                Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
                for tokens in (written_words, gold_words)
            )
            matches[n - 1] += (written_ngrams & gold_ngrams).total()
            totals[n - 1] += written_ngrams.total()
    if not all(matches):
        return 0.0
    mean_log = sum(math.log(match / total) for match, total in zip(matches, totals, strict=True)) / 4
    return 100 * math.exp(min(0.0, 1 - gold_count / written_count) + mean_log)


def scores(written: list[str], golds: list[str]) -> dict[str, Any]:
    """Return sacrebleu's BLEU with its signature, and torchtext's BLEU, which sacrebleu has to confirm."""
    from sacrebleu.metrics.bleu import BLEU

    usual = BLEU(lowercase=True, force=True)
    bleu = usual.corpus_score(written, [golds]).score
    written_words, gold_words = ([" ".join(words(text)) for text in texts] for texts in (written, golds))
    unsmoothed = BLEU(tokenize="none", smooth_method="none", force=True)
    expected = unsmoothed.corpus_score(written_words, [gold_words]).score
    counted = counted_bleu(written, golds)
    assert abs(expected - counted) < 1e-6, (expected, counted)
    return {"sacrebleu": bleu, "signature": str(usual.get_signature()), "torchtext": counted}


@torch.inference_mode()
def perplexity(loaded: heedful.ModelBundle, folder: Path) -> dict[str, float]:
    """Return the perplexity of the golds' tokens and of their words; each text's end is one more token and word."""
    source = read(folder, Seq2SeqExample)
    task, loaded = build_eval_task(loaded, source, "test")
    examples = list(source.examples("test"))
    samples = task.encode_split(examples).samples
    loss_sum = token_count = 0.0
    for start in range(0, len(samples), BATCH):
        batch = samples[start : start + BATCH]
        loss = task.loss(loaded, task.batch(batch, [0] * len(batch)))
        loss_sum += float(loss.sum)
        token_count += loss.count
    word_count = sum(len(words(example.rewritten)) + 1 for example in examples)
    return {"of tokens": math.exp(loss_sum / token_count), "of words": math.exp(loss_sum / word_count)}


def curve(run: Path) -> dict[str, Any]:
    """Return the mean loss of each hundredth of the training steps, and the BLEU on dev at each evaluation."""
    lines = list(read_journal(run / "journal.jsonl"))
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    size = max(1, len(losses) // 100)
    hundredths = [losses[start : start + size] for start in range(0, len(losses), size)]
    return {
        "loss": [[points[-1][0], statistics.fmean(loss for _, loss in points)] for points in hundredths],
        "dev bleu": [[line["step"], line["dev"].get("bleu")] for line in lines if "dev" in line],
    }


class PrintingReporter(Reporter):
    """A reporter that prints the progress of a training."""

    def step(self, step: Step, trainer: Trainer) -> None:
        if step.number % EVERY == 0:
            progress = f"step {step.number} of {trainer.total_steps}, loss {step.loss:.3f}"
            print(f"{progress}, {trainer.tokens_seen / trainer.seconds:,.0f} tokens/s", flush=True)

    def evaluated(self, step: int, result: EvalResult, best: bool) -> None:
        print(f"step {step}: bleu on dev {result.metric_value:.4f}{', the best' if best else ''}", flush=True)

    def message(self, text: str) -> None:
        print(text, flush=True)


def measured(arm: str, folder: Path, seed: int) -> dict[str, Any]:
    """Train an arm, or resume its training, and measure it on test."""
    pairs, run = data(folder), folder / f"{arm}-{seed}"
    settings = (*ARMS[arm], f"train.seed={seed}")
    done = finetune("seq2seq", pairs, run, assignments=settings, reporter=PrintingReporter())
    if done.status != "completed":
        raise SystemExit(130)
    loaded = heedful.load(run)
    examples = list(read(pairs, Seq2SeqExample).examples("test"))
    texts = [example.text for example in examples]
    golds = [example.rewritten for example in examples]
    results = {}
    for name, writing in (
        ("greedy", GenerationConfig(max_new_tokens=60)),
        ("beams", GenerationConfig(how=BeamSearch(num_beams=BEAMS), max_new_tokens=60)),
    ):
        start = time.perf_counter()
        written = [answer["text"] for answer in heedful.Engine(loaded, writing=writing)(texts)]
        results[name] = scores(written, golds) | {"seconds": time.perf_counter() - start}
    return {
        "settings": list(settings),
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
            PUBLISHED[name],
        ]
        for name, result in results.items()
    ]
    return grid([*columns, "perplexity of tokens", "of words", "published (torchtext)"], rows)


def main() -> None:
    """Train and measure one arm after another; write the record again after each."""
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
