"""The folders of the GLUE tasks, with a few invented rows in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from heedful.data import DataSettings, LabelledExample, PairExample, ScoredExample, Skip, read
from heedful.data.labelled.glue import LAYOUTS
from heedful.errors import HeedfulError

FILES = {
    "CoLA": {
        "train.tsv": 'aa01\t1\t\tHe ran.\naa01\t0\t*\tRan he "and.\n',
        "test.tsv": "index\tsentence\n0\tShe ran.\n",
    },
    "SST-2": {"train.tsv": "sentence\tlabel\nfine \t1\n", "test.tsv": "index\tsentence\n0\tgood\n"},
    "QQP": {"train.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tWhy?\tHow?\t0\n"},
    "QNLI": {"train.tsv": "index\tquestion\tsentence\tlabel\n0\tWhy?\tSo.\tentailment\n"},
    "RTE": {"train.tsv": "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tnot_entailment\n"},
    "WNLI": {"train.tsv": "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\t1\n"},
}
STS = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
)
MRPC = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"


def write_folder(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


@pytest.mark.parametrize("task", FILES)
def test_layouts(tmp_path: Path, task: str) -> None:
    dataset = read(write_folder(tmp_path / task, FILES[task]))
    expected = {
        "CoLA": [LabelledExample(text="He ran.", label="1"), LabelledExample(text='Ran he "and.', label="0")],
        "SST-2": [LabelledExample(text="fine ", label="1")],
        "QQP": [LabelledExample(text="Why?", text_pair="How?", label="0")],
        "QNLI": [LabelledExample(text="Why?", text_pair="So.", label="entailment")],
        "RTE": [LabelledExample(text="A.", text_pair="B.", label="not_entailment")],
        "WNLI": [LabelledExample(text="A.", text_pair="B.", label="1")],
    }[task]
    examples = [*dataset.examples("train"), *dataset.examples("dev")]
    assert examples in (expected, expected[::-1]), "either example may have come to the dev split"
    assert f"GLUE's {task}; quotes are read literally" in dataset.stated
    assert dataset.splits == ("train", "dev")
    if "test.tsv" in FILES[task]:
        assert "test.tsv: its labels are hidden, so it is left out" in dataset.stated


def test_pairs_with_scores_are_read_for_sentence_embeddings(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "STS-B", {"train.tsv": STS + '0\tg\tf\t2012\t1\tn\tn\tA "b.\tC.\t2.5\n'})
    dataset = read(path, PairExample, DataSettings(dev_fraction=0.0))
    assert list(dataset.examples("train")) == [PairExample(anchor='A "b.', positive="C.", score=2.5)]


def test_scores(tmp_path: Path) -> None:
    row = '0\tg\tf\t2012\t1\tn\tn\tA "b.\tC.\t'
    files = {
        "train.tsv": STS + row + "2.5\n",
        "dev.tsv": STS + row + "5.000\n" + row + "high\n",
        "test.tsv": STS.replace("\tscore", ""),
        "original/sts-test.tsv": "g\tf\t2012\t1\t3.2\tA.\tB.\ng\tf\t2012\t1\t1\tC.\tD.\tn\tn\n",
    }
    dataset = read(write_folder(tmp_path / "STS-B", files), on_bad_row=Skip())
    assert list(dataset.examples("dev")) == [ScoredExample(text='A "b.', text_pair="C.", score=5.0)]
    assert dataset.row_errors.first[0].column == "score"
    assert [example.score for example in dataset.examples("test")] == [3.2, 1.0]
    assert "test: original/sts-test.tsv, since the labels of test.tsv are hidden" in dataset.stated


def test_matched_and_mismatched_dev_files(tmp_path: Path) -> None:
    head, row = f"{MNLI}\tsentence1\tsentence2\tlabel1\tgold_label\n", "0\t1\t2\tg\t_\t_\t_\t_\tA.\tB.\tneutral\t"
    files = {"train.tsv": head + "".join(f"{row}{label}\n" for label in ("neutral", "entailment", "contradiction"))}
    files |= dict.fromkeys(("dev_matched.tsv", "dev_mismatched.tsv"), head + row + "neutral\n")
    dataset = read(write_folder(tmp_path / "MNLI", files))
    assert dataset.splits == ("train", "dev", "dev-mismatched")
    assert dataset.labels == ("contradiction", "entailment", "neutral")
    (tmp_path / "MNLI" / "dev_matched.tsv").write_text(head + row + "-\n")
    with pytest.raises(
        HeedfulError, match=r'dev_matched\.tsv:2: the label "-" is not in train, which has "contradiction"'
    ):
        list(read(tmp_path / "MNLI").examples("dev"))


def test_mrpc_rows_missing_from_train_are_restored(tmp_path: Path) -> None:
    files = {
        "train.tsv": MRPC + '1\t11\t12\t" a\tb\n',
        "dev.tsv": MRPC + "0\t21\t22\tc\td\n",
        "msr_paraphrase_train.txt": MRPC + '1\t11\t12\t" a\tb\n0\t31\t32\te\tf\n0\t21\t22\tc\td\n',
        "msr_paraphrase_test.txt": MRPC + "0\t41\t42\tg\th\n",
        "dev_ids.tsv": "21\t22\n",
    }
    dataset = read(write_folder(tmp_path / "MRPC", files))
    assert [(example.text, example.line) for example in dataset.examples("train")] == [('" a', 2), ("e", 3)]
    assert [example.text for example in dataset.examples("dev")] == ["c"]
    assert [example.text for example in dataset.examples("test")] == ["g"]
    assert any("train.tsv lacks 1 of the pairs" in note and "(31 / 32)" in note for note in dataset.stated)
    (tmp_path / "MRPC" / "msr_paraphrase_train.txt").unlink()
    assert len(list(read(tmp_path / "MRPC").examples("train"))) == 1


def test_wrong_folders(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "mine", FILES["SST-2"])
    assert read(path).stated[1] == "train: train.tsv"
    with pytest.raises(
        HeedfulError, match=r"mine: is not the folder of a GLUE task, which has a train\.tsv and one of the names CoLA"
    ):
        read(path, settings=DataSettings(format="glue"))
    with pytest.raises(
        HeedfulError,
        match=r"an example of SST-2 is a text, or two, with one label, but this task needs a text, .* a number",
    ):
        read(write_folder(tmp_path / "SST-2", FILES["SST-2"]), ScoredExample)
    (tmp_path / "SST-2" / "train.tsv").write_text("sentence\tlabel\nfine\n")
    with pytest.raises(HeedfulError, match=r"train\.tsv:2: has 1 cells, expected 2 as in line 1; quotes count as text"):
        list(read(tmp_path / "SST-2").examples("train"))
    assert len(LAYOUTS) == 9
