"""The study `scores`: six attention scores on one retrieval task. Each text states facts and ends with a question.

    ana has red . bo has blue . cem has green . who asks about bo

An attention score says how well a key fits a query. Here the hidden state of the last word is the query, and those of
all words before it are keys and values. The sum of the values, weighted by the softmax of the scores, decides the
answer. All arms have the same initial word vectors, bidirectional GRU, hidden size and number of steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from random import Random

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.checkpoint import ModelBundle
from heedful.model.classic_config import BagPooling, Recurrent
from heedful.model.initialise import initialise
from heedful.nn.layout import Layout
from heedful.nn.scores import (
    Additive,
    General,
    Location,
    Score,
    align,
    cosine,
    dot,
    scaled_dot,
    soft_weights,
    weighted_sum,
)
from heedful.packed import Packed
from heedful.study import charts
from heedful.study.build import (
    accuracy_by_part,
    classic_classifier,
    classification_task,
    labelled_examples,
    train_classifier,
    word_level_tokenizer,
)
from heedful.study.runner import Recorder, StudyConfig, StudyResult, compare_arms
from heedful.tokenizer import Tokenizer

NAMES = ["ana", "bo", "cem", "dora", "edo", "fay", "gil", "hana", "ivo", "jun"]
COLOURS = ("red", "blue", "green", "white", "black", "pink")
PERSONS = 3  # persons in a text
MAX_WORDS = 4 * PERSONS + 4  # maximum words of a text
WIDTH = 64  # hidden size
MEAN = "no attention: the mean"
COSINE_SCALE = 8.0  # factor of cosines before the softmax, which would be nearly uniform for numbers from -1 to 1

ARMS: dict[str, Callable[[], Score | None]] = {  # function that returns the score of each arm, or None for the mean
    MEAN: lambda: None,
    f"cosine × {COSINE_SCALE:g}": lambda: _scaled_cosine,
    "additive": partial(Additive, width=WIDTH, key_width=WIDTH, inner_width=WIDTH),
    "location": partial(Location, width=WIDTH, longest=MAX_WORDS),
    "general": partial(General, width=WIDTH, key_width=WIDTH),
    "dot": lambda: dot,
    "scaled dot": lambda: scaled_dot,
}


def _scaled_cosine(q: Tensor, k: Tensor) -> Tensor:
    """Return the cosine of query and key times COSINE_SCALE."""
    return COSINE_SCALE * cosine(q, k)


class QueryHead(nn.Module):
    """W z + b, with z the attention of the last hidden state to all earlier ones.

    Args:
        score: The score of query and keys, a function or a module. If None, z is the mean of the earlier hidden states.
        num_labels: Number of classes.
    """

    def __init__(self, score: Score | None, num_labels: int) -> None:
        super().__init__()
        self.score_function = score if not isinstance(score, nn.Module) else None
        self.score_module = score if isinstance(score, nn.Module) else None
        self.out = nn.Linear(WIDTH, num_labels)

    def forward(self, states: Float[Tensor, "tokens hidden"], batch: Packed) -> Float[Tensor, "sequences labels"]:
        spans = list(pairwise(batch.bounds))
        layout = Layout(
            queries=tuple((index, index + 1) for index in range(len(spans))),
            keys=tuple((start, stop - 1) for start, stop in spans),
        )
        queries = states[torch.tensor([stop for _, stop in spans], device=states.device) - 1]
        score = self.score_module or self.score_function
        if score is None:
            weights = tuple(states.new_full((1, stop - start), 1 / (stop - start)) for start, stop in layout.keys)
        else:
            weights = soft_weights(align(score, queries, states, layout))
        logits: Tensor = self.out(weighted_sum(weights, states, layout))
        return logits


def question_texts(count: int, random: Random) -> list[tuple[str, str]]:
    """Return `count` random texts, each with the colour that answers its question."""
    pairs = []
    for _ in range(count):
        names = random.sample(NAMES, PERSONS)
        colours = [random.choice(COLOURS) for _ in names]
        person = random.randrange(PERSONS)  # index of the person in the question
        facts = " . ".join(f"{name} has {colour}" for name, colour in zip(names, colours, strict=True))
        pairs.append((f"{facts} . who asks about {names[person]}", colours[person]))
    return pairs


def build_model(arm: str, tokenizer: Tokenizer, seed: int) -> ModelBundle:
    """Return a classic model whose head attends with the score of an arm."""
    reader = BagPooling(over=Recurrent(cell="gru", width=WIDTH // 2))
    loaded = classic_classifier(tokenizer, COLOURS, seed, reader, width=WIDTH)
    loaded.head = head = QueryHead(ARMS[arm](), len(COLOURS))
    generator = torch.Generator().manual_seed(seed)
    for module in (head.out, head.score_module):  # in this order: the output layer has the same weights in all arms
        if module is not None:
            initialise(module, loaded.config.model.initialisation, generator)
    return loaded


def run(config: StudyConfig) -> StudyResult:
    """Train every arm on the same texts in the same order."""
    train_count, test_count, steps = config.by_scale((4000, 1000, 600), (64, 32, 2))
    batch_size, lr = 16, 4e-3
    recorder = Recorder(config, not_shares={"ms of a step"})
    for seed in config.seeds:
        random = Random(seed)
        train = labelled_examples(question_texts(train_count, random))
        test = labelled_examples(question_texts(test_count, random))
        tokenizer = word_level_tokenizer(example.text for example in train)
        for arm in recorder.missing_arms(ARMS, seed):
            loaded = build_model(arm, tokenizer, seed)
            task = classification_task(tokenizer, COLOURS, loaded)
            samples = task.encode_split(train).samples
            start = time.monotonic()
            losses = train_classifier(loaded, task, samples, steps=steps, seed=seed, batch_size=batch_size, lr=lr)
            milliseconds = 1e3 * (time.monotonic() - start) / steps
            accuracy = accuracy_by_part(loaded, task, test)["all"]
            recorder.record(arm, seed, {"right answers": accuracy, "ms of a step": milliseconds}, {"loss": losses})
    curves = recorder.mean_curves("loss")
    measure = recorder.measure("right answers", chance=1 / PERSONS, tests=test_count)
    costs = recorder.measure("ms of a step", unit="number")
    other_scores = [arm for arm in ARMS if arm not in (MEAN, "scaled dot")]
    verdicts = compare_arms((measure,), [("scaled dot", arm) for arm in (*other_scores, MEAN)])
    about = (
        f"{PERSONS} persons have one of {len(COLOURS)} colours each, and the last word asks about one of them. The "
        f"last hidden state is the query, those before it are keys and values, all of a bidirectional GRU of width "
        f"{WIDTH}. {steps} steps of {batch_size} texts with learning rate {lr:g}; {test_count:,} other texts to "
        f"answer. Cosines are multiplied by {COSINE_SCALE:g} before the softmax; location scores do not depend on "
        f"keys. A guess among the colours of the text gets a little more than {100 / PERSONS:.0f} %, since colours "
        "repeat."
    )
    figure = charts.dot_plot((measure,), tuple(ARMS), "Who has what: six scores on one task")
    panel = charts.Panel(
        x_label="steps",
        y_label="loss",
        lines=tuple(charts.Line(name=arm, points=charts.smooth(curve, 20)) for arm, curve in curves.items()),
    )
    curve_figure = charts.line_plot(
        [panel], "Who has what: how fast each score learns", "training loss, means of 20 steps"
    )
    facts = {"loss": {arm: [round(loss, 4) for loss in curve] for arm, curve in curves.items()}}
    return StudyResult(
        measures=(measure, costs),
        verdicts=verdicts,
        figure=figure,
        about=about,
        facts=facts,
        extra_figures={"curves": curve_figure},
    )
