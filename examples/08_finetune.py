"""Fine-tuning: the encoder that ships, a head on top, a few hundred labelled texts.

Idea: "How to use a BERT?" (D0): pre-train once, then learn the task with labels; a layer over the first row (D0, D1, D2
"BERT Fine-Tuning Examples", D3 "BERT Encoder for text classification").
Code: `heedful.finetune` (heedful/api.py), `with_head` (heedful/checkpoint/new_head.py), heedful/tasks/classify.py.
Expect: well above a guess among the labels after a few passes, within seconds; probabilities sum to 1; the run's folder
has the model, its card, every number and the plots.
"""

import shutil
import tempfile
from pathlib import Path

import heedful

TEXTS = ["When do you open on Sunday?", "Is the drill still with somebody else?"]


def main(epochs: float = 3) -> dict[str, object]:
    """Learn for so many passes over the data; what was found."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        sample = Path(heedful.__file__).parent / "assets" / "intents"
        shutil.copytree(sample, Path(folder) / "intents")
        done = heedful.finetune("classify", Path(folder) / "intents", run, epochs=epochs, lr=5e-4)
        return {
            "numbers": {split: each["numbers"] for split, each in done.results["splits"].items()},
            "answers": heedful.Engine(run)(TEXTS),
            "files": sorted(path.name for path in run.iterdir()),
        }


if __name__ == "__main__":
    found = main()
    for split, numbers in found["numbers"].items():
        print(f"{split:6}accuracy {100 * numbers['accuracy']:.1f} %")
    for text, answer in zip(TEXTS, found["answers"], strict=True):
        print(f"{text:42}{answer['label']} {answer['probability']:.2f}")
    print(", ".join(found["files"]))
