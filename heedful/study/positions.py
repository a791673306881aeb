"""Six ways to tell a Transformer where words stand, inside the length that it trained on and beyond it.

The task: of several names in a text, say the one right before "spoke". Every name of the text could be the answer, so
without order the best guess is one of them:

    about fay today they bo spoke cem over ivo

And the permutation test: "shivas spoke to pavlos" against "pavlos spoke to shivas". Without positions a Transformer
cannot tell them apart: its pooled output does not change under any permutation of the words (Vaswani et al. 2017, 3.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from heedful.checkpoint import Loaded
from heedful.data import Labelled
from heedful.model.config import Buckets, Learned, Rotary, Shaw, Sinusoidal
from heedful.study import charts
from heedful.study.build import (
    Positions,
    accuracy_by_part,
    classification_task,
    head_outputs,
    labelled_examples,
    train_classifier,
    transformer_classifier,
    word_level_tokenizer,
)
from heedful.study.runner import Recorder, StudyConfig, StudyResult, compare_arms
from heedful.tokenizer import Tokenizer

NAMES = ["shivas", "pavlos", "ana", "bo", "cem", "fay", "gil", "ivo"]
FILLERS = [
    "today",
    "they",
    "about",
    "over",
    "then",
    "with",
    "near",
    "and",
    "after",
    "some",
    "of",
    "the",
    "to",
    "all",
    "again",
    "it",
]
SOME = 4  # names of a text
NEAR, FAR, CHANGE = "trained lengths", "longer texts", "change when permuted"
SHORT, LONG = (8, 16), (24, 48)  # words of a text: of those learned from, and of longer ones
NONE = "none"
ARMS: dict[str, Positions] = {
    NONE: None,
    "learned": Learned(count=LONG[1]),  # rows beyond the trained length are there, as they were drawn
    "sine": Sinusoidal(),
    "rotary": Rotary(),
    "relative, Shaw": Shaw(reach=8),
    "buckets of distances": Buckets(count=16, reach=32),
}
SPOKEN = ("shivas spoke to pavlos about it", "pavlos spoke to shivas about it")


def text(random: Random, least: int, most: int) -> tuple[str, str]:
    """One, and who spoke."""
    length = random.randint(least, most)
    found = [random.choice(FILLERS) for _ in range(length)]
    names = random.sample(NAMES, SOME)
    at = random.randrange(1, length)
    found[at - 1], found[at] = names[0], "spoke"
    free = [place for place in range(length) if place not in (at - 1, at)]
    for place, name in zip(random.sample(free, SOME - 1), names[1:], strict=True):
        found[place] = name
    return " ".join(found), names[0]


def speaker_texts(count: int, random: Random, lengths: tuple[int, int]) -> list[Labelled]:
    """So many, as examples."""
    return labelled_examples(text(random, *lengths) for _ in range(count))


def permutation_change(loaded: Loaded, given: Sequence[str] = SPOKEN) -> float:
    """The largest difference between what the model says of one text and of the same words in another order."""
    one, other = head_outputs(loaded, given)
    return float((one - other).abs().max())


def build_model(arm: str, tokenizer: Tokenizer, seed: int) -> Loaded:
    """A Transformer of two layers with positions of that kind."""
    return transformer_classifier(tokenizer, NAMES, seed, positions=ARMS[arm])


def run(plan: StudyConfig) -> StudyResult:
    """Each arm learns from the same short texts."""
    count, tests, steps = plan.by_scale(6000, 64), plan.by_scale(600, 24), plan.by_scale(500, 2)
    bench = Recorder(plan)
    for seed in plan.seeds:
        random = Random(seed)
        train, inside, beyond = (
            speaker_texts(number, random, lengths)
            for number, lengths in ((count, SHORT), (tests, SHORT), (tests, LONG))
        )
        tokenizer = word_level_tokenizer([*(each.text for each in train), *SPOKEN])
        for arm in bench.missing_arms(ARMS, seed):
            loaded = build_model(arm, tokenizer, seed)
            task = classification_task(tokenizer, NAMES, loaded)
            train_classifier(loaded, task, task.read(train).samples, steps=steps, seed=seed)
            found = {
                name: accuracy_by_part(loaded, task, test)["all"] for name, test in ((NEAR, inside), (FAR, beyond))
            }
            bench.record(arm, seed, found | {CHANGE: permutation_change(loaded)})
    changes = {arm: max(each) for arm, each in bench.measure(CHANGE).values.items()}
    near, far = (bench.measure(name, chance=1 / SOME, tests=tests) for name in (NEAR, FAR))
    inside_pairs = [(arm, NONE) for arm in ARMS if arm != NONE]
    beyond_pairs = [(arm, "learned") for arm in ARMS if arm not in (NONE, "learned")]
    verdicts = (
        *compare_arms((near,), inside_pairs, other_comparisons=len(beyond_pairs)),
        *compare_arms((far,), beyond_pairs, other_comparisons=len(inside_pairs)),
        *_permuted(changes),
    )
    about = (
        f'Say who spoke: the name before "spoke", of {SOME} names in a text. Learned from texts of {SHORT[0]} to '
        f"{SHORT[1]} words, measured on such texts and on texts of {LONG[0]} to {LONG[1]}. A Transformer of two "
        f"layers, 64 wide; {steps} steps of 32 texts. A guess among the names of the text gets {100 / SOME:.0f} %."
    )
    figure = charts.dot_plot(
        (near, far), tuple(ARMS), "Who spoke? Positions, at trained lengths and beyond", "accuracy"
    )
    return StudyResult(
        measures=(near, far), verdicts=verdicts, figure=figure, about=about, facts={"change when permuted": changes}
    )


def _permuted(changes: dict[str, float]) -> tuple[str, ...]:
    one, other = SPOKEN
    told = ", ".join(f"{arm} {value:.2g}" for arm, value in changes.items())
    return (f'permutation test, "{one}" against "{other}": the largest change of a score over seeds is {told}',)
