"""Fine-tuning: the bundled encoder, a head on top, a few hundred labelled texts.

Idea: pre-train once, then learn each task from labels; the head is one layer over the vector of the first token.
Code: `heedful.finetune` (heedful/api.py), `with_head` (heedful/checkpoint/new_head.py), heedful/tasks/classify.py.
Expect: after a few epochs, in seconds, accuracy is far above a guess among the labels; the probabilities of a text sum
to 1; the run folder holds the model, its model card, all metrics and the plots.
"""

import shutil
import tempfile
from pathlib import Path

import heedful

TEXTS = ["When do you open on Sunday?", "Is the drill still with somebody else?"]


def main(epochs: float = 3) -> dict[str, object]:
    """Fine-tune on the sample data; return metrics, answers to TEXTS and the files of the run folder."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        sample = Path(heedful.__file__).parent / "assets" / "intents"
        shutil.copytree(sample, Path(folder) / "intents")
        finished = heedful.finetune("classify", Path(folder) / "intents", run, epochs=epochs, lr=5e-4)
        return {
            "numbers": {split: result["numbers"] for split, result in finished.results["splits"].items()},
            "answers": heedful.Engine(run)(TEXTS),
            "files": sorted(path.name for path in run.iterdir()),
        }


if __name__ == "__main__":
    results = main()
    for split, numbers in results["numbers"].items():
        print(f"{split:6}accuracy {100 * numbers['accuracy']:.1f} %")
    for text, answer in zip(TEXTS, results["answers"], strict=True):
        print(f"{text:42}{answer['label']} {answer['probability']:.2f}")
    print(", ".join(results["files"]))
