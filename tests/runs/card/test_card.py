"""The model card of a fine-tuned model: its sections, and that texts of the data cannot add markup to it."""

from __future__ import annotations

import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import metadata_load
from huggingface_hub.repocard_data import model_index_to_eval_results
from markdown_it import MarkdownIt
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from typer.testing import CliRunner

from heedful.cli import app
from heedful.errors import HeedfulError
from heedful.runs.card.finetuned import write_finetuned_card
from heedful.runs.card.markdown import escape_markdown, format_number
from heedful.runs.card.usage import usage
from heedful.runs.plots.figures import draw_run_plots
from heedful.tasks.specs import SPECS
from tests.support import run_folders
from tests.support.model_folders import make_model_dir

MARKUP_TEXTS = [  # texts that are Markdown or HTML, and must be shown as they are
    "<script>alert(1)</script>",
    "![x](http://evil.example/x.png) [click](javascript:alert(1))",
    "a | b | c \\| d",
    "# heading\n\n- item\n\n```\ncode",
    "</details></table><!-- ",
    "`code` ``more`` *em* **strong** _em_ __strong__ ~~gone~~ $x$",
    "http://evil.example www.evil.example <http://evil.example>",
    "&lt;b&gt; &amp; &#60;i&#62;",
    "---\nlibrary_name: other\n---",
    "\x1b[31mred \u202egnirts\u202c \ud800",
    "1. one",
    "12) twelve",
    "- dash",
    "+ plus",
    "===",
]


class Page(HTMLParser):
    """The start tags of an HTML text in order, and the text between all tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def render_page(markdown: str) -> Page:
    """Render Markdown as the Hugging Face hub does."""
    return Page(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown))


def write_run(
    folder: Path, results: dict[str, Any], model_type: str = "bert", **predictions: list[run_folders.Line]
) -> Path:
    """Write a run folder with these results and the predictions of each split, and the config.json of a model."""
    run_folders.write_run_folder(folder, results, [], **predictions)
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def card_of(
    folder: Path, results: dict[str, Any], model_type: str = "bert", **predictions: list[run_folders.Line]
) -> str:
    """Write a run folder and its card, and return the text of the card."""
    path = write_finetuned_card(write_run(folder, results, model_type, **predictions))
    assert path == folder / "model" / "README.md"
    assert sorted(file.name for file in path.parent.iterdir()) == ["README.md", "config.json"]
    return path.read_text(encoding="utf-8")


def front_matter(folder: Path) -> dict[str, Any]:
    """Return the front matter of the card of a run."""
    metadata: dict[str, Any] = metadata_load(folder / "model" / "README.md")
    return metadata


def classifier_results(**entries: Any) -> tuple[dict[str, Any], list[run_folders.Line]]:
    """Return the results of a classifier with dev and test, and its predictions for dev.

    `entries` replace entries of the results.
    """
    dev, dev_predictions = run_folders.classification_result(["bad", "good"])
    test, _ = run_folders.classification_result(["bad", "good"], 50, seed=1)
    entries = {"labels": ["bad", "good"]} | entries
    return run_folders.results_json("classify", "accuracy", {"dev": dev, "test": test}, **entries), dev_predictions


def multilabel_results() -> dict[str, Any]:
    return run_folders.results_json("multiple", "micro_f1", {"dev": run_folders.multilabel_result(["x", "y"])})


def table_under(text: str, heading: str) -> tuple[list[str], list[list[str]]]:
    """Return the cells of the header and of the rows of the first table under a heading."""
    after_heading = text[text.index(f"\n{heading}\n") :]
    table = re.search(r"(?:^\|.*\n)+", after_heading, re.MULTILINE)
    assert table
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].strip().split("\n")
    )
    return header, rows


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def test_front_matter_names_library_task_base_model_and_metrics(tmp_path: Path) -> None:
    results, predictions = classifier_results(base="someone/their-model@" + "0" * 40)
    card_of(tmp_path, results, dev=predictions)
    metadata = front_matter(tmp_path)
    assert metadata.pop("model-index")
    assert metadata == {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["heedful"],
        "base_model": "someone/their-model",
        "metrics": ["accuracy", "f1", "matthews_correlation"],
    }


def test_the_library_of_the_hub_reads_the_scores_of_test(tmp_path: Path) -> None:
    results, predictions = classifier_results()
    card_of(tmp_path, results, dev=predictions)
    name, scores = model_index_to_eval_results(front_matter(tmp_path)["model-index"])
    assert name == "Text classification"
    numbers = results["splits"]["test"]["numbers"]
    values = {score.metric_type: score.metric_value for score in scores}
    assert values.keys() == {"accuracy", "f1", "matthews_correlation"}
    assert values["accuracy"] == pytest.approx(numbers["accuracy"], abs=1e-6)
    assert values["f1"] == pytest.approx(numbers["macro_f1"], abs=1e-6)
    assert values["matthews_correlation"] == pytest.approx(numbers["matthews"], abs=1e-6)
    for score in scores:
        assert score.task_type == "text-classification"
        assert score.dataset_split == "test"


def test_the_card_shows_copies_of_plots(tmp_path: Path) -> None:
    results, predictions = classifier_results()
    folder = write_run(tmp_path, results, dev=predictions)
    draw_run_plots(folder)
    text = write_finetuned_card(folder).read_text()
    for name in ("confusion", "calibration", "coverage"):
        assert f"](plots/{name}.png)" in text
        assert (folder / f"model/plots/{name}.png").read_bytes() == (folder / f"plots/{name}.png").read_bytes()
    assert "<summary>As a table</summary>" in text


@pytest.mark.parametrize(
    ("base", "shown"), [("/disk/models/secret", "secret"), ("../up/mine", "mine"), ("runs/a b", "runs/a b"), ("", None)]
)
def test_a_local_base_model_is_shown_without_its_directory_and_not_as_metadata(
    tmp_path: Path, base: str, shown: str | None
) -> None:
    settings = {"start": {"model": base}, "list": [base]}
    results, _ = classifier_results(base=base, settings=settings)
    text = card_of(tmp_path, results)
    assert "base_model" not in front_matter(tmp_path)
    assert "/disk/models" not in text
    assert "../up" not in text
    if shown is None:
        assert "Trained with Heedful from" not in text
    else:
        assert f"Trained with Heedful from {shown}." in text
        assert f'"model": "{shown}"' in text


def test_every_task_has_a_card(tmp_path: Path) -> None:
    regression, _ = run_folders.regression_result()
    classification, _ = run_folders.classification_result(["a", "b"])
    multilabel = run_folders.multilabel_result(["a", "b"])
    exact_and_f1 = {"exact": 0.5, "f1": 0.6, "count": 10}
    choice = {"accuracy": 0.5, "count": 10, "loss": 0.7}
    ranking = {"ndcg@10": 0.5, "map": 0.4, "mrr": 0.6, "count": 10}
    # main metric, metrics of dev, pipeline of the hub, metrics on the hub
    cards: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
        "classify": ("accuracy", classification, "text-classification", ["accuracy"]),
        "multiple": ("micro_f1", multilabel, "text-classification", ["f1"]),
        "rank": ("ndcg@10", ranking, "text-ranking", ["ndcg@10", "map"]),
        "regress": ("spearman", regression, "text-classification", ["pearsonr", "spearmanr", "mse"]),
        "tag": ("f1", run_folders.tagging_result(), "token-classification", ["f1"]),
        "qa": ("f1", exact_and_f1, "question-answering", ["exact_match", "f1"]),
        "multiple-choice": ("accuracy", choice, "multiple-choice", ["accuracy"]),
        "embed": ("spearman", regression, "sentence-similarity", ["pearsonr", "spearmanr", "mse"]),
        "seq2seq": ("f1", exact_and_f1, "text2text-generation", ["exact_match", "f1"]),
    }
    assert cards.keys() == SPECS.keys()
    for task, (metric, dev, pipeline, hub_metrics) in cards.items():
        text = card_of(tmp_path / task, run_folders.results_json(task, metric, {"dev": dev}))
        metadata = front_matter(tmp_path / task)
        assert metadata["pipeline_tag"] == pipeline
        assert set(hub_metrics) <= set(metadata["metrics"])
        assert metadata["library_name"] == ("sentence-transformers" if task in ("embed", "rank") else "transformers")
        assert f"# {SPECS[task].card.name}\n" in text
        assert f"**{metric}**" in text
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            compile(code, task, "exec")
            without_dicts = code.replace('{"', "").replace("{name: values", "")
            assert "{" not in without_dicts, "a placeholder of the template"


def test_quality_table(tmp_path: Path) -> None:
    results, predictions = classifier_results()
    dev, test = results["splits"]["dev"], results["splits"]["test"]
    dev["numbers"] |= {"loss": "NaN", "accuracy": 0.8125}
    dev["intervals"]["accuracy"] |= {"low": 0.7712, "high": 0.8534}
    text = card_of(tmp_path, results, dev=predictions)
    header, rows = table_under(text, "## Quality")
    assert header == ["", "dev", "test"]
    assert [name for name, *_ in rows] == ["**accuracy**", "macro_f1", "matthews", "ece", "examples"]
    assert rows[0][1] == "81.2 % (77.1 % to 85.3 %)"
    _, folded_rows = table_under(text, "<summary>Further metrics</summary>\n")
    cells_by_metric = {name: cells for name, *cells in (*rows, *folded_rows)}
    assert cells_by_metric["examples"] == ["400", "50"]
    assert cells_by_metric["loss"][0] == "NaN"
    assert cells_by_metric["macro_f1"] == [percent(dev["numbers"]["macro_f1"]), percent(test["numbers"]["macro_f1"])]
    assert "confusion" not in cells_by_metric
    assert "count" not in cells_by_metric
    num_metrics = sum(isinstance(value, float) for value in test["numbers"].values())
    assert len(cells_by_metric) == num_metrics + 1, "all metrics, and the number of examples"
    assert len(rows) + len(folded_rows) == len(cells_by_metric), "no metric is shown twice"


def test_the_main_metric_is_the_first_row_of_the_quality_table(tmp_path: Path) -> None:
    results, predictions = classifier_results()
    results["metric"] = "macro_f1"
    _, rows = table_under(card_of(tmp_path, results, dev=predictions), "## Quality")
    assert rows[0][0] == "**macro_f1**"


def test_the_card_says_what_dev_was_used_for(tmp_path: Path) -> None:
    results, predictions = classifier_results()
    text = card_of(tmp_path, results, dev=predictions)
    assert "95 % intervals from 1,000 bootstrap replicates" in text
    assert "those of step 250 of 300, the best on dev; so the numbers of dev are slightly optimistic, and those" in text
    assert "There is no test split" not in text
    del results["splits"]["test"]
    chosen_on_dev = "There is no test split: what is known comes from dev, by which the model was chosen."
    assert chosen_on_dev in card_of(tmp_path, results, dev=predictions)
    results["settings"]["fit"] = {"load_best_at_end": False}
    text = card_of(tmp_path, results, dev=predictions)
    assert "The weights are those after 300 steps." in text
    assert "There is no test split: what is known comes from dev.\n" in text, "dev was not used to choose anything"
    results["settings"]["fit"] = {"load_best_at_end": False, "patience": 2}
    assert chosen_on_dev in card_of(tmp_path, results, dev=predictions)


def test_a_card_without_evaluated_splits(tmp_path: Path) -> None:
    results, _ = classifier_results()
    text = card_of(tmp_path, results | {"splits": {}})
    assert "Nothing was measured" in text
    assert "- Not measured at all." in text
    assert "mistakes" not in text


SEED_RESULTS = {"seed": 1, "best_step": 9, "steps": 10, "seconds": 2.0, "splits": {"dev": 0.5}}


@pytest.mark.parametrize("load_best", [True, False])
def test_the_card_says_that_thresholds_of_labels_were_fitted_on_dev(tmp_path: Path, load_best: bool) -> None:
    settings = {"task": {"kind": "multiple", "thresholds": "tuned"}, "fit": {"load_best_at_end": load_best}}
    results = multilabel_results() | {"settings": settings, "seeds": [SEED_RESULTS], "seed": 1}
    text = card_of(tmp_path, results)
    assert ", and thresholds were fitted on dev; so the numbers of dev are slightly optimistic." in text
    chosen = "by which the model was chosen and " if load_best else ""
    assert f"what is known comes from dev, {chosen}on which its thresholds were fitted." in text


@pytest.mark.parametrize("load_best", [True, False])
def test_the_no_answer_threshold_is_fitted_only_with_unanswerable_questions(tmp_path: Path, load_best: bool) -> None:
    settings = {"task": {"kind": "qa", "no_answer_threshold": "tuned"}, "fit": {"load_best_at_end": load_best}}
    results = run_folders.results_json("qa", "f1", {"dev": {"f1": 0.5, "best_f1_threshold": -1.0, "count": 9}})
    results |= {"settings": settings, "seeds": [SEED_RESULTS], "seed": 1}
    assert "thresholds were fitted on dev" in card_of(tmp_path, results)
    del results["splits"]["dev"]["numbers"]["best_f1_threshold"]  # as if every question has an answer
    assert "thresholds" not in card_of(tmp_path, results).replace('"no_answer_threshold"', "")


def test_a_note_on_several_splits_is_shown_once(tmp_path: Path) -> None:
    results, predictions = classifier_results()
    for split in results["splits"].values():
        split["numbers"]["notes"] = ['f1 is that of "good"']
    text = card_of(tmp_path, results, dev=predictions)
    assert text.count('- On dev and test: f1 is that of "good".') == 1


def test_a_predicted_cosine_is_shown_on_the_scale_of_the_scores(tmp_path: Path) -> None:
    prediction = {"id": 0, "input": ["one", "other"], "label": 4.2, "prediction": 0.25}
    prediction |= {"correct": None, "loss": 0.5, "answer": {}}
    results = run_folders.results_json(
        "embed", "spearman", {"dev": {"spearman": 0.5, "count": 1}}, label_scaling={"low": 1, "high": 5}
    )
    _, rows = table_under(card_of(tmp_path, results, dev=[prediction]), "## The worst mistakes on dev")
    assert rows == [["one / other", "4.200", "2.000 (a cosine of 0.250)"]]


def test_several_seeds(tmp_path: Path) -> None:
    accuracies = {1: 0.8, 2: 0.9, 3: 0.85}  # on dev, by seed
    seeds = [
        {"seed": seed, "best_step": 9, "steps": 10, "seconds": 2.0, "splits": {"dev": accuracy, "test": accuracy / 2}}
        for seed, accuracy in accuracies.items()
    ]
    results, _ = classifier_results(seeds=seeds, seed=2)
    text = card_of(tmp_path, results)
    header, rows = table_under(text, "### Over seeds")
    assert header == ["seed", "accuracy on dev", "accuracy on test"]
    assert rows[1] == ["2", "90.0 %", "45.0 %"]
    deviation = np.std(list(accuracies.values()), ddof=1)
    assert rows[3] == ["mean ± deviation", f"85.0 % ± {percent(deviation)}", f"42.5 % ± {percent(deviation / 2)}"]
    assert "that of seed 2, the best of 3 on dev" in text
    assert "Trained with one seed" not in text
    assert "30 steps in 6 s, over 3 seeds." in text


def test_a_single_seed(tmp_path: Path) -> None:
    results, _ = classifier_results()
    text = card_of(tmp_path, results)
    assert "Over seeds" not in text
    assert "Trained with one seed" in text


def test_the_scores_of_each_class(tmp_path: Path) -> None:
    results, _ = classifier_results()
    text = card_of(tmp_path, results)
    header, rows = table_under(text, "### Each class, on test")
    good = results["splits"]["test"]["numbers"]["classes"]["good"]
    assert header == ["class", "precision", "recall", "F1", "examples"]
    assert rows[1] == [
        "good", percent(good["precision"]), percent(good["recall"]), percent(good["f1"]), str(good["count"]),
    ]  # fmt: skip
    assert "on test 2 of 2 have fewer than 30 examples (bad, good)" in text
    assert "<details>\n<summary>2" not in text


def test_a_long_table_of_classes_is_folded(tmp_path: Path) -> None:
    dev, _ = run_folders.classification_result([f"class {number}" for number in range(77)])
    text = card_of(tmp_path, run_folders.results_json("classify", "accuracy", {"dev": dev}))
    assert "<summary>77 rows</summary>" in text


def test_the_scores_of_each_label_and_of_each_type_of_entity(tmp_path: Path) -> None:
    header, _ = table_under(card_of(tmp_path, multilabel_results()), "### Each label, on dev")
    assert header == ["label", "precision", "recall", "F1", "examples"]
    tagging = run_folders.results_json("tag", "f1", {"dev": run_folders.tagging_result()})
    _, rows = table_under(card_of(tmp_path, tagging), "### Each type of entity, on dev")
    assert len(rows) == 4


def test_calibration(tmp_path: Path) -> None:
    results, _ = classifier_results()
    text = card_of(tmp_path, results)
    numbers = results["splits"]["test"]["numbers"]
    assert f"error on test: {percent(numbers['ece'])}" in text
    _, rows = table_under(text, "## Calibration")
    assert [row[1] for row in rows] == [str(bucket["count"]) for bucket in numbers["calibration"]]


def test_the_five_worst_mistakes(tmp_path: Path) -> None:
    results, predictions = classifier_results()
    _, rows = table_under(card_of(tmp_path, results, dev=predictions), "## The worst mistakes on dev")
    mistakes = [prediction for prediction in predictions if not prediction["correct"]]
    assert len(rows) == 5
    for (text, label, predicted), mistake in zip(rows, mistakes, strict=False):
        assert text == mistake["input"]
        assert label == mistake["label"]
        assert predicted == f"{mistake['prediction']} ({percent(mistake['answer']['probability'])})"


def test_a_card_without_mistakes_on_dev_has_no_table_of_mistakes(tmp_path: Path) -> None:
    results, predictions = classifier_results()
    correct = [prediction for prediction in predictions if prediction["correct"]]
    for number, split_predictions in enumerate(({}, {"dev": correct}, {"dev": []}, {"test": predictions})):
        assert "mistakes" not in card_of(tmp_path / str(number), results, **split_predictions)


# by task: entries of a prediction, and the cells of its row among the mistakes
MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "classify": ({"input": ["one", "other"], "label": "a", "prediction": "b"}, ["one / other", "a", "b"]),
    "multiple": ({"input": "text", "label": ["a", "b"], "prediction": []}, ["text", "a, b", "(none)"]),
    "tag": (
        {"input": ["Ada", "lives"], "label": ["B-PER", "O"], "prediction": ["O", "O"]},
        ["Ada lives", "Ada: B-PER", "Ada: O"],
    ),
    "qa": (
        {"input": {"question": "Who?", "context": "Ada."}, "label": ["Ada", "A."], "prediction": ""},
        ["Who? / Ada.", "Ada", "(no answer)"],
    ),
    "multiple-choice": (
        {"input": {"prompt": "It rains.", "choices": ["hat", "sleep"]}, "label": 0, "prediction": 1},
        ["It rains.", "hat", "sleep"],
    ),
    "rank": (
        {
            "input": {"query": "weather", "texts": ["A book.", "It rains."]},
            "label": [0.0, 1.0],
            "prediction": [0.5, 0.25],
            "loss": 2.0,
        },
        ["weather", "It rains. (number 2)", "A book."],
    ),
    "regress": ({"input": "text", "label": 3.5, "prediction": 1.25, "correct": None}, ["text", "3.500", "1.250"]),
    "embed": (
        {"input": ["one", "other"], "label": None, "prediction": 0.25, "rank": 1200},
        ["one / other", "(they belong together)", "0.250, found as number 1,200"],
    ),
}


@pytest.mark.parametrize("task", MISTAKES)
def test_a_mistake_of_each_task(tmp_path: Path, task: str) -> None:
    entries, cells = MISTAKES[task]
    prediction = {"id": 0, "correct": False, "loss": 1.0, "answer": {}} | entries
    results = run_folders.results_json(task, "score", {"dev": {"score": 0.5, "count": 1}})
    _, rows = table_under(card_of(tmp_path, results, dev=[prediction]), "## The worst mistakes on dev")
    assert rows == [cells]


def test_a_retrieved_pair_is_no_mistake(tmp_path: Path) -> None:
    prediction = {"id": 0, "loss": 0.9, "input": ["one", "other"], "label": None, "prediction": 0.1, "answer": {}}
    results = run_folders.results_json("embed", "accuracy", {"dev": {"accuracy": 1.0, "count": 2}})
    predictions = [prediction | {"correct": True}, prediction | {"correct": None}]
    assert "mistakes" not in card_of(tmp_path, results, dev=predictions)


def write_card_with_text(folder: Path, text: str) -> str:
    """Write the card of a run in which labels, names, notes, versions and examples are the text."""
    results, _ = classifier_results(labels=[text, "b"], base=text, machine=text, notes=[text], versions={"x": text})
    results["data"] = {"stated": [text], "splits": {text: {"examples": 3}}, "files": {text: "0f" * 32}}
    for split in results["splits"].values():
        split["numbers"] |= {"notes": [text]}
        split["numbers"]["classes"] = {text: split["numbers"]["classes"]["good"]}
    mistake = {"input": text, "label": text, "prediction": text, "correct": False, "answer": {}}
    return card_of(folder, results, dev=[mistake])


@pytest.mark.parametrize("text", MARKUP_TEXTS)
def test_markup_in_texts_of_the_data_is_shown_literally(tmp_path: Path, text: str) -> None:
    card = write_card_with_text(tmp_path / "markup", text)
    plain_card = write_card_with_text(tmp_path / "plain", "a")
    assert front_matter(tmp_path / "markup") == front_matter(tmp_path / "plain")
    front = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
    page, plain_page = render_page(front.sub("", card)), render_page(front.sub("", plain_card))
    assert page.tags == plain_page.tags
    printable = "".join(character if character.isprintable() else " " for character in text)
    on_one_line = " ".join(printable.split())
    assert page.text.count(on_one_line) >= 9
    assert card.count("\n") == plain_card.count("\n")
    assert "://" not in card.replace("\\://", "")
    assert "www." not in card


def test_long_texts_are_shortened(tmp_path: Path) -> None:
    results, predictions = classifier_results()
    mistake = next(prediction for prediction in predictions if not prediction["correct"])
    card = card_of(tmp_path, results, dev=[mistake | {"input": "word " * 1000}])
    _, rows = table_under(card, "## The worst mistakes on dev")
    quoted = rows[0][0]
    assert len(quoted) <= 240
    assert quoted.endswith("…")
    assert escape_markdown("x" * 300, 10) == "x" * 9 + "…"
    assert escape_markdown("x" * 10, 10) == "x" * 10


@pytest.mark.parametrize("text", ["7. a", "12) a", "2024. A year", "123456789) a", "1."])
def test_a_number_at_the_beginning_of_a_text_starts_no_list(text: str) -> None:
    assert MarkdownIt("commonmark").render(escape_markdown(text)) == f"<p>{text}</p>\n"


def test_speed_data_and_settings(tmp_path: Path) -> None:
    results, _ = classifier_results(settings={"train": {"batch_size": 32, "text": "```\n</details>"}})
    text = card_of(tmp_path, results)
    assert "Milliseconds for one text on EPYC, 2 cores, avx2" in text
    assert "41,250 tokens a second" in text
    _, speed_rows = table_under(text, "## Speed")
    assert speed_rows == [["16", "1.21", "1.90"], ["64", "2.50", "3.75"]]
    _, data_rows = table_under(text, "## Data")
    assert data_rows == [["train", "3,200"], ["dev", "400"], ["test", "400"]]
    assert f"| train.csv | `{'ab' * 32}` |" in text
    assert "- train.csv: commas, a header" in text
    assert "1,234,567 parameters and takes 4.9 MB" in text
    assert "heedful 0.1.0, torch 2.13.0." in text
    (settings,) = re.findall(r"```json\n(.*?)\n```\n", text, re.DOTALL)
    assert json.loads(settings) == results["settings"]
    page = render_page(text)
    assert page.tags.count("details") == 2
    assert '"```\\n</details>"' in page.text, "a setting that looks like the end of the folded text"


def test_the_shares_of_the_labels_in_train(tmp_path: Path) -> None:
    results, _ = classifier_results(label_counts={"bad": 800, "good | fine": 2400})
    text = card_of(tmp_path, results)
    assert "| bad | 800 | 25.0 % |\n| good \\| fine | 2,400 | 75.0 % |\n" in text
    many = {f"label {number}": 1 for number in range(40)}
    assert "<summary>40 labels</summary>" in card_of(tmp_path / "many", results | {"label_counts": many})


def test_sections_without_entries_in_the_results_are_left_out(tmp_path: Path) -> None:
    results, _ = classifier_results()
    for name in ("latency", "throughput", "machine", "data", "versions", "settings", "seeds", "notes", "model", "base"):
        results.pop(name)
    text = card_of(tmp_path, results)
    assert "## Speed" not in text
    assert "## Data" not in text
    assert "All settings" not in text


def test_the_section_on_use_fits_the_inputs_and_the_architecture(tmp_path: Path) -> None:
    results, predictions = classifier_results()
    text = card_of(tmp_path, results, dev=predictions)
    assert 'heedful predict path/to/model "a text"\n' in text
    assert 'engine(["a text"])' in text
    assert 'pipeline("text-classification", model="path/to/model")' in text
    assert 'answer("a text")' in text
    assert "maximum length are read in windows, whose answers are merged; transformers does not do this." in text
    pair_predictions = [prediction | {"input": ["one", "other"]} for prediction in predictions]
    with_pairs = card_of(tmp_path, results, dev=pair_predictions)
    assert 'heedful predict path/to/model "a text" --pair "another"' in with_pairs
    assert 'engine([("a text", "another")])' in with_pairs
    assert 'answer({"text": "a text", "text_pair": "another"})' in with_pairs
    heedful_only = card_of(tmp_path, results, model_type="heedful", dev=predictions)
    assert "other libraries cannot load it" in heedful_only
    assert "from transformers" not in heedful_only
    assert front_matter(tmp_path)["library_name"] == "heedful"


MODEL_BY_TASK = {  # a model of `make_model_dir` for each task
    "classify": "single",
    "multiple": "multiple",
    "rank": "regression",
    "regress": "regression",
    "tag": "tag",
    "qa": "span",
    "multiple-choice": "choice",
    "embed": "bare",
}


@pytest.mark.parametrize("task", MODEL_BY_TASK)
@pytest.mark.parametrize("pairs", [False, True])
def test_the_code_and_the_command_of_the_card_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, pairs: bool
) -> None:
    folder = make_model_dir(tmp_path / "model", MODEL_BY_TASK[task])
    if task == "embed":
        transformer, pooling = modules.Transformer(str(folder)), modules.Pooling(32, pooling_mode="mean")
        SentenceTransformer(modules=[transformer, pooling], device="cpu").save(str(folder))
    paragraphs = usage(task, heedful_only=False, pairs=pairs and task != "tag")
    text = "\n".join("\n".join(lines) for lines in paragraphs).replace("path/to/model", str(folder))
    codes = re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
    assert len(codes) == 2
    for code in codes:
        capsys.readouterr()
        exec(compile(code, task, "exec"), {})
        assert capsys.readouterr().out.strip()
    (command,) = re.findall(r"```sh\nheedful (.*?)\n```", text)
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output


def test_equal_runs_have_equal_cards(tmp_path: Path) -> None:
    results, predictions = classifier_results()
    card = card_of(tmp_path / "first", results, dev=predictions)
    assert card_of(tmp_path / "second", results, dev=predictions) == card
    assert card_of(tmp_path / "first", results, dev=predictions) == card, "a card that replaces an earlier one"


def test_a_run_without_a_model_is_refused(tmp_path: Path) -> None:
    results, _ = classifier_results()
    run_folders.write_run_folder(tmp_path, results)
    with pytest.raises(HeedfulError, match=r"has no model/config\.json: save the model before its card"):
        write_finetuned_card(tmp_path)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, "0.500"),
        (0, "0.000"),
        (-0.00012345, "-0.000123"),
        (999.5, "999.500"),
        (1e6, "1,000,000"),
        (1e-300, "1e-300"),
        ("NaN", "NaN"),
        ("Infinity", "∞"),
        ("-Infinity", "-∞"),
        (None, "NaN"),
    ],
)
def test_format_number(value: Any, expected: str) -> None:
    assert format_number(value) == expected
