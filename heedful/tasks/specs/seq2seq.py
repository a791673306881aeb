"""Specification and settings of sequence to sequence: generate a text from a text."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from heedful.errors import HeedfulError, SettingError
from heedful.tasks.settings import TaskSettings
from heedful.tasks.spec import Card, TaskSpec

if TYPE_CHECKING:
    from heedful.model.classic_config import PoolingConfigs

BleuTokenizer = Literal["13a", "intl", "zh", "char", "none"]  # tokenizers of BLEU, by their names in sacrebleu
CODE = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/model")
model = AutoModelForSeq2SeqLM.from_pretrained("path/to/model")
output = model.generate(**tokenizer("a text", return_tensors="pt"), max_new_tokens=128)
print(tokenizer.decode(output[0], skip_special_tokens=True))"""
DECODER_CODE = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/model")
model = AutoModelForCausalLM.from_pretrained("path/to/model")
inputs = tokenizer("a text\\n", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=128)[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(output, skip_special_tokens=True))"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seq2SeqSettings(TaskSettings):
    """Settings of sequence to sequence."""

    kind: Literal["seq2seq"] = "seq2seq"
    max_new_tokens: int = 128  # maximum tokens generated per text in evaluations
    num_beams: int = 1  # beams in evaluations; 1: greedy decoding
    label_smoothing: float = 0.0  # share of the target spread over the vocabulary (Szegedy et al. 2016, section 7)
    metric: Literal["f1", "bleu"] = "f1"  # ranks models; bleu needs sacrebleu
    src_lang: str | None = None  # language code of the texts, for a multilingual model
    tgt_lang: str | None = None  # language code of the targets
    bleu: BleuTokenizer = "13a"  # tokenisation of BLEU; char: characters, for texts without spaces or of few words

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_beams"):
            if getattr(self, name) < 1:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected a whole number from 1")
        if not 0 <= self.label_smoothing < 1:
            raise HeedfulError(f"label_smoothing is {self.label_smoothing}; expected a share from 0 to below 1")

    def check(self) -> None:
        if self.metric == "bleu" and not has_bleu():
            raise SettingError(
                "task.metric is bleu, which needs sacrebleu, and that is not installed: "
                "pip install 'heedful[translate]', or compare models by F1 of words: task.metric=f1",
                path="task.metric",
            )

    def summary(self) -> str:
        return f", label smoothing {self.label_smoothing:g}"


def has_bleu() -> bool:
    """Whether sacrebleu is installed, which computes BLEU."""
    return find_spec("sacrebleu") is not None


def _refuse_pooling(pooling: PoolingConfigs, name: str, labels: int) -> None:
    """Refuse every classic model with pooling, since it generates no text."""
    reason = f'{name}.kind is "{pooling.kind}", which reads texts and writes none'
    raise HeedfulError(f'{reason}: for seq2seq, set init.kind to "transformer" or "recurrent"')


SEQ2SEQ = TaskSpec(
    name="seq2seq",
    aliases=("translation", "summarization", "text2text-generation", "text2text"),
    help="translation, summaries",
    settings=Seq2SeqSettings,
    example_ref="heedful.data.examples:Seq2SeqExample",
    task_ref="heedful.tasks.seq2seq:Seq2Seq",
    head="language_model",
    recognizes=lambda head: head.kind == "language_model",
    check_pooling=_refuse_pooling,
    plots_alignments=True,
    card=Card(
        name="Rewriting texts",
        latency_input="one pass over a text, all tokens at once",
        description="Writes a text for a text, as its training data does",
        pipeline="text2text-generation",
        code=CODE,
        decoder_code=DECODER_CODE,
        has_windows=False,
    ),
)
