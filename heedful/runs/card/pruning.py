"""Token pruning as a table, as a sentence, and as a section of the model card."""

from __future__ import annotations

from heedful.model.token_pruning import TokenPruning
from heedful.runs.card.cascade import loss_verdict
from heedful.runs.card.markdown import escape_markdown, markdown_table
from heedful.runs.results import JsonObject
from heedful.tasks.metrics import format_difference, format_metric

PRUNING = "pruning.json"
HEADING = "## Token pruning"


def pruning_table(report: JsonObject) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table, with one row for each trial: a layer and a share of tokens to keep after it.

    Args:
        report: Contents of pruning.json.
    """
    metric = report["metric"]
    header = [
        "layer",
        "keep rate",
        "tokens left",
        "times as fast",
        metric,
        "difference",
        "95 % interval",
        "expected",
        "",
    ]
    rows = []
    for trial in report["trials"]:
        is_chosen = all(trial[name] == report["chosen"][name] for name in ("layer", "keep_rate"))
        rows.append(
            [
                str(trial["layer"]),
                f"{100 * trial['keep_rate']:g} %",
                f"{100 * trial['tokens_left']:.0f} %",
                f"{trial['speedup']:.2f}",
                format_metric(metric, trial["value"]),
                format_difference(metric, trial["difference"]),
                "" if trial["low"] is None else format_difference(metric, trial["low"], trial["high"]),
                "" if trial["expected_loss"] is None else format_difference(metric, -trial["expected_loss"]),
                "chosen" if is_chosen else "loses more",
            ]
        )
    return header, rows


def pruning_sentence(report: JsonObject) -> str:
    """Return a summary of pruning.json in two sentences."""
    metric, chosen = report["metric"], report["chosen"]
    pruned_value = format_metric(metric, report["pruned"]["value"])
    unpruned_value = format_metric(metric, report["all_tokens"]["value"])
    interval, verdict = "", ""
    if chosen["low"] is not None:
        interval = f", 95 % interval {format_difference(metric, chosen['low'], chosen['high'])}"
        verdict = f": {loss_verdict(chosen, report['max_loss'] / 100)}"
    return (
        f"After layer {chosen['layer']}, {100 * chosen['tokens_left']:.0f} % of the tokens are left: {pruned_value} "
        f"{metric} on {report['reported_on']} beside {unpruned_value} with all tokens "
        f"({format_difference(metric, chosen['difference'])}{interval}), with {chosen['speedup']:.2f} times as many "
        f"texts a second in {report['precision']}. The pruning was chosen on {report['fitted_on']} "
        f"({report['fitted_rows']:,} rows) for a loss of at most {report['max_loss']:g} points{verdict}."
    )


def pruning_note(pruning: TokenPruning) -> str:
    """Return a clause about the training of a model with token pruning, for the log and the model card."""
    return (
        f"after layer {pruning.layer}, {100 * pruning.keep_rate:g} % of the tokens of a text are computed, in "
        "training too; libraries without token pruning compute all tokens, and their answers differ"
    )


def pruning_section(report: JsonObject) -> list[list[str]]:
    """Return the section of the model card on token pruning."""
    header, rows = pruning_table(report)
    return [
        [HEADING],
        [
            "The upper layers of this model compute a part of the tokens. All other scores on this card are of the "
            "model with all tokens."
        ],
        markdown_table(list(map(escape_markdown, header)), [list(map(escape_markdown, row)) for row in rows]),
        [escape_markdown(report["sentence"], 1000)],
    ]
