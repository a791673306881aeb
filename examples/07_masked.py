"""Masked pre-training: a tiny encoder learns from text alone, by filling what is hidden.

Idea: "How to train a BERT" (D0), "Masked Language Model", 80 % hidden, 10 % replaced, 10 % kept (D0, D1, D2).
Code: heedful/objectives/masked_lm.py, run by `heedful.pretrain`; toy stories of heedful/study/toy/stories.py.
Expect: the loss on the validation stories is below ln(vocabulary), what a guess costs. It reads for
seconds, so what it fills in is mostly what is frequent; the study "pretraining" has more time.
"""

import math
import tempfile
from pathlib import Path

import heedful
from heedful.study.toy.stories import stories

SMALL = {
    "model.layers": 1,
    "model.width": 64,
    "model.heads": 2,
    "max_seq_length": 32,
    "pack_length": 256,
    "eval_fraction": 0.1,
    "corpus.sample_by": "paragraph",
    "tokenizer.vocab_size": 300,
}
TEXT = "the music is [MASK] good ."


def main(steps: int = 150) -> dict[str, object]:
    """Read for so many steps; the loss of each, and what is filled in."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "stories.txt"
        text.write_text("\n\n".join(each.replace("\n", " ") for each in stories(600, seed=1)) + "\n")
        done = heedful.pretrain(
            [text], Path(folder) / "run", objective="mlm", max_steps=steps, lr=4e-3, batch_size=4, overrides=SMALL
        )
        loss = done.results["splits"]["validation"]["numbers"]["loss"]
        engine = heedful.Engine(Path(folder) / "run")
        (answer,) = engine([TEXT])
        best = [(each["text"], each["probability"]) for each in answer["masks"][0]["tokens"]]
        return {"loss": loss, "guess": math.log(engine.tokenizer.size), "filled": best}


if __name__ == "__main__":
    found = main()
    print(f"loss of a hidden token {found['loss']:.2f}; a guess among all tokens costs {found['guess']:.2f}")
    print(f"{TEXT}  " + ", ".join(f"{text} {probability:.2f}" for text, probability in found["filled"]))
