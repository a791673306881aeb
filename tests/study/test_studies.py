"""Each study in its quick form, asserting nothing of what it finds; exponents, permutations, masks, norms."""

from __future__ import annotations

import errno
import json
import os
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


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", STUDIES)
def test_quick(tmp_path: Path, name: str) -> None:
    lines: list[str] = []
    done = run_study(name, StudyConfig(seeds=(1,), scale="quick", log=lines.append), tmp_path)
    assert all(path.stat().st_size > 500 for path in done.files) and lines
    record = json.loads((tmp_path / f"{name}.json").read_text())
    head, rows = done.result.table()
    assert record["table"] == [list(head), *map(list, rows)] and record["verdicts"]
    assert all(len(values) == 1 for measure in record["measures"].values() for values in measure["of"].values())
    for picture in tmp_path.glob("*.png"):
        data = picture.read_bytes()
        assert data[:4] == b"\x89PNG" and int.from_bytes(data[16:20], "big") <= 830, picture.name
        assert b"<svg" in picture.with_suffix(".svg").read_bytes()


@pytest.mark.parametrize("name", [study for study in STUDIES if study != "complexity"])
def test_a_stopped_study_resumes(tmp_path: Path, name: str) -> None:
    """To the same numbers and curves; nothing is learned twice, and nothing of it is left behind."""
    lines: list[str] = []

    def stop(text: str) -> None:
        lines.append(text)
        if len([line for line in lines if " seed " in line]) == 2:
            raise KeyboardInterrupt

    plan = StudyConfig(seeds=(1, 2), scale="quick", log=lines.append)
    whole = run_study(name, plan, tmp_path / "whole")
    results = [line for line in lines if " seed " in line]
    lines.clear()
    with pytest.raises(KeyboardInterrupt):
        run_study(name, replace(plan, log=stop), tmp_path / "parts")
    assert lines[-1] == "stopped; the same command resumes it." and whole.files[0].name not in lines
    lines.clear()
    again = run_study(name, plan, tmp_path / "parts")
    assert lines[0] == "resuming: results so far 2"
    assert len([line for line in lines if " seed " in line]) == len(results) - 2
    timed = "ms of a step"
    for first, second in zip(whole.result.measures, again.result.measures, strict=True):
        assert first.name == second.name and (first.values == second.values or first.name == timed)
    assert again.result.facts == whole.result.facts
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == sorted(path.name for path in whole.files)


def test_stored_results_of_another_format_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = runner.Recorder(StudyConfig(scale="quick", partial_results=tmp_path / "kept.json"))
    bench.record("a", 1, {"x": 1.0}, {"loss": [1.0, 2.0]})
    assert runner.Recorder(StudyConfig(scale="quick", partial_results=tmp_path / "kept.json")).missing_arms(
        "ab", 1
    ) == ["b"]
    assert runner.Recorder(StudyConfig(partial_results=tmp_path / "kept.json")).missing_arms("ab", 1) == ["a", "b"]
    lines: list[str] = []
    torn = runner.Recorder(
        StudyConfig(scale="quick", partial_results=tmp_path / "none" / "kept.json", log=lines.append)
    )
    torn.record("a", 1, {"x": 1.0})
    assert "none/kept.json cannot be written: No such file or directory" in lines[0]
    assert torn.missing_arms("ab", 1) == ["b"] and torn.record("b", 1, {"x": 2.0}) is None and len(lines) == 3


def test_exponents() -> None:
    sizes = [64, 128, 256, 512]
    noise = np.exp(np.random.default_rng(0).normal(0, 0.02, 4))
    times = [3e-6 * n**1.7 * e for n, e in zip(sizes, noise, strict=True)]
    assert exponent(list(zip(sizes, times, strict=True))) == pytest.approx(1.7, abs=0.05)
    assert exponent([(n, 5.0) for n in sizes]) == pytest.approx(0.0)


def test_what_is_kept_for_the_backward_pass() -> None:
    x = torch.randn(40, 8, requires_grad=True)
    assert saved_bytes(unfused_self_attention, x, None) >= 4 * (40 * 40 + 40 * 8), "all weights, and the rows"
    inner = Convolution(8, 3)
    assert saved_bytes(lambda rows: inner(rows, (0, 40)), x, inner) == 4 * 40 * 8, "its input alone"


@pytest.mark.parametrize("arm", THEORY)
def test_memory_grows_with_the_width_as_in_theory(arm: str) -> None:
    theory, counts = THEORY[arm], []
    for width in theory.widths:
        run, inner = make_layer(arm, width, theory.fixed[1])
        counts.append((width, saved_bytes(run, torch.randn(theory.fixed[1], width, requires_grad=True), inner)))
    assert exponent(counts) == pytest.approx(theory.exponents[3], abs=TOLERANCE)


def test_a_rehearsal_of_complexities_tells_its_own_sizes_and_no_verdict() -> None:
    sizes = "n 16 to 32 at d = 16, d 16 to 32 at n = 16"
    result = complexity.run(StudyConfig(seeds=(1,), scale="quick"))
    assert result.about.count(sizes) == len(THEORY) and "over one seed. " in result.about
    assert result.verdicts == ("the quick form's sizes are too small for a verdict",)


def test_complexities_of_few_rounds_get_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complexity, "THEORY", complexity.QUICK)
    monkeypatch.setattr(complexity, "cpu_seconds", lambda run, x, min_total: float(x.shape[0] ** 2 * x.shape[1]))
    assert complexity.run(StudyConfig(seeds=(1, 2))).verdicts == ("2 seeds, too few for a verdict: give 3 or more",)
    verdicts = dict(verdict.split(": ", 1) for verdict in complexity.run(StudyConfig(seeds=(1, 2, 3))).verdicts)
    assert list(verdicts) == list(THEORY)
    assert verdicts["convolution"].startswith("time over n 2.00 where theory says 1: no reason is known")


def test_a_convolution_stays_in_its_sequence() -> None:
    inner, x = Convolution(4, 3), torch.randn(9, 4)
    assert torch.allclose(inner(x, (0, 5, 9))[:5], inner(x[:5], (0, 5)), atol=1e-6)


def test_permutations() -> None:
    tokenizer = word_level_tokenizer(PERMUTED)
    for arm in ARMS:
        change = permutation_change(build_model(arm, tokenizer, 1))
        assert (change < 1e-5) == (arm == NONE), (arm, change)


def test_norms_over_the_batch() -> None:
    loaded = build_model("learned", word_level_tokenizer(PERMUTED), 1)
    before = sum(isinstance(part, torch.nn.LayerNorm) for part in loaded.modules())
    replace_layer_norms(loaded.model)
    norms = [part for part in loaded.modules() if isinstance(part, torch.nn.BatchNorm1d)]
    assert before == len(norms) == 6 and not any(isinstance(part, torch.nn.LayerNorm) for part in loaded.modules())


def test_masks_with_other_shares() -> None:
    tokenizer = train_tokenizer(["a b c d e f g h"] * 4, TokenizerSettings(vocab_size=60))
    ids = tokenizer.encode("a b c d e f g h " * 60).ids
    sample, mask = Sample.of([ids], [[0] * len(ids)]), tokenizer.special.mask
    usual = MaskedLM(tokenizer=tokenizer, mask_prob=0.5)
    for hidden, replaced in ((1.0, 0.0), (0.0, 1.0), (0.8, 0.0), (0.0, 0.0)):
        batch = with_shares(usual, hidden, replaced).batch([sample], [7])
        assert batch.rows is not None and torch.equal(batch.rows, usual.batch([sample], [7]).rows)
        now = batch.packed.tokens[batch.rows]
        share = (now == mask).float().mean()
        assert float(share) == pytest.approx(hidden + replaced / tokenizer.size, abs=0.08)
        assert bool((now == batch.targets).all()) == (hidden + replaced == 0)


def test_positions_are_one_family_of_comparisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nine of them, on both lengths: each is made at 1 - 0.05 / 9."""
    counts: list[int] = []
    usual = runner.compare_seeds

    def noted(*arguments: Any, **how: Any) -> str:
        counts.append(how["comparisons"])
        return usual(*arguments, **how)

    monkeypatch.setattr(runner, "compare_seeds", noted)
    run_study("positions", StudyConfig(seeds=(1,), scale="quick", log=lambda text: None), tmp_path)
    assert counts == [9] * 9


def test_scores_differ_in_their_scores_alone() -> None:
    """The layers before the score and after it begin with the same weights."""
    tokenizer = word_level_tokenizer(["ana has red"])
    first, *others = (scores.build_model(arm, tokenizer, 3) for arm in scores.ARMS)
    assert list(scores.ARMS)[1] == "cosine × 8"
    shared = {name for name, _ in first.named_parameters()}
    assert any(name.endswith("out.weight") for name in shared)
    for model in others:
        parameters = dict(model.named_parameters())
        assert all(torch.equal(parameter, parameters[name]) for name, parameter in first.named_parameters())


def test_as_many_texts_are_measured_whatever_the_seed() -> None:
    """They are chosen by their words, of which each seed draws others."""
    abouts = set()
    for seed in (1, 2, 3):
        with pretraining_data(StudyConfig(scale="quick"), seed, 16) as data:
            abouts.add(data.about)
            assert [len(texts) for texts in data.tests.values()] == [40, 40] and len(data.train) == 16
    assert len(abouts) == 1


def test_a_picture_says_how_many_seeds_it_shows() -> None:
    for seeds, caption in ((1, "one seed"), (4, "4 seeds (dots), their mean and its 95 % interval")):
        measure = Measure(name="all", values={"bag": (0.5,) * seeds})
        assert charts.dot_plot((measure,), ("bag",), "Bags", "accuracy").get_suptitle() == f"Bags\naccuracy, {caption}"
        assert charts.dot_plot((measure,), ("bag",), "Bags").get_suptitle() == f"Bags\n{caption}"


def test_what_turns_a_text_is_found_beside_punctuation() -> None:
    turn = ("It is not, I think, good", "it isn't good", "it isn’t good", "is n't it", "Never!", "good (but long)")
    assert [negation_part(LabelledExample(text=text, label="a")) for text in turn] == ["turned"] * len(turn)
    plain = ("a notable film", "nothings and butter", "an int", "")
    assert [negation_part(LabelledExample(text=text, label="a")) for text in plain] == ["plain"] * len(plain)


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
def test_what_is_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["study", *arguments.split()])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_part_without_examples_has_no_number(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        rows = "".join(f"das ist {word} {number},{word}\n" for number in range(8) for word in ("gut", "schlecht"))
        (tmp_path / f"{split}.csv").write_text(f"text,label\n{rows}")
    plan = StudyConfig(seeds=(1,), scale="full", data=tmp_path, log=lambda text: None)
    done = run_study("limits", plan, tmp_path / "out")
    assert [measure.name for measure in done.result.measures] == ["all", "plain"]
    (tmp_path / "dev.csv").rename(tmp_path / "test.csv")  # as reviews have it, where none of train becomes dev
    assert run_study("limits", plan, tmp_path / "out").result.about.startswith(
        "16 labelled texts, two epochs; accuracy on 16"
    )


@pytest.mark.slow
def test_translation_of_real_texts_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each arm is a run that is kept; what is finished is only read."""
    place = tmp_path / "data" / "tasks" / "multi30k"
    place.mkdir(parents=True)
    for name in multi30k.FILES.values():
        for side, text in (("de", "Ein Hund {} rennt schnell .\n"), ("en", "A dog {} runs very fast .\n")):
            (place / f"{name}.{side}").write_text("".join(text.format("sehr " * n) for n in range(12)))
    few = ("init.tokenizer.vocab_size=300", "task.max_new_tokens=4", "train.max_steps=2")
    nets = (*few, "init.kind=recurrent", "init.rnn.width=16")
    whole = (
        *few,
        *(f"init.{option}" for option in ("kind=transformer", "layers=1", "width=16", "heads=2", "inner=16")),
    )
    arms = (*nets, "init.rnn.look=none"), nets, whole
    monkeypatch.setattr(multi30k, "RECIPES", dict(zip(multi30k.ARMS, arms, strict=True)))
    plan = StudyConfig(seeds=(1,), scale="full", data=tmp_path / "data", log=lambda text: None)
    first = run_study("translation", plan, tmp_path / "out").result
    assert [measure.name for measure in first.measures] == ["BLEU", "right"] and first.arms == multi30k.ARMS
    names = {path.name for path in (tmp_path / "out" / "runs").iterdir()}
    assert names == {"data", "recurrent-no-attention-1", "recurrent-attention-1", "transformer-1"}
    assert '"source": "ein hund sehr  rennt' in (tmp_path / "out" / "runs" / "data" / "train.jsonl").read_text()
    monkeypatch.setattr("heedful.runs.finetune.run.Trainer", None)
    assert run_study("translation", plan, tmp_path / "out").result.table() == first.table()
    with pytest.raises(HeedfulError, match=r"none lacks train\.de: give --data a folder that has tasks/multi30k"):
        multi30k.write_pairs(tmp_path / "none", tmp_path / "made")
    assert not (tmp_path / "made").exists()
    (place / "val.en").write_text("a dog .\n")
    with pytest.raises(HeedfulError, match=r"val\.de has 12 lines and val\.en 1"):
        run_study("translation", plan, tmp_path / "out")


def test_files_that_cannot_be_written_lose_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[StudyConfig] = []

    def run(plan: StudyConfig) -> StudyResult:
        begun.append(plan)
        measure = Measure(name="accuracy", values={"plain": (0.5,)})
        return StudyResult(
            measures=(measure,), verdicts=("nothing",), figure=style.new_figure(2, 2), about="of nothing"
        )

    monkeypatch.setattr("heedful.study.limits.run", run)
    (tmp_path / "limits.md").mkdir()  # in place of a disk that became full
    command = ["study", "limits", "--quick", "--output", str(tmp_path)]
    for more, output in (([], "* nothing\n"), (["--json"], '"verdicts"')):
        with pytest.raises(SystemExit) as ended:
            main([*command, *more])
        shown = capsys.readouterr()
        assert ended.value.code == 2 and output in shown.out
        assert "Is a directory: results are printed above" in shown.err

    def full(folder: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("heedful.study.runner.check_writable", full)
    with pytest.raises(SystemExit):
        main(command)
    assert len(begun) == 2 and "Read-only file system: give another folder with --output" in capsys.readouterr().err
