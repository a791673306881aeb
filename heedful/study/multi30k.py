"""The real form of `translation`: Multi30k, German to English (Elliott et al. 2016), by runs of hours that go on.

Each arm is a run of `heedful finetune seq2seq`, kept in a folder, so that the same command goes on where it was
stopped; the epoch with the best BLEU on dev is measured on test 2016, greedily. Texts are lower-cased, as for the
published figures of small models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heedful.atomic_io import put, put_folder, whole
from heedful.errors import HeedfulError
from heedful.runs.finetune.run import finetune
from heedful.study import charts
from heedful.study.runner import Recorder, StudyConfig, StudyResult, compare_arms
from heedful.study.translation import ARMS, ATTENTION, NO_ATTENTION, PAIRS, TRANSFORMER
from heedful.tasks.metrics import has_bleu
from heedful.train.fit import EvalResult, Reporter
from heedful.train.journal import read_journal

SUBFOLDER = ("tasks", "multi30k")  # where it is in a folder of data sets
FILES = {"train": "train", "dev": "val", "test": "test_2016_flickr"}
EVERY_ARM = (
    "init.tokenizer.vocab_size=8000",
    "task.label_smoothing=0.1",
    "task.max_new_tokens=60",
    "train.batch_size=128",
    "fit.eval_every_epochs=1",
)
NETS = (*EVERY_ARM, "init.kind=recurrent", "init.rnn.width=512", "train.optimizer.lr=1e-3")
RECIPES: dict[str, tuple[str, ...]] = {
    NO_ATTENTION: (
        *NETS,
        *("init.rnn.cell=lstm", "init.rnn.layers=2", "init.rnn.look=none", "init.rnn.dropout=0.3"),
        "train.epochs=6",
    ),
    ATTENTION: (
        *NETS,
        *("init.rnn.cell=gru", "init.rnn.look.kind=global", "init.rnn.dropout=0.3"),
        "train.epochs=15",
    ),
    TRANSFORMER: (
        *EVERY_ARM,
        *("init.kind=transformer", "init.norm_at=pre", "init.dropout=0.15"),
        "train.epochs=20",
    ),
}


def write_pairs(data: Path, folder: Path) -> Path:
    """The pairs of each split, lower-cased, as files that `finetune` reads."""
    given = data.joinpath(*SUBFOLDER)
    given = given if given.is_dir() else data
    all_files = {split: [given / f"{name}.{side}" for side in ("de", "en")] for split, name in FILES.items()}
    if lacking := [file.name for files in all_files.values() for file in files if not file.is_file()]:
        raise HeedfulError(f"{given} lacks {lacking[0]}: give --data a folder that has {'/'.join(SUBFOLDER)}")
    put_folder(folder)
    for split, files in all_files.items():
        sides = [file.read_text("utf-8").splitlines() for file in files]
        if len(sides[0]) != len(sides[1]):
            raise HeedfulError(f"{files[0]} has {len(sides[0]):,} lines and {files[1].name} {len(sides[1]):,}")
        rows = [{"source": a.strip().lower(), "target": b.strip().lower()} for a, b in zip(*sides, strict=True)]
        lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows if all(row.values()))
        with whole(folder / f"{split}.jsonl") as part:
            put(part, (line.encode() for line in lines))
    return folder


class _ArmReporter(Reporter):
    def __init__(self, arm: str, log: Callable[[str], None]) -> None:
        self.arm, self._log = arm, log

    def evaluated(self, step: int, result: EvalResult, best: bool) -> None:
        self._log(f"{self.arm}, step {step}: BLEU on dev {result.metric_value:.4f}{', the best' if best else ''}")


def run(plan: StudyConfig, data: Path) -> StudyResult:
    """Every arm learns from the same pairs; what is finished is only read."""
    assert plan.runs_dir is not None
    if not has_bleu():
        raise HeedfulError("translations of real texts are compared by BLEU: pip install 'heedful[translate]'")
    files, bench, curves = (
        write_pairs(data, plan.runs_dir / "data"),
        Recorder(plan),
        dict[str, list[tuple[float, float]]](),
    )
    for seed in plan.seeds:
        for arm, recipe in RECIPES.items():
            folder = plan.runs_dir / f"{arm.replace(', ', '-').replace(' ', '-').lower()}-{seed}"
            wishes = (*recipe, f"train.seed={seed}")
            done = finetune("seq2seq", files, folder, assignments=wishes, reporter=_ArmReporter(arm, plan.log))
            if done.status != "completed":
                raise KeyboardInterrupt
            numbers = done.results["splits"]["test"]["numbers"]
            bench.record(arm, seed, {"BLEU": numbers["bleu"], "right": numbers["exact"]})
            looks = (line for line in read_journal(folder / "journal.jsonl") if "dev" in line)
            curves.setdefault(arm, [(line["step"], 100 * line["dev"]["bleu"]) for line in looks])
            about, signature = done.results["data"], numbers["signature"]
    counts = {split: about["splits"][split]["examples"] for split in ("train", "test")}
    measures = (bench.measure("BLEU"), bench.measure("right", tests=counts["test"]))
    lines = tuple(charts.Line(name=arm, points=tuple(points)) for arm, points in curves.items())
    panel = charts.Panel(x_label="steps", y_label="BLEU on dev", lines=lines)
    text = (
        f"Multi30k, German to English, {counts['train']:,} pairs, lower-cased; {counts['test']:,} others to translate, "
        f"greedily: BLEU by sacrebleu ({signature}), and the share that is right to the letter, by the epoch that was "
        f"best on dev. Runs lie in {plan.runs_dir}."
    )
    facts: dict[str, Any] = {"BLEU on dev": curves, "settings": {arm: list(each) for arm, each in RECIPES.items()}}
    return StudyResult(
        measures=measures,
        verdicts=compare_arms(measures, PAIRS),
        figure=charts.dot_plot(measures, ARMS, "Multi30k: none, attention, nothing but attention"),
        about=text,
        facts=facts,
        extra_figures={"curves": charts.line_plot([panel], "Multi30k: how fast each learns", f"seed {plan.seeds[0]}")},
    )
