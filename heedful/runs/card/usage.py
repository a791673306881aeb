"""What a model card says of each task: its name on the hub, and how a model of it is used."""

from __future__ import annotations

from collections.abc import Iterator

from heedful.tasks.specs import SPECS

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


WINDOWS = "Heedful reads texts that are longer than the model in windows and merges the answers; {} does not."


def usage(task: str, *, ours: bool, pairs: bool, reads: bool = True) -> Iterator[list[str]]:
    """Commands and code; `ours`: only Heedful loads the folder; `pairs`: the texts come in pairs.

    `reads`: what rewrites has an encoder.
    """
    about = SPECS[task].card
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
    code = about.code if reads else about.decoder_code or about.code
    yield ["```python", *code.replace("{given}", theirs).splitlines(), "```"]
    if about.has_windows:
        yield [WINDOWS.format(about.library)]
