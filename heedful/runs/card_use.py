"""What a model card says of each task: its name on the hub, and how a model of it is used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

METRICS = {  # our names of numbers -> the hub's names of metrics
    "accuracy": "accuracy",
    "f1": "f1",
    "macro_f1": "f1",
    "micro_f1": "f1",
    "matthews": "matthews_correlation",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
    "mse": "mse",
    "exact": "exact_match",
    "bleu": "sacrebleu",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What is the same for every model of a task."""

    name: str
    does: str
    pipeline: str  # the hub's name of the task
    library: str = "transformers"  # that loads the folder
    words: str = '"a text"'  # behind `heedful predict FOLDER`
    given: str = '"a text"'  # in Python
    code: str  # for that library


PIPELINE = """from transformers import pipeline

answer = pipeline("{kind}", model="path/to/model"{more})
print(answer({given}))"""
EXTRACT = """import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/model")
model = AutoModelForQuestionAnswering.from_pretrained("path/to/model")
inputs = tokenizer("Who?", "Ada wrote it.", return_tensors="pt")
with torch.inference_mode():
    scores = model(**inputs)
start, end = scores.start_logits.argmax(), scores.end_logits.argmax()
print(tokenizer.decode(inputs["input_ids"][0, start : end + 1]))"""
CHOOSE = """import torch
from transformers import AutoModelForMultipleChoice, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/model")
model = AutoModelForMultipleChoice.from_pretrained("path/to/model")
choices = ["Take a hat.", "Sleep."]
inputs = tokenizer(["It rains."] * 2, choices, padding=True, return_tensors="pt")
with torch.inference_mode():
    scores = model(**{name: each[None] for name, each in inputs.items()}).logits[0]
print(choices[scores.argmax()])"""
REWRITE = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/model")
model = AutoModelForSeq2SeqLM.from_pretrained("path/to/model")
written = model.generate(**tokenizer("a text", return_tensors="pt"), max_new_tokens=128)
print(tokenizer.decode(written[0], skip_special_tokens=True))"""
EMBED = """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/model")
vectors = model.encode(["a text", "another"])
print(model.similarity(vectors, vectors))"""

TASKS = {
    "classify": About(
        name="Text classification",
        does="Gives a text, or a pair of texts, one label, with a probability",
        pipeline="text-classification",
        code=PIPELINE.format(kind="text-classification", more="", given="{given}"),
    ),
    "multiple": About(
        name="Text classification, any number of labels",
        does="Gives a text, or a pair of texts, any number of labels, with a probability for each",
        pipeline="text-classification",
        code=PIPELINE.format(kind="text-classification", more=", top_k=None", given="{given}"),
    ),
    "regress": About(
        name="A number for a text",
        does="Gives a text, or a pair of texts, a number",
        pipeline="text-classification",
        code=PIPELINE.format(kind="text-classification", more=', function_to_apply="none"', given="{given}"),
    ),
    "tag": About(
        name="Labels for words",
        does="Labels every word of a text, and joins labelled words into entities",
        pipeline="token-classification",
        code=PIPELINE.format(kind="token-classification", more="", given="{given}"),
    ),
    "qa": About(
        name="Answers from a text",
        does="Finds the answer to a question in a context",
        pipeline="question-answering",
        words='--question "Who?" "Ada wrote it."',
        given='{"question": "Who?", "context": "Ada wrote it."}',
        code=EXTRACT,
    ),
    "multiple-choice": About(
        name="Choosing among candidates",
        does="Chooses one of several candidates that go with a prompt",
        pipeline="multiple-choice",
        words='--choice "Take a hat." --choice "Sleep." "It rains."',
        given='{"prompt": "It rains.", "choices": ["Take a hat.", "Sleep."]}',
        code=CHOOSE,
    ),
    "embed": About(
        name="Sentence embeddings",
        does="Gives each text a vector; the cosine of two vectors says how alike the texts are",
        pipeline="sentence-similarity",
        library="sentence-transformers",
        given='("a text", "another")',
        code=EMBED,
    ),
}
TASKS["seq2seq"] = About(
    name="Rewriting texts",
    does="Writes a text for a text, as its training data does",
    pipeline="text2text-generation",
    code=REWRITE,
)
CONTINUE = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/model")
model = AutoModelForCausalLM.from_pretrained("path/to/model")
given = tokenizer("a text\\n", return_tensors="pt")
written = model.generate(**given, max_new_tokens=128)[0, given["input_ids"].shape[1] :]
print(tokenizer.decode(written, skip_special_tokens=True))"""
WINDOWS = "Heedful reads texts that are longer than the model in windows and merges the answers; {} does not."


def usage(task: str, *, ours: bool, pairs: bool, reads: bool = True) -> Iterator[list[str]]:
    """Commands and code; `ours`: only Heedful loads the folder; `pairs`: the texts come in pairs.

    `reads`: what rewrites has an encoder.
    """
    about = TASKS[task]
    given, words, theirs = about.given, about.words, about.given
    if pairs and given == '"a text"':
        given, words = '("a text", "another")', '"a text" --pair "another"'
        theirs = '{"text": "a text", "text_pair": "another"}'
    yield ["## How to use it"]
    yield ["```sh", f"heedful predict path/to/model {words}", "```"]
    yield [
        "```python",
        "import heedful",
        "",
        'engine = heedful.Engine("path/to/model")',
        f"print(engine([{given}]))",
        "```",
    ]
    if ours:
        yield ["Its architecture is Heedful's own, which other libraries do not know."]
        return
    yield [f"With {about.library}:"]
    code = about.code if task != "seq2seq" or reads else CONTINUE
    yield ["```python", *code.replace("{given}", theirs).splitlines(), "```"]
    if task not in ("embed", "seq2seq"):
        yield [WINDOWS.format(about.library)]
