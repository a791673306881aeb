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
from heedful.runs.finetune.seq2seq import recurrent_config, transformer_config
from heedful.runs.statistics import seed_count
from heedful.study import charts
from heedful.study.build import CLASSIC
from heedful.study.runner import Recorder, StudyConfig, StudyResult, compare_arms
from heedful.study.toy.language import Translation, translations
from heedful.study.toy.split import Sizes
from heedful.tasks.answering import Answer
from heedful.tasks.metrics import has_bleu
from heedful.tasks.seq2seq import Seq2Seq, sequence_ends
from heedful.tasks.task import ScoredAnswer, evaluate_task
from heedful.tokenizer import Tokenizer, TokenizerSettings, train
from heedful.train.settings import AdamW, Linear, TrainSettings
from heedful.train.trainer import Trainer

NO_ATTENTION = "recurrent, no attention"
ATTENTION = "recurrent, attention"
TRANSFORMER = "Transformer"
ARMS = (NO_ATTENTION, ATTENTION, TRANSFORMER)
PAIRS = ((ATTENTION, NO_ATTENTION), (TRANSFORMER, ATTENTION), (TRANSFORMER, NO_ATTENTION))
WIDTH, PIECES = 64, 800
LONGEST = 64  # pieces that are written at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How much each arm learns from, and how it is measured."""

    train: int = 11_200  # sentences
    test: int = 500
    dev: int = 100  # other sentences, on which the curve is measured
    steps: int = 350
    eval_every: int = 50  # steps between two points of the curve
    batch_size: int = 32


RATE = 4e-3  # of all arms; what others give is in docs/studies.md


def build_model(arm: str, tokenizer: Tokenizer, seed: int) -> Loaded:
    """One arm, with a head over the pieces; all have one width."""
    if arm == TRANSFORMER:
        settings = Transformer(layers=2, width=WIDTH, heads=4, inner=2 * WIDTH, dropout=0.0, norm_at="pre")
        config = Config(family="heedful", model=transformer_config(settings, tokenizer.size))
    else:
        nets = Writer(width=WIDTH, look=Everywhere(score="additive") if arm == ATTENTION else None)
        config = Config(family=CLASSIC, model=recurrent_config(nets, tokenizer.size, WIDTH))
    return attach(create(config, tokenizer, seed=seed), "language_model", seed=seed)


def sample_sentences(budget: Budget, seed: int) -> dict[str, list[Rewritten]]:
    """Different ones to learn from, to look at on the way, and to be measured on."""
    sizes = Sizes(train=budget.train, dev=budget.dev, test=budget.test)
    return {split: to_examples(rows) for split, rows in translations(sizes, seed, clauses=1).items()}


def to_examples(rows: Sequence[Translation]) -> list[Rewritten]:
    """Sentences with what is right, as examples."""
    return [Rewritten(text=each.source, rewritten=each.target) for each in rows]


def train_tokenizer(given: Sequence[Rewritten]) -> Tokenizer:
    """One vocabulary of both languages."""
    texts = [text for each in given for text in each.texts]
    return train(texts, TokenizerSettings(algorithm="bpe", vocab_size=PIECES))


def translation_task(loaded: Loaded, tokenizer: Tokenizer) -> Seq2Seq:
    """To write the sentence in English."""
    mark = sequence_ends(loaded.config.model, tokenizer)
    return Seq2Seq(tokenizer=tokenizer, limit=loaded.limit, mark=mark, max_new_tokens=LONGEST)


def translation_quality(loaded: Loaded, task: Seq2Seq, given: Sequence[Rewritten]) -> dict[str, float]:
    """The share of sentences that are right to the letter, and BLEU from 0 to 1 where it can be measured."""
    right: list[bool] = []

    def note(number: int, example: Rewritten, answer: Answer, judged: ScoredAnswer) -> None:
        right.append(answer["text"] == example.rewritten)

    result = task.result(evaluate_task(task, Engine(loaded, writing=task.writing), given, judged=note))
    return {"right": sum(right) / len(right)} | ({"BLEU": result["bleu"]} if "bleu" in result else {})


def train_translator(
    loaded: Loaded, task: Seq2Seq, budget: Budget, data: dict[str, list[Rewritten]], *, seed: int
) -> tuple[list[float], list[float]]:
    """Train; the loss of each step, and the share that is right after every so many."""
    settings = TrainSettings(
        max_steps=budget.steps,
        batch_size=budget.batch_size,
        optimizer=AdamW(lr=RATE),
        schedule=Linear(warmup_ratio=0.1),
        precision="float32",
        seed=seed,
    )
    losses, curve = [], []
    for step in Trainer(loaded, task, task.read(data["train"]).samples, settings):
        losses.append(step.loss)
        if len(losses) % budget.eval_every == 0:
            curve.append(translation_quality(loaded, task, data["dev"])["right"])
    return losses, curve


def run(plan: StudyConfig) -> StudyResult:
    """Every arm learns from the same sentences in the same order; real ones are Multi30k's."""
    if plan.real_data:
        from heedful.study import multi30k

        return multi30k.run(plan, plan.real_data)
    budget = plan.by_scale(Budget(), Budget(train=64, test=16, dev=8, steps=2, eval_every=1))
    bench, points = Recorder(plan), budget.steps // budget.eval_every
    for seed in plan.seeds:
        data = sample_sentences(budget, seed)
        tokenizer = train_tokenizer(data["train"])
        for arm in bench.missing_arms(ARMS, seed):
            loaded = build_model(arm, tokenizer, seed)
            task = translation_task(loaded, tokenizer)
            lost, curve = train_translator(loaded, task, budget, data, seed=seed)
            bench.record(arm, seed, translation_quality(loaded, task, data["test"]), {"loss": lost, "right": curve})
    losses, curves = bench.mean_curves("loss"), bench.mean_curves("right")
    right = bench.measure("right", tests=budget.test)
    measures = (right, bench.measure("BLEU")) if has_bleu() else (right,)
    about = (
        f"The toy language, {budget.train:,} sentences of one clause to learn from, {budget.test:,} others to "
        f"translate, greedily: the share that is right to the letter, and BLEU by sacrebleu. One vocabulary of {PIECES}"
        f" pieces, everything {WIDTH} wide: two GRUs, without attention or with additive scores, and a Transformer of "
        f"two and two layers. {budget.steps} steps of {budget.batch_size} sentences at a rate of {RATE:g}."
    )
    figure = charts.dot_plot(measures, ARMS, "The toy language: none, attention, nothing but attention")
    steps = [budget.eval_every * (number + 1) for number in range(points)]
    panels = [
        charts.Panel(
            x_label="steps",
            y_label="right (%)",
            lines=tuple(
                charts.Line(name=arm, points=tuple((x, 100 * y) for x, y in zip(steps, curve, strict=True)))
                for arm, curve in curves.items()
            ),
        ),
        charts.Panel(
            x_label="steps",
            y_label="loss of a piece",
            lines=tuple(charts.Line(name=arm, points=charts.smooth(lost, 20)) for arm, lost in losses.items()),
        ),
    ]
    drawn = charts.line_plot(panels, "The toy language: how fast each learns", f"mean of {seed_count(len(plan.seeds))}")
    facts = {
        "steps": steps,
        "right while learning": {arm: [round(each, 4) for each in curve] for arm, curve in curves.items()},
        "loss": {arm: [round(each, 4) for each in lost] for arm, lost in losses.items()},
    }
    return StudyResult(
        measures=measures,
        verdicts=compare_arms(measures, PAIRS),
        figure=figure,
        about=about,
        facts=facts,
        extra_figures={"curves": drawn},
    )
