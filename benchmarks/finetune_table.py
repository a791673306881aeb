"""Compare the scores that finetune.py and finetune_peer.py have measured so far, in tables.

python benchmarks/finetune_table.py     # writes results/finetune-DATE.md from results/finetune
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from finetune_data import PLANS
from report import RESULTS, grid, write

ABOUT = """all-MiniLM-L6-v2 with a new head, fine-tuned by Heedful (finetune.py) and by a plain PyTorch loop over
transformers' model (finetune_peer.py): the same examples, the same hyper-parameters, bfloat16 autocast over float32
weights, one seed for weights and order in each run. Scores in per cent after the last step, on examples that were not
trained on and by which nothing was chosen; after ± the standard deviation over seeds. Each file in results/finetune has
the seed, data, machine and time of its run; the machine below wrote the tables. The runs were on {devices}, commit
{commits}.

"IMDB, 5,000": both arms were trained on the same 5,000 reviews and measured on the same 5,000 test reviews. IMDB and
SQuAD as a whole were not trained with transformers. SQuAD: its 10,570 dev questions after one epoch of 24,671 questions
of SQuADShifts about other texts, without any of SQuAD.

The second table: Heedful with the epochs, batch size and learning rate that `heedful finetune` uses by default for this
amount of data, beside transformers with the hyper-parameters of the first table."""
Run = dict[str, Any]  # the result of a run, as finetune.py or finetune_peer.py writes it
Runs = dict[str, list[Run]]  # by data set
SHOWN = {  # the metrics of each data set that the tables show
    "SST-2": ("accuracy",),
    "MRPC": ("accuracy", "f1"),
    "STS-B": ("pearson", "spearman"),
    "CoNLL-2003": ("f1",),
    "RTE": ("accuracy",),
    "CoLA": ("matthews",),
    "AG News": ("accuracy",),
    "IMDB": ("accuracy",),
    "IMDB, 5,000": ("accuracy",),
    "SQuAD": ("f1", "exact"),
}


def runs_by_task(folder: Path) -> Runs:
    """Read the results of a folder by the keys of SHOWN, where a run on a sample has the sample's size in its key."""
    runs = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]

    def key(run: Run) -> str:
        return f"{run['task']}, {run['data']['held']:,}" if run["data"]["rehearsal"] else run["task"]

    return {task: [run for run in runs if key(run) == task] for task in SHOWN}


def mean_text(scores: Sequence[float]) -> str:
    """Format the mean of the scores of several seeds, their standard deviation and their number."""
    if not scores:
        return "not measured"
    if len(scores) == 1:
        return f"{scores[0]:.2f} (1 seed)"
    return f"{fmean(scores):.2f} ± {stdev(scores):.2f} ({len(scores)} seeds)"


def row(task: str, metric: str, runs: Sequence[Run], peer_runs: Sequence[Run], settings: str) -> list[str]:
    """Return the row of a metric: Heedful's scores, those of transformers, and the difference of their means."""
    scores, peer_scores = ([run["metrics"][metric] for run in arm_runs] for arm_runs in (runs, peer_runs))
    difference = f"{fmean(scores) - fmean(peer_scores):+.2f}" if scores and peer_scores else ""
    return [task, metric, mean_text(scores), mean_text(peer_scores), difference, settings]


def same_plan_rows(runs: Runs, peer_runs: Runs) -> list[list[str]]:
    """Return the rows of the first table: both arms have the hyper-parameters of PLANS."""
    rows = []
    for task, metrics in SHOWN.items():
        plan = PLANS[task.partition(",")[0]]
        settings = f"{plan.epochs} epochs, {plan.rate:g}, batch {plan.batch}, up to {plan.longest} tokens"
        if runs[task] or peer_runs[task]:
            rows += [row(task, metric, runs[task], peer_runs[task], settings) for metric in metrics]
    return rows


def default_rows(runs: Runs, peer_runs: Runs) -> list[list[str]]:
    """Return the rows of the second table: Heedful has its default hyper-parameters."""
    rows = []
    for task, metrics in SHOWN.items():
        for precision in ("float32", "bfloat16"):
            precision_runs = [run for run in runs[task] if run["precision"] == precision]
            if precision_runs:
                plan = precision_runs[0]["plan"]
                settings = f"{plan['epochs']} epochs, {plan['rate']:g}, batch {plan['batch']}, {precision}"
                rows += [row(task, metric, precision_runs, peer_runs[task], settings) for metric in metrics]
    return rows


def main() -> None:
    """Print the tables and write the record."""
    folder = RESULTS / "finetune"
    heedful_runs, peer_runs, default_runs = (
        runs_by_task(folder / name) for name in ("ours", "transformers", "defaults")
    )
    rows, defaults = same_plan_rows(heedful_runs, peer_runs), default_rows(default_runs, peer_runs)
    columns = ["task", "measure", "Heedful", "transformers", "difference"]
    texts = [grid([*columns, "plan"], rows), grid([*columns, "defaults"], defaults)]
    runs = [run for arm in (heedful_runs, peer_runs, default_runs) for task_runs in arm.values() for run in task_runs]
    about = ABOUT.format(
        devices=", ".join(sorted({str(run["device"]) for run in runs})),
        commits=", ".join(sorted({str(run["machine"]["commit"]) for run in runs})),
    )
    print(write("finetune", about, texts, {"plan": rows, "defaults": defaults}))
    print(*texts, sep="\n")


if __name__ == "__main__":
    main()
