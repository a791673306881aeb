"""Masked pre-training: a tiny encoder learns from text alone, by predicting hidden tokens.

Idea: the masked language model of BERT. Of the selected tokens 80 % are hidden, 10 % are replaced and 10 % stay.
Code: heedful/objectives/masked_lm.py, run by `heedful.pretrain`; made-up stories of heedful/study/toy/stories.py.
Expect: the loss on the validation stories is below ln(vocabulary size), the loss of a uniform guess. The model trains
for seconds, so it mostly predicts frequent words; `heedful study pretraining` trains longer.
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
    """Pre-train on made-up stories; return the validation loss, that of a guess, and the words predicted for TEXT."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "stories.txt"
        text.write_text("\n\n".join(story.replace("\n", " ") for story in stories(600, seed=1)) + "\n")
        run = heedful.pretrain(
            [text], Path(folder) / "run", objective="mlm", max_steps=steps, lr=4e-3, batch_size=4, overrides=SMALL
        )
        loss = run.results["splits"]["validation"]["numbers"]["loss"]
        engine = heedful.Engine(Path(folder) / "run")
        (answer,) = engine([TEXT])
        best = [(token["text"], token["probability"]) for token in answer["masks"][0]["candidates"]]
        return {"loss": loss, "guess": math.log(engine.tokenizer.size), "filled": best}


if __name__ == "__main__":
    results = main()
    print(f"loss per hidden token {results['loss']:.2f}; a uniform guess has {results['guess']:.2f}")
    print(f"{TEXT}  " + ", ".join(f"{text} {probability:.2f}" for text, probability in results["filled"]))
