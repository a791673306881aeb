"""Two recurrent nets without attention and with it, and a Transformer, on the toy language: who learns to translate?

    dovor askor ta vilin un tirar .        the quiet dogs see a letter .

All arms read and write the same pieces of the same sentences in the same order, greedily where they are measured. The
first has one vector for a whole sentence (Sutskever et al. 2014); the second looks at all that was read for each piece
that it writes (Bahdanau et al. 2015); the third has nothing but attention (Vaswani et al. 2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heedful.checkpoint import Config, Loaded, create
from heedful.checkpoint.attach import attach
from heedful.data.examples import Rewritten
from heedful.infer.engine import Engine
from heedful.model.classic_config import Everywhere, Writer
from heedful.runs.rewrite_making import transformer, two_nets
from heedful.runs.settings import TransformerSettings
from heedful.study.making import CLASSIC
from heedful.study.toy.language import Translation
from heedful.tasks.base import Answer
from heedful.tasks.metrics import Bleu
from heedful.tasks.rewrite import Rewrite, marks
from heedful.tasks.task import Judged, evaluate
from heedful.tokenizer import Tokenizer
from heedful.train.loop import Trainer
from heedful.train.settings import AdamW, Linear, Steps, TrainSettings

NONE, LOOKS, WHOLE = "recurrent, no attention", "recurrent, attention", "Transformer"
PAIRS = ((LOOKS, NONE), (WHOLE, LOOKS), (WHOLE, NONE))
WIDTH, PIECES = 128, 800
LONGEST = 64  # pieces that are written at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How much each arm learns from, and how it is measured."""

    train: int = 12_000  # sentences
    tests: int = 500
    looks: int = 100  # other sentences, on which the curve is measured
    steps: int = 600
    every: int = 100  # steps between two points of the curve
    batch: int = 32
    clauses: int = 1  # of a sentence, at most


RATES = {NONE: 4e-3, LOOKS: 4e-3, WHOLE: 2e-3}  # each arm's best of three on another seed, see docs/studies.md


def model(arm: str, tokenizer: Tokenizer, seed: int) -> Loaded:
    """One arm, with a head over the pieces; all have one width."""
    if arm == WHOLE:
        settings = TransformerSettings(layers=2, width=WIDTH, heads=4, inner=2 * WIDTH, dropout=0.0, norm_at="pre")
        config = Config(family="heedful", model=transformer(settings, tokenizer.size))
    else:
        nets = Writer(width=WIDTH, look=Everywhere(score="general") if arm == LOOKS else None, feed=False)
        config = Config(family=CLASSIC, model=two_nets(nets, tokenizer.size))
    return attach(create(config, tokenizer, seed=seed), "next_token", seed=seed)


def task_of(loaded: Loaded, tokenizer: Tokenizer) -> Rewrite:
    """To write the sentence in English."""
    mark = marks(loaded.config.model, tokenizer)
    return Rewrite(tokenizer=tokenizer, limit=loaded.limit, mark=mark, most=LONGEST)


def examples(rows: Sequence[Translation]) -> list[Rewritten]:
    """Sentences with what is right, as examples."""
    return [Rewritten(text=each.source, rewritten=each.target) for each in rows]


def exact(loaded: Loaded, task: Rewrite, given: Sequence[Rewritten]) -> tuple[float, float | None]:
    """The share of sentences that are right to the letter, and BLEU from 0 to 1 where it can be measured."""
    right: list[bool] = []

    def note(number: int, example: Rewritten, answer: Answer, judged: Judged) -> None:
        right.append(answer["text"] == example.rewritten)

    measure = evaluate(task, Engine(loaded, writing=task.writing), given, judged=note)
    bleu = measure.metrics.get("bleu")
    return sum(right) / len(right), bleu.result()["bleu"] if isinstance(bleu, Bleu) else None


def learn(
    loaded: Loaded, task: Rewrite, budget: Budget, data: dict[str, list[Rewritten]], *, seed: int, rate: float
) -> tuple[list[float], list[float]]:
    """Train; the loss of each step, and the share that is right after every so many."""
    settings = TrainSettings(
        length=Steps(count=budget.steps),
        batch=budget.batch,
        optimiser=AdamW(rate=rate),
        schedule=Linear(warmup=0.1),
        precision="float32",
        seed=seed,
    )
    losses, curve = [], []
    for step in Trainer(loaded, task, task.read(data["train"]).samples, settings):
        losses.append(step.loss)
        if len(losses) % budget.every == 0:
            curve.append(exact(loaded, task, data["dev"])[0])
    return losses, curve
