"""Studies in their quick form, whose conclusions are not checked, and the parts of studies that can be checked."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heedful.cli import main
from heedful.data import LabelledExample
from heedful.errors import HeedfulError
from heedful.objectives import Sample
from heedful.objectives.masked_lm import MaskedLM
from heedful.runs.plots import style
from heedful.study import REAL, STUDIES, charts, complexity, multi30k, runner, scores
from heedful.study.build import word_level_tokenizer
from heedful.study.complexity import THEORY, TOLERANCE, exponent, make_layer, saved_bytes
from heedful.study.layers import Convolution, replace_layer_norms, unfused_self_attention
from heedful.study.limits import negation_part
from heedful.study.masking import with_shares
from heedful.study.positions import ARMS, NONE, PERMUTED, build_model, permutation_change
from heedful.study.pretraining_common import pretraining_data
from heedful.study.runner import Measure, StudyConfig, StudyResult, run_study
from heedful.tokenizer import TokenizerSettings, train_tokenizer

QUICK = StudyConfig(seeds=(1,), scale="quick")
STEP_TIME = "ms of a step"  # a measure of the study `scores` that differs in each run


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let torch use one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", STUDIES)
def test_quick(tmp_path: Path, name: str) -> None:
    messages: list[str] = []
    completed = run_study(name, replace(QUICK, log=messages.append), tmp_path)
    assert messages
    assert all(path.stat().st_size > 500 for path in completed.files)
    saved = json.loads((tmp_path / f"{name}.json").read_text())
    head, rows = completed.result.table()
    assert saved["table"] == [list(head), *map(list, rows)]
    assert saved["verdicts"]
    for measure in saved["measures"].values():
        assert all(len(values) == 1 for values in measure["of"].values()), "one value for the only seed"
    for png_file in tmp_path.glob("*.png"):
        data = png_file.read_bytes()
        assert data.startswith(b"\x89PNG")
        width = int.from_bytes(data[16:20], "big")
        assert width <= 830, png_file.name
        assert b"<svg" in png_file.with_suffix(".svg").read_bytes()


@pytest.mark.parametrize("name", [study for study in STUDIES if study != "complexity"])
def test_a_stopped_study_resumes(tmp_path: Path, name: str) -> None:
    """The results are those of a study that was not stopped, no arm is trained twice, and no other file is left."""
    messages: list[str] = []

    def recorded_arms() -> list[str]:
        """Return the messages about arms that were trained with a seed."""
        return [message for message in messages if " seed " in message]

    def log_and_stop(text: str) -> None:
        messages.append(text)
        if len(recorded_arms()) == 2:
            raise KeyboardInterrupt

    config = StudyConfig(seeds=(1, 2), scale="quick", log=messages.append)
    whole = run_study(name, config, tmp_path / "whole")
    num_arms = len(recorded_arms())
    messages.clear()
    with pytest.raises(KeyboardInterrupt):
        run_study(name, replace(config, log=log_and_stop), tmp_path / "resumed")
    assert messages[-1] == "stopped; the same command resumes it."
    messages.clear()
    resumed = run_study(name, config, tmp_path / "resumed")
    assert messages[0] == "resuming: results so far 2"
    assert len(recorded_arms()) == num_arms - 2
    for first, second in zip(whole.result.measures, resumed.result.measures, strict=True):
        assert first.name == second.name
        if first.name != STEP_TIME:
            assert first.values == second.values
    assert resumed.result.facts == whole.result.facts
    file_names = sorted(path.name for path in (tmp_path / "resumed").iterdir())
    assert file_names == sorted(path.name for path in whole.files)


def test_saved_results_of_another_scale_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    recorder = runner.Recorder(StudyConfig(scale="quick", partial_results=file))
    recorder.record("a", 1, {"x": 1.0}, {"loss": [1.0, 2.0]})
    same_scale = runner.Recorder(StudyConfig(scale="quick", partial_results=file))
    assert same_scale.missing_arms("ab", 1) == ["b"]
    other_scale = runner.Recorder(StudyConfig(scale="usual", partial_results=file))
    assert other_scale.missing_arms("ab", 1) == ["a", "b"]


def test_a_study_continues_if_its_results_cannot_be_saved(tmp_path: Path) -> None:
    messages: list[str] = []
    file = tmp_path / "none" / "results.json"
    recorder = runner.Recorder(StudyConfig(scale="quick", partial_results=file, log=messages.append))
    recorder.record("a", 1, {"x": 1.0})
    recorder.record("b", 1, {"x": 2.0})
    assert recorder.missing_arms("abc", 1) == ["c"]
    warning, _first_result, _second_result = messages
    assert "none/results.json cannot be written: No such file or directory" in warning


def test_exponents() -> None:
    sizes = [64, 128, 256, 512]
    noise = np.exp(np.random.default_rng(0).normal(0, 0.02, len(sizes)))
    noisy_power = [(size, 3e-6 * size**1.7 * factor) for size, factor in zip(sizes, noise, strict=True)]
    assert exponent(noisy_power) == pytest.approx(1.7, abs=0.05)
    assert exponent([(size, 5.0) for size in sizes]) == pytest.approx(0.0)


def test_bytes_that_are_saved_for_the_backward_pass() -> None:
    x = torch.randn(40, 8, requires_grad=True)
    input_bytes, weights_bytes = 4 * 40 * 8, 4 * 40 * 40
    assert saved_bytes(unfused_self_attention, x, None) >= weights_bytes + input_bytes
    convolution = Convolution(8, 3)
    assert saved_bytes(lambda rows: convolution(rows, (0, 40)), x, convolution) == input_bytes


@pytest.mark.parametrize("arm", THEORY)
def test_memory_grows_with_the_width_as_in_theory(arm: str) -> None:
    theory = THEORY[arm]
    _, length = theory.fixed
    points = []
    for width in theory.widths:
        layer, module = make_layer(arm, width, length)
        x = torch.randn(length, width, requires_grad=True)
        points.append((width, saved_bytes(layer, x, module)))
    expected = theory.exponents[complexity.NAMES.index("memory over d")]
    assert exponent(points) == pytest.approx(expected, abs=TOLERANCE)


def test_the_quick_form_of_complexity_has_its_own_sizes_and_no_verdict() -> None:
    result = complexity.run(QUICK)
    assert result.about.count("n 16 to 32 at d = 16, d 16 to 32 at n = 16") == len(THEORY), "for each layer"
    assert "over one seed. " in result.about
    assert result.verdicts == ("the quick form's sizes are too small for a verdict",)


def test_complexity_needs_three_seeds_for_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured time is replaced by n^2 d, which is not the theory of a convolution."""
    monkeypatch.setattr(complexity, "THEORY", complexity.QUICK)
    monkeypatch.setattr(complexity, "cpu_seconds", lambda layer, x, min_total: float(x.shape[0] ** 2 * x.shape[1]))
    few_seeds = complexity.run(StudyConfig(seeds=(1, 2)))
    assert few_seeds.verdicts == ("2 seeds, too few for a verdict: give 3 or more",)
    verdicts = complexity.run(StudyConfig(seeds=(1, 2, 3))).verdicts
    verdict_of_arm = dict(verdict.split(": ", 1) for verdict in verdicts)
    assert list(verdict_of_arm) == list(THEORY)
    assert verdict_of_arm["convolution"].startswith("time over n 2.00 where theory says 1: no reason is known")


def test_a_convolution_stays_in_its_sequence() -> None:
    convolution, x = Convolution(4, 3), torch.randn(9, 4)
    in_batch = convolution(x, (0, 5, 9))[:5]
    alone = convolution(x[:5], (0, 5))
    assert torch.allclose(in_batch, alone, atol=1e-6)


def test_only_a_model_without_positions_ignores_permutations() -> None:
    tokenizer = word_level_tokenizer(PERMUTED)
    for arm in ARMS:
        change = permutation_change(build_model(arm, tokenizer, 1))
        assert (change < 1e-5) == (arm == NONE), (arm, change)


def test_layer_norms_are_replaced_by_batch_norms() -> None:
    loaded = build_model("learned", word_level_tokenizer(PERMUTED), 1)

    def num_modules(cls: type[torch.nn.Module]) -> int:
        return sum(isinstance(module, cls) for module in loaded.modules())

    assert num_modules(torch.nn.LayerNorm) == 6
    replace_layer_norms(loaded.model)
    assert num_modules(torch.nn.LayerNorm) == 0
    assert num_modules(torch.nn.BatchNorm1d) == 6


@pytest.mark.parametrize(("masked", "replaced"), [(1.0, 0.0), (0.0, 1.0), (0.8, 0.0), (0.0, 0.0)])
def test_masks_with_other_shares(masked: float, replaced: float) -> None:
    tokenizer = train_tokenizer(["a b c d e f g h"] * 4, TokenizerSettings(vocab_size=60))
    ids = tokenizer.encode("a b c d e f g h " * 60).ids
    sample = Sample.of([ids], [[0] * len(ids)])
    objective = MaskedLM(tokenizer=tokenizer, mask_prob=0.5)
    batch = with_shares(objective, masked, replaced).batch([sample], [7])
    assert batch.rows is not None
    assert torch.equal(batch.rows, objective.batch([sample], [7]).rows), "the same positions are chosen"
    ids_at_targets = batch.packed.tokens[batch.rows]
    mask_share = float((ids_at_targets == tokenizer.special.mask).float().mean())
    expected = masked + replaced / tokenizer.size  # a random token may be the mask token
    assert mask_share == pytest.approx(expected, abs=0.08)
    all_kept = bool((ids_at_targets == batch.targets).all())
    assert all_kept == (masked + replaced == 0)


def test_positions_are_one_family_of_comparisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The study makes nine comparisons on both lengths, so the level of each is 1 - 0.05 / 9."""
    counts: list[int] = []
    compare_seeds = runner.compare_seeds

    def recorded_compare(*arguments: Any, **options: Any) -> str:
        counts.append(options["comparisons"])
        return compare_seeds(*arguments, **options)

    monkeypatch.setattr(runner, "compare_seeds", recorded_compare)
    run_study("positions", QUICK, tmp_path)
    assert counts == [9] * 9


def test_arms_of_scores_differ_only_in_the_score() -> None:
    """All layers of the arm without attention have the same initial weights in the other arms."""
    tokenizer = word_level_tokenizer(["ana has red"])
    arms = list(scores.ARMS)
    assert arms[1] == "cosine × 8"
    without_attention, *with_attention = (scores.build_model(arm, tokenizer, 3) for arm in arms)
    shared = dict(without_attention.named_parameters())
    assert any(name.endswith("out.weight") for name in shared)
    for model in with_attention:
        parameters = dict(model.named_parameters())
        assert all(torch.equal(parameter, parameters[name]) for name, parameter in shared.items())


def test_test_sets_have_the_same_sizes_with_all_seeds() -> None:
    """The texts of a test set are selected by their words, and these depend on the seed."""
    descriptions = set()
    for seed in (1, 2, 3):
        with pretraining_data(QUICK, seed, 16) as data:
            descriptions.add(data.about)
            assert len(data.train) == 16
            assert [len(texts) for texts in data.tests.values()] == [40, 40]
    assert len(descriptions) == 1


@pytest.mark.parametrize(
    ("seeds", "subtitle"), [(1, "one seed"), (4, "4 seeds (dots), their mean and its 95 % interval")]
)
def test_a_plot_says_how_many_seeds_it_shows(seeds: int, subtitle: str) -> None:
    measure = Measure(name="all", values={"bag": (0.5,) * seeds})
    with_metric = charts.dot_plot((measure,), ("bag",), "Bags", "accuracy")
    assert with_metric.get_suptitle() == f"Bags\naccuracy, {subtitle}"
    without_metric = charts.dot_plot((measure,), ("bag",), "Bags")
    assert without_metric.get_suptitle() == f"Bags\n{subtitle}"


@pytest.mark.parametrize(
    "text", ["It is not, I think, good", "it isn't good", "it isn’t good", "is n't it", "Never!", "good (but long)"]
)
def test_words_that_turn_a_text_are_found_beside_punctuation(text: str) -> None:
    assert negation_part(LabelledExample(text=text, label="a")) == "turned"


@pytest.mark.parametrize("text", ["a notable film", "nothings and butter", "an int", ""])
def test_parts_of_words_do_not_turn_a_text(text: str) -> None:
    assert negation_part(LabelledExample(text=text, label="a")) == "plain"


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("limit", '"limit" is not a study (did you mean "limits"?): use one of limits, scores'),
        ("scores --full", f"scores has no real data: --full is for {', '.join(REAL)}"),
        ("limits --quick --full", "--quick and --full were given"),
        ("limits --data x", "--data would change nothing: it is for --full"),
        ("limits --full --data nowhere", "nowhere: no such file or folder"),
        ("limits --seeds 0", "--seeds is 0; expected a whole number from 1"),
        ("limits --toy here", "--toy only writes files, and limits is a study"),
        ("--toy here --seeds 9", "--seeds would change nothing: --toy only writes files"),
        ("--toy here --quick", "--quick would change nothing"),
        ("--train 90", "--train would change nothing: it is for --toy"),
    ],
)
def test_wrong_arguments_are_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["study", *arguments.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def real_texts(tmp_path: Path) -> Path:
    """A folder with 16 labelled texts for training and 16 for evaluation, none with a word that turns it."""
    folder = tmp_path / "data"
    folder.mkdir()
    texts = [(f"das ist {word} {number}", word) for number in range(8) for word in ("gut", "schlecht")]
    rows = "".join(f"{text},{label}\n" for text, label in texts)
    for split in ("train", "dev"):
        (folder / f"{split}.csv").write_text(f"text,label\n{rows}")
    return folder


def test_a_part_without_examples_is_not_a_measure(real_texts: Path, tmp_path: Path) -> None:
    config = StudyConfig(seeds=(1,), scale="full", data=real_texts)
    completed = run_study("limits", config, tmp_path / "out")
    assert [measure.name for measure in completed.result.measures] == ["all", "plain"], 'without "turned"'


def test_real_texts_without_dev_are_evaluated_on_test(real_texts: Path, tmp_path: Path) -> None:
    """All texts of train are used for training, although other commands would make dev from some of them."""
    (real_texts / "dev.csv").rename(real_texts / "test.csv")
    config = StudyConfig(seeds=(1,), scale="full", data=real_texts)
    completed = run_study("limits", config, tmp_path / "out")
    assert completed.result.about.startswith("16 labelled texts, two epochs; accuracy on 16")


@pytest.fixture
def small_multi30k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data sets with a toy Multi30k of 12 pairs in each split, and recipes for tiny models."""
    folder = tmp_path / "data" / "tasks" / "multi30k"
    folder.mkdir(parents=True)
    for name in multi30k.FILES.values():
        for language, line in (("de", "Ein Hund {} rennt schnell .\n"), ("en", "A dog {} runs very fast .\n")):
            lines = [line.format("sehr " * count) for count in range(12)]
            (folder / f"{name}.{language}").write_text("".join(lines))
    common = ("init.tokenizer.vocab_size=300", "task.max_new_tokens=4", "train.max_steps=2")
    recurrent = (*common, "init.kind=recurrent", "init.rnn.width=16")
    size = ("init.layers=1", "init.width=16", "init.heads=2", "init.inner=16")
    recipes = {
        multi30k.NO_ATTENTION: (*recurrent, "init.rnn.look=none"),
        multi30k.ATTENTION: recurrent,
        multi30k.TRANSFORMER: (*common, "init.kind=transformer", *size),
    }
    monkeypatch.setattr(multi30k, "RECIPES", recipes)
    return tmp_path / "data"


@pytest.mark.slow
def test_translation_of_real_texts_resumes(
    small_multi30k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each arm is a run in a folder of its own. If the study is repeated, the results of finished runs are read."""
    config = StudyConfig(seeds=(1,), scale="full", data=small_multi30k)
    first = run_study("translation", config, tmp_path / "out").result
    assert [measure.name for measure in first.measures] == ["BLEU", "right"]
    assert first.arms == multi30k.ARMS
    runs = tmp_path / "out" / "runs"
    run_names = {path.name for path in runs.iterdir()}
    assert run_names == {"data", "recurrent-no-attention-1", "recurrent-attention-1", "transformer-1"}
    assert '"source": "ein hund sehr  rennt' in (runs / "data" / "train.jsonl").read_text(), "lowercased"
    monkeypatch.setattr("heedful.runs.finetune.run.Trainer", None)  # training would fail
    assert run_study("translation", config, tmp_path / "out").result.table() == first.table()


def test_missing_and_unequal_files_of_multi30k_are_refused(small_multi30k: Path, tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match=r"none lacks train\.de: give --data a folder that has tasks/multi30k"):
        multi30k.write_pairs(tmp_path / "none", tmp_path / "pairs")
    assert not (tmp_path / "pairs").exists()
    (small_multi30k / "tasks" / "multi30k" / "val.en").write_text("a dog .\n")
    with pytest.raises(HeedfulError, match=r"val\.de has 12 lines and val\.en 1"):
        multi30k.write_pairs(small_multi30k, tmp_path / "pairs")


def test_files_that_cannot_be_written_lose_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results that cannot be written are printed. A folder that is read-only is refused before the study runs."""
    configs: list[StudyConfig] = []  # of each call of the study

    def run(config: StudyConfig) -> StudyResult:
        configs.append(config)
        measure = Measure(name="accuracy", values={"plain": (0.5,)})
        figure = style.new_figure(2, 2)
        return StudyResult(measures=(measure,), verdicts=("the verdict",), figure=figure, about="a fake study")

    monkeypatch.setattr("heedful.study.limits.run", run)
    (tmp_path / "limits.md").mkdir()  # writing the file fails, as on a full disk
    command = ["study", "limits", "--quick", "--output", str(tmp_path)]
    for options, output in (([], "* the verdict\n"), (["--json"], '"verdicts"')):
        with pytest.raises(SystemExit) as ended:
            main([*command, *options])
        assert ended.value.code == 2
        captured = capsys.readouterr()
        assert output in captured.out
        assert "Is a directory: results are printed above" in captured.err

    def fail(folder: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("heedful.study.runner.check_writable", fail)
    with pytest.raises(SystemExit):
        main(command)
    assert "Read-only file system: give another folder with --output" in capsys.readouterr().err
    assert len(configs) == 2, "the study did not run a third time"
