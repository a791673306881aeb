"""The section of a model card that shows how to use the model, in Heedful and in other libraries."""

from __future__ import annotations

from collections.abc import Iterator

from heedful.tasks.specs import SPECS

METRICS = {  # name of the metric on the Hugging Face hub, by name in results.json
    "accuracy": "accuracy",
    "f1": "f1",
    "macro_f1": "f1",
    "micro_f1": "f1",
    "matthews": "matthews_correlation",
    "ndcg@10": "ndcg@10",
    "map": "map",
    "mrr": "mrr",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
    "mse": "mse",
    "exact": "exact_match",
    "bleu": "sacrebleu",
}
WINDOWS = "Heedful reads texts that are longer than the model in windows and merges the answers; {} does not."


def usage(task: str, *, heedful_only: bool, pairs: bool, has_encoder: bool = True) -> Iterator[list[str]]:
    """Yield the paragraphs and code blocks of the section, each as a list of lines.

    They show a command, and Python code for Heedful and for another library.

    Args:
        task: Name of the model's task.
        heedful_only: Whether no other library can load the model, since only Heedful has its architecture.
        pairs: Whether an input is a pair of texts.
        has_encoder: Whether a seq2seq model has an encoder. False for a decoder-only model.
    """
    card = SPECS[task].card
    example = library_example = card.python_input
    arguments = card.cli_arguments
    if pairs and example == '"a text"':
        example = '("a text", "another")'
        arguments = '"a text" --pair "another"'
        library_example = '{"text": "a text", "text_pair": "another"}'
    yield ["## How to use it"]
    yield ["```sh", f"heedful predict path/to/model {arguments}", "```"]
    yield [
        "```python",
        "import heedful",
        "",
        'engine = heedful.Engine("path/to/model")',
        f"print(engine([{example}]))",
        "```",
    ]
    if heedful_only:
        yield ["Its architecture is Heedful's own, which other libraries do not know."]
        return
    yield [f"With {card.library}:"]
    code = card.code if has_encoder else card.decoder_code or card.code
    yield ["```python", *code.replace("{given}", library_example).splitlines(), "```"]
    if card.has_windows:
        yield [WINDOWS.format(card.library)]
