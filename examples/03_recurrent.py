"""Two recurrent nets, one that reads and one that writes, without attention and with it; and where it looked.

Idea: "it's absurd that the entire meaning is packed into one embedding" (D4, seq2seq); with attention each token that
is written looks at all that were read (D0 and D4, "seq2seq + Attention").
Code: heedful/model/recurrent_seq2seq.py, `RecurrentSeq2Seq` in heedful/model/classic_config.py; the toy language of
heedful/study/toy/language.py; heedful/runs/plots/alignments.py.
Expect: after the same few steps the loss with attention is lower. Each line of the alignment is a token that is
written and what it looked at most: Melu has its verb last and adjectives behind nouns, so the places cross.
"""

from dataclasses import replace

from heedful.runs.plots.alignments import alignment
from heedful.study.translation import (
    ATTENTION,
    NO_ATTENTION,
    Budget,
    build_model,
    sample_sentences,
    train_joint_tokenizer,
    train_translator,
    translation_quality,
    translation_task,
)


def main(steps: int = 130) -> dict[str, object]:
    """Train both for so many steps; losses, right answers, one alignment."""
    budget = replace(Budget(), train=3200, test=50, dev=0, steps=steps, eval_every=steps + 1)
    data = sample_sentences(budget, seed=1)
    tokenizer = train_joint_tokenizer(data["train"])
    found: dict[str, object] = {}
    for arm in (NO_ATTENTION, ATTENTION):
        loaded = build_model(arm, tokenizer, seed=1)
        task = translation_task(loaded, tokenizer)
        losses, _ = train_translator(loaded, task, budget, data, seed=1)
        last = losses[-10:]
        found[arm] = sum(last) / len(last), translation_quality(loaded, task, data["test"])["right"]
        example = min(data["test"], key=lambda each: len(each.text))
        found["alignment of " + arm] = alignment(loaded.eval(), example.text, example.rewritten)
    return found


if __name__ == "__main__":
    found = main()
    for arm in (NO_ATTENTION, ATTENTION):
        loss, right = found[arm]
        print(f"{arm:26} loss of a token {loss:.2f}, sentences that are right {100 * right:.0f} %")
    looked = found["alignment of " + ATTENTION]
    print(f"\n{' '.join(looked.read)}")
    for token, weights in zip(looked.written, looked.weights, strict=True):
        print(f"{token:>12}  looked at {looked.read[weights.argmax()]:8} {weights.max():.2f}   sum {weights.sum():.2f}")
