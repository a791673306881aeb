"""Quality of fine-tuning, one table of what finetune.py and finetune_peer.py have measured so far.

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
SHOWN = {
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


def found(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Read the runs of a folder by task; of runs on samples, by the size of the sample as well."""
    runs = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]

    def name(run: dict[str, Any]) -> str:
        return f"{run['task']}, {run['data']['held']:,}" if run["data"]["rehearsal"] else run["task"]

    return {task: [run for run in runs if name(run) == task] for task in SHOWN}


def told(numbers: Sequence[float]) -> str:
    """The mean, and what it is of."""
    if not numbers:
        return "not measured"
    deviation = f" ± {stdev(numbers):.2f}" if numbers[1:] else ""
    return f"{fmean(numbers):.2f}{deviation} ({len(numbers)} seed{'s' if numbers[1:] else ''})"


def _device(run: dict[str, Any]) -> str:
    return str(run["device"])


def _commit(run: dict[str, Any]) -> str:
    return str(run["machine"]["commit"])


def main() -> None:
    """Write the table."""
    heedful_runs, peer_runs = (found(RESULTS / "finetune" / name) for name in ("ours", "transformers"))
    rows = []
    for task, measures in SHOWN.items():
        plan = PLANS[task.partition(",")[0]]
        how = f"{plan.epochs} epochs, {plan.rate:g}, batch {plan.batch}, up to {plan.longest} tokens"
        for measure in measures:
            mine, peer = ([run["metrics"][measure] for run in runs[task]] for runs in (heedful_runs, peer_runs))
            if mine or peer:
                ahead = f"{fmean(mine) - fmean(peer):+.2f}" if mine and peer else ""
                rows.append([task, measure, told(mine), told(peer), ahead, how])
    own, more = found(RESULTS / "finetune" / "defaults"), []
    for task, measures in SHOWN.items():
        for precision in ("float32", "bfloat16"):
            same = [run for run in own[task] if run["precision"] == precision]
            for measure in measures if same else ():
                mine, peer = ([run["metrics"][measure] for run in runs] for runs in (same, peer_runs[task]))
                plan = same[0]["plan"]
                how = f"{plan['epochs']} epochs, {plan['rate']:g}, batch {plan['batch']}, {precision}"
                ahead = f"{fmean(mine) - fmean(peer):+.2f}" if peer else ""
                more.append([task, measure, told(mine), told(peer), ahead, how])
    columns = ["task", "measure", "Heedful", "transformers", "difference"]
    texts = [grid([*columns, "plan"], rows), grid([*columns, "defaults"], more)]
    runs = [run for arm in (heedful_runs, peer_runs, own) for task_runs in arm.values() for run in task_runs]
    devices, commits = (", ".join(sorted({value(run) for run in runs})) for value in (_device, _commit))
    about = ABOUT.format(devices=devices, commits=commits)
    print(write("finetune", about, texts, {"plan": rows, "defaults": more}))
    print(*texts, sep="\n")


if __name__ == "__main__":
    main()
