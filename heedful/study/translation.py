"""The study `translation`: recurrent networks without and with attention, and a Transformer, translate a toy language.

    dovor askor ta vilin un tirar .        the quiet dogs see a letter .

The first arm represents a sentence by one vector (Sutskever et al. 2014). The second one attends to the source for each
token that it generates (Bahdanau et al. 2015). The third one has no recurrence, only attention (Vaswani et al. 2017).
All arms have the same subword tokens, are trained on the same sentences in the same order, and are evaluated by greedy
search. `study.multi30k` is the same study on real data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.checkpoint.new_head import with_head
from heedful.data.examples import Seq2SeqExample
from heedful.infer.engine import Engine
from heedful.model.classic_config import GlobalAttention, RecurrentSeq2Seq
from heedful.runs.finetune.init_settings import TransformerInit
from heedful.runs.finetune.seq2seq import recurrent_config, transformer_config
from heedful.runs.statistics import seed_count
from heedful.study import charts
from heedful.study.build import CLASSIC
from heedful.study.runner import Recorder, StudyConfig, StudyResult, compare_arms
from heedful.study.toy.language import Translation, translations
from heedful.study.toy.split import Sizes
from heedful.tasks.answering import Answer
from heedful.tasks.generation import sequence_ends
from heedful.tasks.seq2seq import Seq2Seq
from heedful.tasks.specs.seq2seq import has_bleu
from heedful.tasks.task import ScoredAnswer, evaluate_task
from heedful.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer
from heedful.train.settings import AdamW, Linear, TrainSettings
from heedful.train.trainer import Trainer

NO_ATTENTION = "recurrent, no attention"
ATTENTION = "recurrent, attention"
TRANSFORMER = "Transformer"
ARMS = (NO_ATTENTION, ATTENTION, TRANSFORMER)
PAIRS = ((ATTENTION, NO_ATTENTION), (TRANSFORMER, ATTENTION), (TRANSFORMER, NO_ATTENTION))  # arms that are compared
WIDTH = 64  # hidden size
VOCAB_SIZE = 800
MAX_NEW_TOKENS = 64  # maximum tokens of a translation
LR = 4e-3  # learning rate of all arms; docs/studies.md has the results of other learning rates


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Amount of data and training."""

    train: int = 11_200  # sentences to train on
    test: int = 500  # sentences to evaluate on after training
    dev: int = 100  # sentences to evaluate on during training
    steps: int = 350  # optimizer steps
    eval_every: int = 50  # steps between evaluations
    batch_size: int = 32  # sentences in a step


def build_model(arm: str, tokenizer: Tokenizer, seed: int) -> ModelBundle:
    """Return the model of an arm, with a language modelling head. All models have the same hidden size."""
    if arm == TRANSFORMER:
        settings = TransformerInit(layers=2, width=WIDTH, heads=4, inner=2 * WIDTH, dropout=0.0, norm_at="pre")
        config = BundleConfig(family="heedful", model=transformer_config(settings, tokenizer.size))
    else:
        rnn = RecurrentSeq2Seq(width=WIDTH, look=GlobalAttention(score="additive") if arm == ATTENTION else None)
        config = BundleConfig(family=CLASSIC, model=recurrent_config(rnn, tokenizer.size, WIDTH))
    return with_head(create(config, tokenizer, seed=seed), "language_model", seed=seed)


def sample_sentences(budget: Budget, seed: int) -> dict[str, list[Seq2SeqExample]]:
    """Return random sentences for each split; no sentence is in two splits."""
    sizes = Sizes(train=budget.train, dev=budget.dev, test=budget.test)
    return {split: to_examples(rows) for split, rows in translations(sizes, seed, clauses=1).items()}


def to_examples(rows: Sequence[Translation]) -> list[Seq2SeqExample]:
    """Convert sentences and their translations to examples."""
    return [Seq2SeqExample(text=row.source, rewritten=row.target) for row in rows]


def train_joint_tokenizer(examples: Sequence[Seq2SeqExample]) -> Tokenizer:
    """Train one byte-level BPE tokenizer for both languages."""
    texts = [text for example in examples for text in example.texts]
    return train_tokenizer(texts, TokenizerSettings(algorithm="bpe", vocab_size=VOCAB_SIZE))


def translation_task(loaded: ModelBundle, tokenizer: Tokenizer) -> Seq2Seq:
    """Return the task of translating into English by a model, with which it is trained and evaluated."""
    ends = sequence_ends(loaded.config.model, tokenizer)
    return Seq2Seq(tokenizer=tokenizer, limit=loaded.max_length, ends=ends, max_new_tokens=MAX_NEW_TOKENS)


def translation_quality(loaded: ModelBundle, task: Seq2Seq, examples: Sequence[Seq2SeqExample]) -> dict[str, float]:
    """Return the share of exact translations, and BLEU from 0 to 1 if sacrebleu is installed."""
    correct: list[bool] = []

    def record(index: int, example: Seq2SeqExample, answer: Answer, scored: ScoredAnswer) -> None:
        correct.append(answer["text"] == example.rewritten)

    engine = Engine(loaded, writing=task.generation)
    metrics = task.compute_metrics(evaluate_task(task, engine, examples, on_answer=record))
    quality = {"right": sum(correct) / len(correct)}
    if "bleu" in metrics:
        quality["BLEU"] = metrics["bleu"]
    return quality


def train_translator(
    loaded: ModelBundle, task: Seq2Seq, budget: Budget, data: dict[str, list[Seq2SeqExample]], *, seed: int
) -> tuple[list[float], list[float]]:
    """Train a model on train, and evaluate it on dev after every `budget.eval_every` steps.

    Args:
        loaded: The model.
        task: The task.
        budget: Amount of training.
        data: Sentences by split.
        seed: Random seed of the order of sentences.

    Returns:
        The loss of each step, and the share of exact translations on dev at each evaluation.
    """
    settings = TrainSettings(
        max_steps=budget.steps,
        batch_size=budget.batch_size,
        optimizer=AdamW(lr=LR),
        schedule=Linear(warmup_ratio=0.1),
        precision="float32",
        seed=seed,
    )
    losses = []
    dev_shares = []
    for step in Trainer(loaded, task, task.encode_split(data["train"]).samples, settings):
        losses.append(step.loss)
        if len(losses) % budget.eval_every == 0:
            dev_shares.append(translation_quality(loaded, task, data["dev"])["right"])
    return losses, dev_shares


def run(config: StudyConfig) -> StudyResult:
    """Train each arm on the same toy sentences in the same order."""
    budget = config.by_scale(Budget(), Budget(train=64, test=16, dev=8, steps=2, eval_every=1))
    recorder = Recorder(config)
    for seed in config.seeds:
        data = sample_sentences(budget, seed)
        tokenizer = train_joint_tokenizer(data["train"])
        for arm in recorder.missing_arms(ARMS, seed):
            loaded = build_model(arm, tokenizer, seed)
            task = translation_task(loaded, tokenizer)
            losses, dev_shares = train_translator(loaded, task, budget, data, seed=seed)
            quality = translation_quality(loaded, task, data["test"])
            recorder.record(arm, seed, quality, {"loss": losses, "right": dev_shares})
    loss_curves = recorder.mean_curves("loss")
    dev_curves = recorder.mean_curves("right")
    right = recorder.measure("right", tests=budget.test)
    measures = (right, recorder.measure("BLEU")) if has_bleu() else (right,)
    about = (
        f"The toy language, {budget.train:,} sentences of one clause for training, {budget.test:,} others to translate "
        f"by greedy search: the share of exact translations, and BLEU by sacrebleu. One vocabulary of {VOCAB_SIZE} "
        f"tokens, width {WIDTH}: two GRUs, without attention or with additive scores, and a Transformer of two and two "
        f"layers. {budget.steps} steps of {budget.batch_size} sentences with learning rate {LR:g}."
    )
    eval_steps = list(range(budget.eval_every, budget.steps + 1, budget.eval_every))
    panels = [_dev_panel(eval_steps, dev_curves), _loss_panel(loss_curves)]
    curve_figure = charts.line_plot(
        panels, "The toy language: learning curves", f"mean of {seed_count(len(config.seeds))}"
    )
    facts = {
        "steps": eval_steps,
        "right while learning": {arm: [round(share, 4) for share in shares] for arm, shares in dev_curves.items()},
        "loss": {arm: [round(loss, 4) for loss in curve] for arm, curve in loss_curves.items()},
    }
    return StudyResult(
        measures=measures,
        verdicts=compare_arms(measures, PAIRS),
        figure=charts.dot_plot(measures, ARMS, "The toy language: without attention, with it, nothing but attention"),
        about=about,
        facts=facts,
        extra_figures={"curves": curve_figure},
    )


def _dev_panel(eval_steps: Sequence[int], dev_curves: Mapping[str, Sequence[float]]) -> charts.Panel:
    """Return a panel with the share of exact translations on dev at each evaluation, for each arm."""
    lines = []
    for arm, shares in dev_curves.items():
        points = tuple((step, 100 * share) for step, share in zip(eval_steps, shares, strict=True))
        lines.append(charts.Line(name=arm, points=points))
    return charts.Panel(x_label="steps", y_label="right (%)", lines=tuple(lines))


def _loss_panel(loss_curves: Mapping[str, Sequence[float]]) -> charts.Panel:
    """Return a panel with the smoothed training loss of each arm."""
    lines = tuple(charts.Line(name=arm, points=charts.smooth(losses, 20)) for arm, losses in loss_curves.items())
    return charts.Panel(x_label="steps", y_label="loss per token", lines=lines)
