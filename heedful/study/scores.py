"""The six attention scores on one task: texts that say who has what, and ask about one of them at the end.

    ana has red . bo has blue . cem has green . who asks about bo

The text's last row asks, all rows before it are the keys, and what is read decides the answer. Everything else is the
same for all arms: words, a GRU in both directions over them, the width, the steps.
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

from heedful.checkpoint import Loaded
from heedful.model.classic_config import Bag, Recurrent
from heedful.model.initialise import initialise
from heedful.nn.layout import Layout
from heedful.nn.scores import Additive, General, Location, Score, align, cosine, dot, read, scaled_dot, soft
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
ASKED = 3  # persons of a text
LONGEST = 4 * ASKED + 4
WIDTH = 64
MEAN = "no attention: the mean"
SHARP = 8.0  # what multiplies cosines, which by themselves are at most 1: a softmax of them is nearly flat

MAKES: dict[str, Callable[[], Score | None]] = {
    MEAN: lambda: None,
    f"cosine × {SHARP:g}": lambda: _sharp_cosine,
    "additive": partial(Additive, width=WIDTH, key_width=WIDTH, inner_width=WIDTH),
    "location": partial(Location, width=WIDTH, longest=LONGEST),
    "general": partial(General, width=WIDTH, key_width=WIDTH),
    "dot": lambda: dot,
    "scaled dot": lambda: scaled_dot,
}


def _sharp_cosine(q: Tensor, k: Tensor) -> Tensor:
    return SHARP * cosine(q, k)


class Asking(nn.Module):
    """W (what the last row reads of those before it) + b; without a score, the mean of those rows."""

    def __init__(self, score: Score | None, labels: int) -> None:
        super().__init__()
        self.plain = score if not isinstance(score, nn.Module) else None
        self.trained = score if isinstance(score, nn.Module) else None
        self.out = nn.Linear(WIDTH, labels)

    def forward(self, rows: Float[Tensor, "rows width"], batch: Packed) -> Float[Tensor, "sequences labels"]:
        ends = [stop for _, stop in pairwise(batch.bounds)]
        number = range(len(ends))
        layout = Layout(
            queries=tuple((at, at + 1) for at in number), keys=tuple((a, b - 1) for a, b in pairwise(batch.bounds))
        )
        last = rows[torch.tensor(ends, device=rows.device) - 1]
        score = self.trained or self.plain
        if score is None:
            weights = tuple(rows.new_full((1, b - a), 1 / (b - a)) for a, b in layout.keys)
        else:
            weights = soft(align(score, last, rows, layout))
        scores: Tensor = self.out(read(weights, rows, layout))
        return scores


def texts(count: int, random: Random) -> list[tuple[str, str]]:
    """Texts and what is right."""
    found = []
    for _ in range(count):
        who = random.sample(NAMES, ASKED)
        what = [random.choice(COLOURS) for _ in who]
        asked = random.randrange(ASKED)
        said = " . ".join(f"{name} has {colour}" for name, colour in zip(who, what, strict=True))
        found.append((f"{said} . who asks about {who[asked]}", what[asked]))
    return found


def build_model(arm: str, tokenizer: Tokenizer, seed: int) -> Loaded:
    """The classic model with another head over its rows."""
    loaded = classic_classifier(
        tokenizer, COLOURS, seed, Bag(over=Recurrent(cell="gru", width=WIDTH // 2)), width=WIDTH
    )
    loaded.head = head = Asking(MAKES[arm](), len(COLOURS))
    generator = torch.Generator().manual_seed(seed)
    for part in (head.out, head.trained):  # in this order: what all arms have is the same for all
        if part is not None:
            initialise(part, loaded.config.model.initialisation, generator)
    return loaded


def run(plan: StudyConfig) -> StudyResult:
    """Every arm learns from the same texts in the same order."""
    count, tests, steps = plan.by_scale(4000, 64), plan.by_scale(1000, 32), plan.by_scale(600, 2)
    bench, batch, rate = Recorder(plan), 16, 4e-3
    for seed in plan.seeds:
        random = Random(seed)
        train, test = labelled_examples(texts(count, random)), labelled_examples(texts(tests, random))
        tokenizer = word_level_tokenizer(each.text for each in train)
        for arm in bench.missing_arms(MAKES, seed):
            loaded = build_model(arm, tokenizer, seed)
            task = classification_task(tokenizer, COLOURS, loaded)
            samples, began = task.read(train).samples, time.monotonic()
            losses = train_classifier(loaded, task, samples, steps=steps, seed=seed, batch_size=batch, lr=rate)
            spent = 1e3 * (time.monotonic() - began) / steps
            right = accuracy_by_part(loaded, task, test)["all"]
            bench.record(arm, seed, {"right answers": right, "ms of a step": spent}, {"loss": losses})
    curves = bench.mean_curves("loss")
    measure = bench.measure("right answers", chance=1 / ASKED, tests=tests)
    costs = bench.measure("ms of a step", unit="number")
    others = [arm for arm in MAKES if arm not in (MEAN, "scaled dot")]
    verdicts = compare_arms((measure,), [*(("scaled dot", arm) for arm in others), ("scaled dot", MEAN)])
    about = (
        f"{ASKED} persons have one of {len(COLOURS)} colours each, and the last word asks about one of them. The last "
        f"row is the query, the rows before it are keys and values; a GRU in both directions, {WIDTH} wide, makes all "
        f"of them. {steps} steps of {batch} texts at a rate of {rate:g}, {tests:,} other texts answered. Cosines are "
        f"multiplied by {SHARP:g} before the softmax; location scores never see a key. A guess among the colours of "
        f"the text gets a little more than {100 / ASKED:.0f} %, since colours repeat."
    )
    figure = charts.dot_plot((measure,), tuple(MAKES), "Who has what: six scores on one task")
    panel = charts.Panel(
        x_label="steps",
        y_label="loss",
        lines=tuple(charts.Line(name=arm, points=charts.smooth(curve, 20)) for arm, curve in curves.items()),
    )
    curve = charts.line_plot([panel], "Who has what: how fast each score learns", "training loss, means of 20 steps")
    facts = {"loss": {arm: [round(each, 4) for each in curve] for arm, curve in curves.items()}}
    return StudyResult(
        measures=(measure, costs),
        verdicts=verdicts,
        figure=figure,
        about=about,
        facts=facts,
        extra_figures={"curves": curve},
    )
