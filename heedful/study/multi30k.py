"""The study `translation` on real data: Multi30k, German to English (Elliott et al. 2016). It takes hours.

Each arm is a run of `heedful finetune seq2seq` in its own folder, so that an interrupted study can be resumed. The
model of the epoch with the best BLEU on dev translates the test set of 2016 by greedy search. Texts are lowercased, as
in published results of small models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from heedful.atomic_io import atomic_path, make_folder, write_synced
from heedful.errors import DataError, HeedfulError
from heedful.runs.finetune.run import finetune
from heedful.study import charts
from heedful.study.runner import Recorder, StudyConfig, StudyResult, compare_arms
from heedful.study.translation import ARMS, ATTENTION, NO_ATTENTION, PAIRS, TRANSFORMER
from heedful.tasks.metrics import format_metric
from heedful.tasks.specs.seq2seq import has_bleu
from heedful.train.fit import EvalResult, Reporter
from heedful.train.journal import read_journal

SUBFOLDER = ("tasks", "multi30k")  # path of Multi30k in a folder of data sets
FILES = {"train": "train", "dev": "val", "test": "test_2016_flickr"}  # name of the files of each split, without suffix
COMMON = (  # settings of all arms
    "init.tokenizer.vocab_size=8000",
    "task.label_smoothing=0.1",
    "task.max_new_tokens=60",
    "train.batch_size=128",
    "fit.eval_every_epochs=1",
)
RECURRENT = (*COMMON, "init.kind=recurrent", "init.rnn.width=512", "train.optimizer.lr=1e-3")
RECIPES: dict[str, tuple[str, ...]] = {  # settings of each arm
    NO_ATTENTION: (
        *RECURRENT,
        *("init.rnn.cell=lstm", "init.rnn.layers=2", "init.rnn.look=none", "init.rnn.dropout=0.3"),
        "train.epochs=6",
    ),
    ATTENTION: (
        *RECURRENT,
        *("init.rnn.cell=gru", "init.rnn.look.kind=global", "init.rnn.dropout=0.3"),
        "train.epochs=15",
    ),
    TRANSFORMER: (
        *COMMON,
        *("init.kind=transformer", "init.norm_at=pre", "init.dropout=0.15"),
        "train.epochs=20",
    ),
}


def write_pairs(data: Path, folder: Path) -> Path:
    """Write the sentence pairs of each split, lowercased, as files for `finetune`, and return the folder of the files.

    Args:
        data: A folder of data sets that has Multi30k, or the folder of Multi30k itself.
        folder: Folder of the new files.

    Raises:
        DataError: If a file is missing, or source and target have different line counts.
    """
    source = data.joinpath(*SUBFOLDER)
    source = source if source.is_dir() else data
    files = {split: [source / f"{name}.{language}" for language in ("de", "en")] for split, name in FILES.items()}
    if missing := [file.name for pair in files.values() for file in pair if not file.is_file()]:
        raise DataError(f"{source} lacks {missing[0]}: give --data a folder that has {'/'.join(SUBFOLDER)}")
    make_folder(folder)
    for split, (german, english) in files.items():
        sources, targets = (file.read_text("utf-8").splitlines() for file in (german, english))
        if len(sources) != len(targets):
            raise DataError(f"{german} has {len(sources):,} lines and {english.name} {len(targets):,}")
        pairs = zip(sources, targets, strict=True)
        rows = [{"source": source.strip().lower(), "target": target.strip().lower()} for source, target in pairs]
        lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows if all(row.values()))
        with atomic_path(folder / f"{split}.jsonl") as part:
            write_synced(part, (line.encode() for line in lines))
    return folder


class _ArmReporter(Reporter):
    """Logs the BLEU of one arm on dev after each evaluation."""

    def __init__(self, arm: str, log: Callable[[str], None]) -> None:
        self.arm, self._log = arm, log

    def evaluated(self, step: int, result: EvalResult, best: bool) -> None:
        bleu = format_metric("bleu", result.metric_value)
        self._log(f"{self.arm}, step {step}: BLEU on dev {bleu}{', the best' if best else ''}")


def run(config: StudyConfig) -> StudyResult:
    """Train each arm on the same pairs. The results of completed runs are read from their folders.

    Raises:
        HeedfulError: If sacrebleu is not installed.
        KeyboardInterrupt: If a run was interrupted.
    """
    assert config.runs_dir is not None and config.real_data is not None
    if not has_bleu():
        raise HeedfulError("translations of real texts are compared by BLEU: pip install 'heedful[translate]'")
    files = write_pairs(config.real_data, config.runs_dir / "data")
    recorder = Recorder(config)
    curves: dict[str, list[tuple[float, float]]] = {}  # points (step, BLEU on dev) of the first seed, by arm
    for seed in config.seeds:
        for arm, recipe in RECIPES.items():
            folder = config.runs_dir / f"{arm.replace(', ', '-').replace(' ', '-').lower()}-{seed}"
            assignments = (*recipe, f"train.seed={seed}")
            reporter = _ArmReporter(arm, config.log)
            result = finetune("seq2seq", files, folder, assignments=assignments, reporter=reporter)
            if result.status != "completed":
                raise KeyboardInterrupt
            metrics = result.results["splits"]["test"]["numbers"]
            recorder.record(arm, seed, {"BLEU": metrics["bleu"], "right": metrics["exact"]})
            evaluations = (line for line in read_journal(folder / "journal.jsonl") if "dev" in line)
            curves.setdefault(arm, [(line["step"], 100 * line["dev"]["bleu"]) for line in evaluations])
            data_facts = result.results["data"]
            signature = metrics["signature"]
    counts = {split: data_facts["splits"][split]["examples"] for split in ("train", "test")}
    measures = (recorder.measure("BLEU"), recorder.measure("right", tests=counts["test"]))
    lines = tuple(charts.Line(name=arm, points=tuple(points)) for arm, points in curves.items())
    panel = charts.Panel(x_label="steps", y_label="BLEU on dev", lines=lines)
    about = (
        f"Multi30k, German to English, {counts['train']:,} pairs, lower-cased; {counts['test']:,} others to translate "
        f"by greedy search: BLEU by sacrebleu ({signature}), and the share of exact translations, for the epoch that "
        f"was best on dev. The runs are in {config.runs_dir}."
    )
    return StudyResult(
        measures=measures,
        verdicts=compare_arms(measures, PAIRS),
        figure=charts.dot_plot(measures, ARMS, "Multi30k: without attention, with it, nothing but attention"),
        about=about,
        facts={"BLEU on dev": curves, "settings": {arm: list(recipe) for arm, recipe in RECIPES.items()}},
        extra_figures={
            "curves": charts.line_plot([panel], "Multi30k: learning curves", f"seed {config.seeds[0]}"),
        },
    )
