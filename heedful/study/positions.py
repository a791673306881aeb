"""The study `positions`: five representations of positions in a Transformer, and none, on trained and longer lengths.

The task is to find the name right before "spoke" among several names. A model without positions can only guess:

    about fay today they bo spoke cem over ivo

The study also has a permutation test: "shivas spoke to pavlos" against "pavlos spoke to shivas". Without positions the
pooled output of a Transformer does not change under any permutation of the words (Vaswani et al. 2017, section 3.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from heedful.checkpoint import ModelBundle
from heedful.data import LabelledExample
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
NAMES_PER_TEXT = 4
# measures: accuracy on texts as long as in training, accuracy on longer texts, and the result of the permutation test
NEAR, FAR, CHANGE = "trained lengths", "longer texts", "change when permuted"
SHORT = (8, 16)  # minimum and maximum number of words of a text in training
LONG = (24, 48)  # minimum and maximum number of words of a longer text
NONE = "none"
ARMS: dict[str, Positions] = {
    NONE: None,
    "learned": Learned(count=LONG[1]),  # embeddings beyond the trained lengths keep their random values
    "sine": Sinusoidal(),
    "rotary": Rotary(),
    "relative, Shaw": Shaw(reach=8),
    "buckets of distances": Buckets(count=16, reach=32),
}
PERMUTED = ("shivas spoke to pavlos about it", "pavlos spoke to shivas about it")  # texts of the permutation test


def speaker_text(random: Random, min_words: int, max_words: int) -> tuple[str, str]:
    """Return a random text, and its label: the name before "spoke"."""
    length = random.randint(min_words, max_words)
    words = [random.choice(FILLERS) for _ in range(length)]
    speaker, *other_names = random.sample(NAMES, NAMES_PER_TEXT)
    spoke = random.randrange(1, length)  # position of "spoke"
    words[spoke - 1], words[spoke] = speaker, "spoke"
    free_positions = [position for position in range(length) if position not in (spoke - 1, spoke)]
    for position, name in zip(random.sample(free_positions, NAMES_PER_TEXT - 1), other_names, strict=True):
        words[position] = name
    return " ".join(words), speaker


def speaker_texts(count: int, random: Random, lengths: tuple[int, int]) -> list[LabelledExample]:
    """Return random texts as examples; `lengths` are the minimum and the maximum number of words."""
    return labelled_examples(speaker_text(random, *lengths) for _ in range(count))


def permutation_change(loaded: ModelBundle, texts: Sequence[str] = PERMUTED) -> float:
    """Return the largest absolute difference between the logits of two texts."""
    first, second = head_outputs(loaded, texts)
    return float((first - second).abs().max())


def build_model(arm: str, tokenizer: Tokenizer, seed: int) -> ModelBundle:
    """Return a Transformer of two layers with the positions of an arm."""
    return transformer_classifier(tokenizer, NAMES, seed, positions=ARMS[arm])


def run(config: StudyConfig) -> StudyResult:
    """Train each arm on the same short texts."""
    train_count, test_count, steps = config.by_scale((6000, 600, 500), (64, 24, 2))
    recorder = Recorder(config, not_shares={CHANGE})
    for seed in config.seeds:
        random = Random(seed)
        train = speaker_texts(train_count, random, SHORT)
        short = speaker_texts(test_count, random, SHORT)
        long = speaker_texts(test_count, random, LONG)
        tokenizer = word_level_tokenizer([*(example.text for example in train), *PERMUTED])
        for arm in recorder.missing_arms(ARMS, seed):
            loaded = build_model(arm, tokenizer, seed)
            task = classification_task(tokenizer, NAMES, loaded)
            train_classifier(loaded, task, task.encode_split(train).samples, steps=steps, seed=seed)
            values = {
                NEAR: accuracy_by_part(loaded, task, short)["all"],
                FAR: accuracy_by_part(loaded, task, long)["all"],
                CHANGE: permutation_change(loaded),
            }
            recorder.record(arm, seed, values)
    changes = {arm: max(values) for arm, values in recorder.measure(CHANGE).values.items()}
    near = recorder.measure(NEAR, chance=1 / NAMES_PER_TEXT, tests=test_count)
    far = recorder.measure(FAR, chance=1 / NAMES_PER_TEXT, tests=test_count)
    near_pairs = [(arm, NONE) for arm in ARMS if arm != NONE]
    far_pairs = [(arm, "learned") for arm in ARMS if arm not in (NONE, "learned")]
    verdicts = (
        *compare_arms((near,), near_pairs, other_comparisons=len(far_pairs)),
        *compare_arms((far,), far_pairs, other_comparisons=len(near_pairs)),
        _permutation_verdict(changes),
    )
    about = (
        f'Say who spoke: the name before "spoke", of {NAMES_PER_TEXT} names in a text. Trained on texts of '
        f"{SHORT[0]} to {SHORT[1]} words, tested on such texts and on texts of {LONG[0]} to {LONG[1]}. A Transformer "
        f"of two layers and width 64; {steps} steps of 32 texts. A guess among the names of the text gets "
        f"{100 / NAMES_PER_TEXT:.0f} %."
    )
    figure = charts.dot_plot(
        (near, far), tuple(ARMS), "Who spoke? Positions, at trained lengths and beyond", "accuracy"
    )
    return StudyResult(
        measures=(near, far), verdicts=verdicts, figure=figure, about=about, facts={"change when permuted": changes}
    )


def _permutation_verdict(changes: dict[str, float]) -> str:
    """Return a sentence with the result of the permutation test.

    Args:
        changes: The largest `permutation_change` over all seeds, by arm.
    """
    text, permuted = PERMUTED
    values = ", ".join(f"{arm} {value:.2g}" for arm, value in changes.items())
    return f'permutation test, "{text}" against "{permuted}": the largest change of a score over seeds is {values}'
