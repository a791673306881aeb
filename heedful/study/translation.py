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
from heedful.checkpoint.new_head import attach
from heedful.data.examples import Rewritten
from heedful.infer.engine import Engine
from heedful.model.classic_config import Everywhere, Writer
from heedful.runs.finetune.init_settings import Transformer
from heedful.runs.finetune.seq2seq import transformer, two_nets
from heedful.runs.statistics import counted
from heedful.study import charts
from heedful.study.frame import Bench, Outcome, Plan, compared
from heedful.study.making import CLASSIC
from heedful.study.toy.language import Translation, translations
from heedful.study.toy.split import Sizes
from heedful.tasks.answering import Answer
from heedful.tasks.metrics import has_bleu
from heedful.tasks.seq2seq import Rewrite, marks
from heedful.tasks.task import Judged, evaluate
from heedful.tokenizer import Tokenizer, TokenizerSettings, train
from heedful.train.settings import AdamW, Linear, TrainSettings
from heedful.train.trainer import Trainer

NONE, LOOKS, WHOLE = "recurrent, no attention", "recurrent, attention", "Transformer"
ARMS = (NONE, LOOKS, WHOLE)
PAIRS = ((LOOKS, NONE), (WHOLE, LOOKS), (WHOLE, NONE))
WIDTH, PIECES = 64, 800
LONGEST = 64  # pieces that are written at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How much each arm learns from, and how it is measured."""

    train: int = 11_200  # sentences
    tests: int = 500
    looks: int = 100  # other sentences, on which the curve is measured
    steps: int = 350
    every: int = 50  # steps between two points of the curve
    batch: int = 32


RATE = 4e-3  # of all arms; what others give is in docs/studies.md


def model(arm: str, tokenizer: Tokenizer, seed: int) -> Loaded:
    """One arm, with a head over the pieces; all have one width."""
    if arm == WHOLE:
        settings = Transformer(layers=2, width=WIDTH, heads=4, inner=2 * WIDTH, dropout=0.0, norm_at="pre")
        config = Config(family="heedful", model=transformer(settings, tokenizer.size))
    else:
        nets = Writer(width=WIDTH, look=Everywhere(score="additive") if arm == LOOKS else None)
        config = Config(family=CLASSIC, model=two_nets(nets, tokenizer.size, WIDTH))
    return attach(create(config, tokenizer, seed=seed), "language_model", seed=seed)


def sentences(budget: Budget, seed: int) -> dict[str, list[Rewritten]]:
    """Different ones to learn from, to look at on the way, and to be measured on."""
    sizes = Sizes(train=budget.train, dev=budget.looks, test=budget.tests)
    return {split: examples(rows) for split, rows in translations(sizes, seed, clauses=1).items()}


def examples(rows: Sequence[Translation]) -> list[Rewritten]:
    """Sentences with what is right, as examples."""
    return [Rewritten(text=each.source, rewritten=each.target) for each in rows]


def pieces(given: Sequence[Rewritten]) -> Tokenizer:
    """One vocabulary of both languages."""
    texts = [text for each in given for text in each.texts]
    return train(texts, TokenizerSettings(algorithm="bpe", vocab_size=PIECES))


def task_of(loaded: Loaded, tokenizer: Tokenizer) -> Rewrite:
    """To write the sentence in English."""
    mark = marks(loaded.config.model, tokenizer)
    return Rewrite(tokenizer=tokenizer, limit=loaded.limit, mark=mark, max_new_tokens=LONGEST)


def measured(loaded: Loaded, task: Rewrite, given: Sequence[Rewritten]) -> dict[str, float]:
    """The share of sentences that are right to the letter, and BLEU from 0 to 1 where it can be measured."""
    right: list[bool] = []

    def note(number: int, example: Rewritten, answer: Answer, judged: Judged) -> None:
        right.append(answer["text"] == example.rewritten)

    result = task.result(evaluate(task, Engine(loaded, writing=task.writing), given, judged=note))
    return {"right": sum(right) / len(right)} | ({"BLEU": result["bleu"]} if "bleu" in result else {})


def learn(
    loaded: Loaded, task: Rewrite, budget: Budget, data: dict[str, list[Rewritten]], *, seed: int
) -> tuple[list[float], list[float]]:
    """Train; the loss of each step, and the share that is right after every so many."""
    settings = TrainSettings(
        max_steps=budget.steps,
        batch_size=budget.batch,
        optimizer=AdamW(lr=RATE),
        schedule=Linear(warmup_ratio=0.1),
        precision="float32",
        seed=seed,
    )
    losses, curve = [], []
    for step in Trainer(loaded, task, task.read(data["train"]).samples, settings):
        losses.append(step.loss)
        if len(losses) % budget.every == 0:
            curve.append(measured(loaded, task, data["dev"])["right"])
    return losses, curve


def run(plan: Plan) -> Outcome:
    """Every arm learns from the same sentences in the same order; real ones are Multi30k's."""
    if plan.real:
        from heedful.study import multi30k

        return multi30k.run(plan, plan.real)
    budget = plan.pick(Budget(), Budget(train=64, tests=16, looks=8, steps=2, every=1))
    bench, points = Bench(plan), budget.steps // budget.every
    for seed in plan.seeds:
        data = sentences(budget, seed)
        tokenizer = pieces(data["train"])
        for arm in bench.left(ARMS, seed):
            loaded = model(arm, tokenizer, seed)
            task = task_of(loaded, tokenizer)
            lost, curve = learn(loaded, task, budget, data, seed=seed)
            bench.note(arm, seed, measured(loaded, task, data["test"]), {"loss": lost, "right": curve})
    losses, curves = bench.curves("loss"), bench.curves("right")
    right = bench.measure("right", tests=budget.tests)
    measures = (right, bench.measure("BLEU")) if has_bleu() else (right,)
    about = (
        f"The toy language, {budget.train:,} sentences of one clause to learn from, {budget.tests:,} others to "
        f"translate, greedily: the share that is right to the letter, and BLEU by sacrebleu. One vocabulary of {PIECES}"
        f" pieces, everything {WIDTH} wide: two GRUs, without attention or with additive scores, and a Transformer of "
        f"two and two layers. {budget.steps} steps of {budget.batch} sentences at a rate of {RATE:g}."
    )
    figure = charts.dots(measures, ARMS, "The toy language: none, attention, nothing but attention")
    steps = [budget.every * (number + 1) for number in range(points)]
    panels = [
        charts.Panel(
            across="steps",
            up="right (%)",
            lines=tuple(
                charts.Line(name=arm, points=tuple((x, 100 * y) for x, y in zip(steps, curve, strict=True)))
                for arm, curve in curves.items()
            ),
        ),
        charts.Panel(
            across="steps",
            up="loss of a piece",
            lines=tuple(charts.Line(name=arm, points=charts.smooth(lost, 20)) for arm, lost in losses.items()),
        ),
    ]
    drawn = charts.lines(panels, "The toy language: how fast each learns", f"mean of {counted(len(plan.seeds))}")
    facts = {
        "steps": steps,
        "right while learning": {arm: [round(each, 4) for each in curve] for arm, curve in curves.items()},
        "loss": {arm: [round(each, 4) for each in lost] for arm, lost in losses.items()},
    }
    return Outcome(
        measures=measures,
        verdicts=compared(measures, PAIRS),
        figure=figure,
        about=about,
        facts=facts,
        others={"curves": drawn},
    )
