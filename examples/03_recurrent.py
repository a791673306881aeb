"""Translation by two recurrent networks, an encoder and a decoder, without attention and with it.

Idea: without attention, one vector has to carry the whole sentence; with attention, each token that is written looks at
all tokens that were read.
Code: `RecurrentSeq2Seq` in heedful/model/classic_config.py, heedful/model/recurrent_seq2seq.py; the made-up language of
heedful/study/toy/language.py; heedful/runs/plots/alignments.py.
Expect: after the same few steps the loss with attention is lower. Each line of the alignment is a token that is written
and the source token with its largest weight. Melu, the made-up language, puts the verb last and adjectives after nouns,
so the lines cross.
"""

from dataclasses import replace

from heedful.runs.plots.alignments import compute_alignment
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
    """Train both models; return their losses, shares of right sentences, and the alignment of one sentence."""
    budget = replace(Budget(), train=3200, test=50, dev=0, steps=steps, eval_every=steps + 1)
    data = sample_sentences(budget, seed=1)
    tokenizer = train_joint_tokenizer(data["train"])
    results: dict[str, object] = {}
    for arm in (NO_ATTENTION, ATTENTION):
        loaded = build_model(arm, tokenizer, seed=1)
        task = translation_task(loaded, tokenizer)
        losses, _ = train_translator(loaded, task, budget, data, seed=1)
        last = losses[-10:]
        results[arm] = sum(last) / len(last), translation_quality(loaded, task, data["test"])["right"]
        example = min(data["test"], key=lambda pair: len(pair.text))
        results["alignment of " + arm] = compute_alignment(loaded.eval(), example.text, example.rewritten)
    return results


if __name__ == "__main__":
    results = main()
    for arm in (NO_ATTENTION, ATTENTION):
        loss, right = results[arm]
        print(f"{arm:26} loss per token {loss:.2f}, right sentences {100 * right:.0f} %")
    shown = results["alignment of " + ATTENTION]
    print(f"\n{' '.join(shown.source)}")
    for token, weights in zip(shown.target, shown.weights, strict=True):
        attended = shown.source[weights.argmax()]
        print(f"{token:>12}  looked at {attended:8} {weights.max():.2f}   sum {weights.sum():.2f}")
