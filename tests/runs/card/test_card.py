"""The model card: what it says, and that nothing in the data can make it say more."""

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

EVIL = [
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
    """The tags and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def page(text: str) -> Page:
    """Markdown as the hub shows it."""
    return Page(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text))


def run(folder: Path, results: dict[str, Any], kind: str = "bert", **predictions: list[run_folders.Line]) -> Path:
    """A run folder with a model."""
    run_folders.write_run_folder(folder, results, [], **predictions)
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


def card(folder: Path, results: dict[str, Any], kind: str = "bert", **predictions: list[run_folders.Line]) -> str:
    """The text of its card."""
    path = write_finetuned_card(run(folder, results, kind, **predictions))
    assert path == folder / "model" / "README.md"
    assert sorted(each.name for each in path.parent.iterdir()) == ["README.md", "config.json"]
    return path.read_text(encoding="utf-8")


def classified(**more: Any) -> tuple[dict[str, Any], list[run_folders.Line]]:
    """The results of a classifier with dev and test, and what it said on dev."""
    (dev, lines), (test, _) = (
        run_folders.classification_result(["bad", "good"]),
        run_folders.classification_result(["bad", "good"], 50, seed=1),
    )
    return run_folders.results_json(
        "classify", "accuracy", {"dev": dev, "test": test}, **({"labels": ["bad", "good"]} | more)
    ), lines


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    part = text[text.index(f"\n{heading}\n") :]
    lines = re.search(r"(?:^\|.*\n)+", part, re.MULTILINE)
    assert lines
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[0].strip().split("\n")]


def test_front_matter(tmp_path: Path) -> None:
    results, lines = classified(base="someone/their-model@" + "0" * 40)
    card(tmp_path, results, dev=lines)
    assert metadata_load(tmp_path / "model" / "README.md") == {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["heedful"],
        "base_model": "someone/their-model",
        "metrics": ["accuracy", "f1", "matthews_correlation"],
        "model-index": metadata_load(tmp_path / "model" / "README.md")["model-index"],
    }


def test_scores_for_the_hub(tmp_path: Path) -> None:
    """The hub's own library reads the scores of test in the front matter; the data is not named."""
    results, lines = classified()
    card(tmp_path, results, dev=lines)
    name, scores = model_index_to_eval_results(metadata_load(tmp_path / "model" / "README.md")["model-index"])
    numbers = results["splits"]["test"]["numbers"]
    expected = {
        "accuracy": numbers["accuracy"], "f1": numbers["macro_f1"], "matthews_correlation": numbers["matthews"],
    }  # fmt: skip
    assert name == "Text classification"
    assert {score.metric_type: score.metric_value for score in scores} == pytest.approx(expected, abs=1e-6)
    assert {(score.task_type, score.dataset_split) for score in scores} == {("text-classification", "test")}


def test_plots_go_into_the_card(tmp_path: Path) -> None:
    results, lines = classified()
    folder = run(tmp_path, results, dev=lines)
    draw_run_plots(folder)
    text = write_finetuned_card(folder).read_text()
    for name in ("confusion", "calibration", "coverage"):
        assert f"](plots/{name}.png)" in text
        assert (folder / "model/plots" / f"{name}.png").read_bytes() == (folder / "plots" / f"{name}.png").read_bytes()
    assert "<summary>As a table</summary>" in text


@pytest.mark.parametrize(
    ("base", "shown"), [("/disk/models/secret", "secret"), ("../up/mine", "mine"), ("runs/a b", "runs/a b"), ("", None)]
)
def test_a_local_base_is_no_base_model(tmp_path: Path, base: str, shown: str | None) -> None:
    settings = {"start": {"model": base}, "list": [base]}
    text = card(tmp_path, classified(base=base, settings=settings)[0])
    assert "base_model" not in metadata_load(tmp_path / "model" / "README.md")
    assert ("Trained with Heedful from" in text) == bool(base) and "/disk/models" not in text and "../up" not in text
    if shown:
        assert f"Trained with Heedful from {shown}." in text and f'"model": "{shown}"' in text


def test_every_task_has_a_card(tmp_path: Path) -> None:
    scored = run_folders.regression_result()[0]
    numbers: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
        "classify": ("accuracy", run_folders.classification_result(["a", "b"])[0], "text-classification", ["accuracy"]),
        "multiple": ("micro_f1", run_folders.multilabel_result(["a", "b"]), "text-classification", ["f1"]),
        "rank": ("ndcg@10", {"ndcg@10": 0.5, "map": 0.4, "mrr": 0.6, "count": 10}, "text-ranking", ["ndcg@10", "map"]),
        "regress": ("spearman", scored, "text-classification", ["pearsonr", "spearmanr", "mse"]),
        "tag": ("f1", run_folders.tagging_result(), "token-classification", ["f1"]),
        "qa": ("f1", {"exact": 0.5, "f1": 0.6, "count": 10}, "question-answering", ["exact_match", "f1"]),
        "multiple-choice": ("accuracy", {"accuracy": 0.5, "count": 10, "loss": 0.7}, "multiple-choice", ["accuracy"]),
        "embed": ("spearman", scored, "sentence-similarity", ["pearsonr", "spearmanr", "mse"]),
        "seq2seq": ("f1", {"exact": 0.5, "f1": 0.6, "count": 10}, "text2text-generation", ["exact_match", "f1"]),
    }
    assert numbers.keys() == SPECS.keys()
    for task, (main, run_results, pipeline, metrics) in numbers.items():
        text = card(tmp_path / task, run_folders.results_json(task, main, {"dev": run_results}))
        front = metadata_load(tmp_path / task / "model" / "README.md")
        assert front["pipeline_tag"] == pipeline and set(metrics) <= set(front["metrics"])
        assert front["library_name"] == ("sentence-transformers" if task in ("embed", "rank") else "transformers")
        assert f"# {SPECS[task].card.name}\n" in text and f"**{main}**" in text
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            compile(code, task, "exec")
            assert "{" not in code.replace('{"', "").replace("{name: values", "")


def test_quality_table(tmp_path: Path) -> None:
    results, lines = classified()
    results["splits"]["dev"]["numbers"] |= {"loss": "NaN", "accuracy": 0.8125}
    results["splits"]["dev"]["intervals"]["accuracy"] |= {"low": 0.7712, "high": 0.8534}
    text = card(tmp_path, results, dev=lines)
    table = rows(text, "## Quality")
    assert table[0] == ["", "dev", "test"]
    assert [line[0] for line in table[2:]] == ["**accuracy**", "macro_f1", "matthews", "ece", "examples"]
    assert table[2][:2] == ["**accuracy**", "81.2 % (77.1 % to 85.3 %)"]
    folded = rows(text, "<summary>Further metrics</summary>\n")
    named = {line[0]: line[1:] for line in (*table[2:], *folded[2:])}
    assert named["examples"] == ["400", "50"] and named["loss"][0] == "NaN"
    assert named["macro_f1"] == [f"{100 * each['numbers']['macro_f1']:.1f} %" for each in results["splits"].values()]
    assert "confusion" not in named and "count" not in named
    scores = [name for name, value in results["splits"]["test"]["numbers"].items() if isinstance(value, float)]
    assert len(named) == len(table) + len(folded) - 4 == len(scores) + 1, "each metric is there once"
    results["metric"] = "macro_f1"
    assert rows(card(tmp_path, results, dev=lines), "## Quality")[2][0] == "**macro_f1**"


def test_what_the_numbers_are_of(tmp_path: Path) -> None:
    results, lines = classified()
    text = card(tmp_path, results, dev=lines)
    assert "95 % intervals from 1,000 bootstrap replicates" in text
    assert "those of step 250 of 300, the best on dev; so the numbers of dev are slightly optimistic, and those" in text
    assert "There is no test split" not in text
    del results["splits"]["test"]
    chosen = "There is no test split: what is known comes from dev, by which the model was chosen."
    assert chosen in card(tmp_path, results, dev=lines)
    results["settings"]["fit"] = {"load_best_at_end": False}
    text = card(tmp_path, results, dev=lines)
    assert "The weights are those after 300 steps." in text
    assert "There is no test split: what is known comes from dev.\n" in text, "which decided nothing"
    results["settings"]["fit"] = {"load_best_at_end": False, "patience": 2}
    assert chosen in card(tmp_path, results, dev=lines)
    results["splits"] = {}
    text = card(tmp_path, results)
    assert "Nothing was measured" in text and "- Not measured at all." in text and "mistakes" not in text


@pytest.mark.parametrize("load_best", [True, False])
def test_thresholds_that_were_fitted_on_dev(tmp_path: Path, load_best: bool) -> None:
    results = run_folders.results_json("multiple", "micro_f1", {"dev": run_folders.multilabel_result(["x", "y"])})
    settings = {"task": {"kind": "multiple", "thresholds": "tuned"}, "fit": {"load_best_at_end": load_best}}
    seeds = [{"seed": 1, "best_step": 9, "steps": 10, "seconds": 2.0, "splits": {"dev": 0.5}}]
    text = card(tmp_path, results | {"settings": settings, "seeds": seeds, "seed": 1})
    assert ", and thresholds were fitted on dev; so the numbers of dev are slightly optimistic." in text
    chosen = "by which the model was chosen and " if load_best else ""
    assert f"what is known comes from dev, {chosen}on which its thresholds were fitted." in text
    extract = run_folders.results_json("qa", "f1", {"dev": {"f1": 0.5, "best_f1_threshold": -1.0, "count": 9}})
    settings = {"task": {"kind": "qa", "no_answer_threshold": "tuned"}, "fit": {"load_best_at_end": load_best}}
    extract |= {"settings": settings, "seeds": seeds, "seed": 1}
    assert "thresholds were fitted on dev" in card(tmp_path, extract)
    del extract["splits"]["dev"]["numbers"]["best_f1_threshold"]
    assert "thresholds" not in card(tmp_path, extract).replace('"no_answer_threshold"', ""), (
        "every question has an answer"
    )


def test_a_note_of_several_splits_stands_there_once(tmp_path: Path) -> None:
    results, lines = classified()
    for split in results["splits"].values():
        split["numbers"]["notes"] = ['f1 is that of "good"']
    assert card(tmp_path, results, dev=lines).count('- On dev and test: f1 is that of "good".') == 1


def test_scores_and_cosines_stand_on_one_scale(tmp_path: Path) -> None:
    line = {
        "id": 0,
        "correct": None,
        "loss": 0.5,
        "answer": {},
        "input": ["one", "other"],
        "label": 4.2,
        "prediction": 0.25,
    }
    run_results = run_folders.results_json(
        "embed", "spearman", {"dev": {"spearman": 0.5, "count": 1}}, label_scaling={"low": 1, "high": 5}
    )
    table = rows(card(tmp_path, run_results, dev=[line]), "## The worst mistakes on dev")
    assert table[2] == ["one / other", "4.200", "2.000 (a cosine of 0.250)"]


def test_several_seeds(tmp_path: Path) -> None:
    scores = [0.8, 0.9, 0.85]
    both = [{"splits": {"dev": each, "test": each / 2}} for each in scores]
    seeds = [{"seed": n, "best_step": 9, "steps": 10, "seconds": 2.0} | each for n, each in enumerate(both, start=1)]
    text = card(tmp_path, classified(seeds=seeds, seed=2)[0])
    table = rows(text, "### Over seeds")
    assert table[0] == ["seed", "accuracy on dev", "accuracy on test"]
    assert table[3] == ["2", "90.0 %", "45.0 %"]
    deviation = np.std(scores, ddof=1)
    assert table[5] == ["mean ± deviation", f"85.0 % ± {100 * deviation:.1f} %", f"42.5 % ± {50 * deviation:.1f} %"]
    assert "that of seed 2, the best of 3 on dev" in text and "Trained with one seed" not in text
    assert "30 steps in 6 s, over 3 seeds." in text
    one = card(tmp_path, classified()[0])
    assert "Over seeds" not in one and "Trained with one seed" in one


def test_each_class(tmp_path: Path) -> None:
    run_results, _ = classified()
    text = card(tmp_path, run_results)
    table = rows(text, "### Each class, on test")
    scores = run_results["splits"]["test"]["numbers"]["classes"]["good"]
    assert table[0] == ["class", "precision", "recall", "F1", "examples"]
    assert table[3] == [
        "good",
        *(f"{100 * scores[name]:.1f} %" for name in ("precision", "recall", "f1")),
        str(scores["count"]),
    ]
    assert "on test 2 of 2 have fewer than 30 examples (bad, good)" in text and "<details>\n<summary>2" not in text
    many, _ = run_folders.classification_result([f"c{n}" for n in range(77)])
    assert "<summary>77 rows</summary>" in card(
        tmp_path, run_folders.results_json("classify", "accuracy", {"dev": many})
    )
    labels = card(
        tmp_path, run_folders.results_json("multiple", "micro_f1", {"dev": run_folders.multilabel_result(["x", "y"])})
    )
    assert rows(labels, "### Each label, on dev")[0] == ["label", "precision", "recall", "F1", "examples"]
    types = card(tmp_path, run_folders.results_json("tag", "f1", {"dev": run_folders.tagging_result()}))
    assert len(rows(types, "### Each type of entity, on dev")) == 6


def test_calibration(tmp_path: Path) -> None:
    results, _ = classified()
    text = card(tmp_path, results)
    numbers = results["splits"]["test"]["numbers"]
    assert f"error on test: {100 * numbers['ece']:.1f} %" in text
    table = rows(text, "## Calibration")
    assert [line[1] for line in table[2:]] == [str(each["count"]) for each in numbers["calibration"]]


def test_the_five_worst_mistakes(tmp_path: Path) -> None:
    results, lines = classified()
    table = rows(card(tmp_path, results, dev=lines), "## The worst mistakes on dev")
    wrong = [line for line in lines if not line["correct"]][:5]
    assert [line[0] for line in table[2:]] == [line["input"] for line in wrong]
    sure = [f"{line['prediction']} ({100 * line['answer']['probability']:.1f} %)" for line in wrong]
    assert [line[1:] for line in table[2:]] == [[each["label"], shown] for each, shown in zip(wrong, sure, strict=True)]
    right = [line for line in lines if line["correct"]]
    for predictions in ({}, {"dev": right}, {"dev": []}, {"test": lines}):
        (tmp_path / "predictions-dev.jsonl").unlink(missing_ok=True)
        assert "mistakes" not in card(tmp_path, results, **predictions)


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
    line, expected = MISTAKES[task]
    line = {"id": 0, "correct": False, "loss": 1.0, "answer": {}} | line
    run_results = run_folders.results_json(task, "score", {"dev": {"score": 0.5, "count": 1}})
    assert rows(card(tmp_path, run_results, dev=[line]), "## The worst mistakes on dev")[2] == expected


def test_a_pair_that_was_found_is_no_mistake(tmp_path: Path) -> None:
    line = {"id": 0, "loss": 0.9, "input": ["one", "other"], "label": None, "prediction": 0.1, "answer": {}}
    run_results = run_folders.results_json("embed", "accuracy", {"dev": {"accuracy": 1.0, "count": 2}})
    assert "mistakes" not in card(tmp_path, run_results, dev=[line | {"correct": True}, line | {"correct": None}])


@pytest.mark.parametrize("evil", EVIL)
def test_texts_are_shown_and_do_nothing(tmp_path: Path, evil: str) -> None:
    results, _ = classified(labels=[evil, "b"], base=evil, machine=evil, notes=[evil], versions={"x": evil})
    calm, _ = classified(labels=["a", "b"], base="a", machine="a", notes=["a"], versions={"x": "a"})
    for each, name in ((results, evil), (calm, "a")):
        each["data"] = {"stated": [name], "splits": {name: {"examples": 3}}, "files": {name: "0f" * 32}}
        for split in each["splits"].values():
            split["numbers"] |= {"notes": [name]}
            split["numbers"]["classes"] = {name: split["numbers"]["classes"]["good"]}
    wrong = {"correct": False, "answer": {}}
    text = card(tmp_path / "evil", results, dev=[{"input": evil, "label": evil, "prediction": evil} | wrong])
    usual = card(tmp_path / "calm", calm, dev=[{"input": "a", "label": "a", "prediction": "a"} | wrong])
    assert metadata_load(tmp_path / "evil" / "model" / "README.md") == metadata_load(
        tmp_path / "calm" / "model" / "README.md"
    )
    front = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
    seen, expected = page(front.sub("", text)), page(front.sub("", usual))
    assert seen.tags == expected.tags
    shown = " ".join("".join(each if each.isprintable() else " " for each in evil).split())
    assert seen.text.count(shown) >= 9
    assert text.count("\n") == usual.count("\n")
    assert "://" not in text.replace("\\://", "") and not re.search(r"www\.", text)


def test_long_texts_are_shortened(tmp_path: Path) -> None:
    results, lines = classified()
    wrong = next(line for line in lines if not line["correct"]) | {"input": "word " * 1000}
    table = rows(card(tmp_path, results, dev=[wrong]), "## The worst mistakes on dev")
    assert len(table[2][0]) <= 240 and table[2][0].endswith("…")
    assert escape_markdown("x" * 300, 10) == "x" * 9 + "…" and escape_markdown("x" * 10, 10) == "x" * 10


@pytest.mark.parametrize("text", ["7. a", "12) a", "2024. A year", "123456789) a", "1."])
def test_numbers_at_the_beginning_make_no_list(text: str) -> None:
    assert MarkdownIt("commonmark").render(escape_markdown(text)) == f"<p>{text}</p>\n"


def test_speed_data_and_settings(tmp_path: Path) -> None:
    results, _ = classified(settings={"train": {"batch_size": 32, "text": "```\n</details>"}})
    text = card(tmp_path, results)
    assert "Milliseconds for one text on EPYC, 2 cores, avx2" in text and "41,250 tokens a second" in text
    assert rows(text, "## Speed")[2:] == [["16", "1.21", "1.90"], ["64", "2.50", "3.75"]]
    assert rows(text, "## Data")[2:] == [["train", "3,200"], ["dev", "400"], ["test", "400"]]
    assert f"| train.csv | `{'ab' * 32}` |" in text and "- train.csv: commas, a header" in text
    assert "1,234,567 parameters and takes 4.9 MB" in text and "heedful 0.1.0, torch 2.13.0." in text
    (settings,) = re.findall(r"```json\n(.*?)\n```\n", text, re.DOTALL)
    assert json.loads(settings) == results["settings"]
    assert page(text).tags.count("details") == 2 and '"```\\n</details>"' in page(text).text
    for name in ("latency", "throughput", "machine", "data", "versions", "settings", "seeds", "notes", "model", "base"):
        results.pop(name)
    bare = card(tmp_path, results)
    assert not {"## Speed", "## Data", "All settings"} & set(bare.split("\n"))


def test_how_to_use_it(tmp_path: Path) -> None:
    results, lines = classified()
    text = card(tmp_path, results, dev=lines)
    assert 'heedful predict path/to/model "a text"\n' in text and 'engine(["a text"])' in text
    assert 'pipeline("text-classification", model="path/to/model")' in text and 'answer("a text")' in text
    pairs = card(tmp_path, results, dev=[line | {"input": ["one", "other"]} for line in lines])
    assert 'heedful predict path/to/model "a text" --pair "another"' in pairs
    assert 'engine([("a text", "another")])' in pairs and 'answer({"text": "a text", "text_pair": "another"})' in pairs
    own = card(tmp_path, results, kind="heedful", dev=lines)
    assert "other libraries do not know" in own and "from transformers" not in own
    assert metadata_load(tmp_path / "model" / "README.md")["library_name"] == "heedful"


HEADS = {
    "classify": "single",
    "multiple": "multiple",
    "rank": "regression",
    "regress": "regression",
    "tag": "tag",
    "qa": "span",
}
HEADS |= {"multiple-choice": "choice", "embed": "bare"}


@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("pairs", [False, True])
def test_what_it_says_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, pairs: bool) -> None:
    folder = make_model_dir(tmp_path / "model", HEADS[task])
    if task == "embed":
        parts = [modules.Transformer(str(folder)), modules.Pooling(32, pooling_mode="mean")]
        SentenceTransformer(modules=parts, device="cpu").save(str(folder))
    usage_text = "\n".join("\n".join(part) for part in usage(task, heedful_only=False, pairs=pairs and task != "tag"))
    usage_text = usage_text.replace("path/to/model", str(folder))
    codes = re.findall(r"```python\n(.*?)\n```", usage_text, re.DOTALL)
    assert len(codes) == 2
    for code in codes:
        capsys.readouterr()
        exec(compile(code, task, "exec"), {})
        assert capsys.readouterr().out.strip()
    (command,) = re.findall(r"```sh\nheedful (.*?)\n```", usage_text)
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output


def test_the_same_run_gives_the_same_card(tmp_path: Path) -> None:
    results, lines = classified()
    assert card(tmp_path / "one", results, dev=lines) == card(tmp_path / "two", results, dev=lines)
    assert card(tmp_path / "one", results, dev=lines) == card(tmp_path / "two", results, dev=lines)


def test_without_a_model_there_is_no_card(tmp_path: Path) -> None:
    results, _ = classified()
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
def test_numbers(value: Any, expected: str) -> None:
    assert format_number(value) == expected
