"""The section of a model card on how to use the model."""

from __future__ import annotations

from collections.abc import Iterator

from heedful.tasks.specs import SPECS

METRICS = {  # metrics in results -> their names on the hub
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
    """Yield commands and code.

    Args:
        task: Of the model.
        heedful_only: Whether the architecture is Heedful's own, so that no other library loads the folder.
        pairs: Whether the texts come in pairs.
        has_encoder: Whether a seq2seq model has an encoder beside its decoder.
    """
    card = SPECS[task].card
    example, arguments, library_example = card.python_input, card.cli_arguments, card.python_input
    if pairs and example == '"a text"':
        example, arguments = '("a text", "another")', '"a text" --pair "another"'
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
