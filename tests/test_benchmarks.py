"""The benchmarks' own mathematics: lengths, statistics, alternation, refusals; and a rehearsal of each script."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from heedful.data import LabelledExample
from heedful.device import multiplies_bfloat16
from tests.support.model_folders import make_model_dir

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
FASTEST = (
    f"**heedful {'bfloat16' if multiplies_bfloat16() else 'float32'}**"  # arms that cannot be multiplied are left out
)

FAKE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from harness import Prepared, serve
name, log, seconds, first, inputs = sys.argv[2:]

def run():
    with open(log, "a") as file:
        print(name, file=file)
    time.sleep(float(seconds))
    if first == "dies":
        sys.exit(3)

def sample(result):
    print("noise that is no answer")
    return [[float(first), 1.0], [0.0, 2.0]]

serve(lambda: Prepared(run=run, sample=sample, tokens=100, sequences=10, inputs=inputs, settings="fake"))
"""


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import one of the benchmarks' modules."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def fake(benchmarks: Any, tmp_path: Path) -> Any:
    """Make an arm that sleeps, and logs its turns."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    harness = benchmarks("harness")

    def make(
        name: str, *, seconds: float = 0.0, first: object = 1.0, inputs: str = "same", is_heedful: bool = False
    ) -> Any:
        command = (sys.executable, str(script), str(BENCHMARKS), name, str(tmp_path / "log"), seconds, first, inputs)
        bound = harness.Bound(difference=1e-3, cosine=0.999)
        return harness.Arm(name=name, command=tuple(map(str, command)), is_heedful=is_heedful, bound=bound)

    return make


@pytest.mark.parametrize("name", ["SHORT", "MIXED", "LONG"])
def test_lengths(benchmarks: Any, name: str) -> None:
    lengths = benchmarks("lengths")
    kind = lengths.DISTRIBUTIONS[name]
    assert (kind.mean, kind.most) == {"SHORT": (25, 128), "MIXED": (120, 512), "LONG": (350, 512)}[name]
    for count, near in ((64, 0.04), (4000, 0.01)):
        drawn = lengths.draw(name, count)
        assert len(drawn) == count
        assert fmean(drawn) == pytest.approx(kind.mean, rel=near)
        assert min(drawn) >= lengths.FEWEST
        assert max(drawn) <= kind.most
        assert lengths.draw(name, count) == drawn != lengths.draw(name, count, seed=1)
    assert max(drawn) == kind.most
    assert fmean(drawn[:1000]) == pytest.approx(kind.mean, rel=0.1), "not in random order"
    sequences = lengths.sequences(name, 50)
    assert [len(sequence) for sequence in sequences] == lengths.draw(name, 50)
    assert all(sequence[0] == lengths.CLS and sequence[-1] == lengths.SEP for sequence in sequences)
    assert lengths.digest(sequences) == lengths.digest(lengths.sequences(name, 50)) != lengths.digest(sequences[1:])


def test_lengths_are_those_of_the_record(benchmarks: Any) -> None:
    lengths = benchmarks("lengths")
    assert {name: lengths.draw(name, 100)[:5] for name in lengths.DISTRIBUTIONS} == {
        "SHORT": [48, 43, 34, 15, 10],
        "MIXED": [52, 222, 69, 340, 54],
        "LONG": [512, 261, 444, 278, 512],
    }


@pytest.mark.parametrize(("name", "mean", "fewest", "most"), [("sst2", 13.5, 4, 66), ("mean150", 150, 12, 512)])
def test_lengths_of_a_training_round(benchmarks: Any, name: str, mean: float, fewest: int, most: int) -> None:
    size = benchmarks("training").CASES[name]
    drawn = benchmarks("lengths").draw(name, size.batch * size.steps)
    assert fmean(drawn) == pytest.approx(mean, rel=0.01)
    assert (min(drawn), max(drawn)) == (fewest, most)


def test_grouped_batches_are_the_same_round(benchmarks: Any) -> None:
    regrouped, ids = benchmarks("training").regrouped, [[0] * length for length in (9, 1, 8, 2, 7, 3, 6)]
    assert sorted(regrouped([[0, 1, 2], [3, 4, 5], [6]], ids)) == [[0, 2, 4], [1], [6, 5, 3]]
    many = [[0] * length for length in range(1, 41)]
    firsts = [batch[0] for batch in regrouped([[number, 39 - number] for number in range(20)], many)]
    assert sorted(firsts) == list(range(1, 40, 2)) != firsts[::-1] != sorted(firsts), "not in random order"


def test_pretraining_reads_the_same_in_every_arm(benchmarks: Any, tmp_path: Path) -> None:
    data = benchmarks("pretraining_data")
    case, drawn = data.Case(row=512, batch=2, steps=3), data.objective(2000)
    texts = data.corpus(4 * case.tokens, 2000)
    segments = set(texts.segments.tolist())
    assert texts.segments[-1] >= 4 * case.tokens
    windows, blocks = data.windows(texts, case), data.blocks(texts, case)
    assert len(windows) == len(blocks) == 6
    assert all(0.99 * 512 <= len(row) <= 512 for row in windows)
    stream = texts.tokens(0, texts.segments[-1])
    for row in windows:
        for start, stop in pairwise(row.bounds):
            assert 2 < stop - start <= data.LENGTH
            assert (row.tokens[start], row.tokens[stop - 1]) == (data.CLS, data.SEP)
            inner = row.tokens[start + 1 : stop - 1]
            (place,) = (at for at in segments if stream[at : at + len(inner)].tolist() == inner.tolist())
            assert place + len(inner) in segments, "it ends within a sentence"
    ends = texts.segments[texts.documents].tolist()
    framed = [[data.CLS, *stream[start:stop].tolist(), data.SEP] for start, stop in pairwise(ends)]
    assert [token for row in blocks for token in row.tokens.tolist()] == list(chain(*framed))[: case.tokens]
    assert all(row.bounds == (0, 128, 256, 384, 512) for row in blocks)
    for samples in (windows, blocks):
        round_ = data.Round.of(samples, drawn)
        again = data.Round.open(round_.save(tmp_path / "round.npz"))
        assert again.digest() == round_.digest() == data.Round.of(again.samples(), drawn).digest()
        masked = round_.labels >= 0
        assert masked.sum() == pytest.approx(0.15 * len(round_.tokens), rel=0.03)
        assert (round_.labels[masked] == round_.tokens[masked]).all()
        assert (round_.inputs[~masked] == round_.tokens[~masked]).all()
        assert (round_.inputs[masked] == data.MASK).mean() == pytest.approx(0.8, abs=0.1)
        assert not set(round_.labels.tolist()) & {data.CLS, data.SEP}
        few = round_.first(2)
        assert few.digest() == data.Round.of(samples[:2], drawn).digest() != round_.digest()


def test_grouped_steps_have_about_as_many_tokens(benchmarks: Any) -> None:
    regrouped, lengths = benchmarks("pretraining").regrouped, np.array([8, 1, 7, 2, 6, 3, 5, 4])
    assert sorted(regrouped([[0, 1, 2, 3], [4, 5, 6, 7]], lengths)) == [[0, 2], [4, 6, 7, 5, 3, 1]]
    many = np.arange(1, 129)
    steps = regrouped([list(range(start, 128, 4)) for start in range(4)], many)
    assert sorted(chain(*steps)) == list(range(128))
    assert max(abs(many[step].sum() - many.sum() / 4) for step in steps) < 128
    assert [step[0] for step in steps] != sorted(step[0] for step in steps)[::-1], "not in random order"


def test_batches_stay_within_their_budget(benchmarks: Any) -> None:
    fill = benchmarks("lengths").fill
    assert fill([3, 9, 4, 5, 1], 9) == [[1], [3, 2], [0, 4]]
    assert fill([3, 9, 4, 5, 1], 9, longest_first=False) == [[0], [1], [2, 3], [4]]
    assert fill([], 9) == []
    assert fill([20, 1], 9) == [[0], [1]], "a sequence over the budget is a batch of its own"


def test_spread(benchmarks: Any) -> None:
    spread = benchmarks("report").Spread.of([4.0, 1.0, 2.0, 3.0, 100.0])
    assert (spread.median, spread.low, spread.high, spread.quartiles) == (3.0, 1.0, 100.0, (2.0, 4.0))
    assert spread.text(1) == "3.0 (1.0–100.0)"
    assert benchmarks("report").Spread.of([2.0]).quartiles == (2.0, 2.0)


def test_ratios_are_taken_in_each_round(benchmarks: Any, fake: Any) -> None:
    arms = [fake("slow"), fake("peer"), fake("own", is_heedful=True)]
    facts = {"tokens": 100, "sequences": 10, "inputs": "same", "settings": "", "checksum": ""}
    seconds = {"slow": [4.0, 4.0, 1.0], "peer": [2.0, 2.0, 2.0], "own": [1.0, 0.5, 0.5]}
    turns = {name: [facts | {"seconds": second} for second in several] for name, several in seconds.items()}
    near = {arm.name: (0.0, 1.0) for arm in arms}
    harness, first = benchmarks("harness"), {arm.name: facts for arm in arms}
    measured = harness.Measured(arms=arms, first=first, turns=turns, near=near, others=0.0)
    table = harness.summarise("T", measured)
    own = table.rows[2]
    assert own.tokens_per_second.median == 200
    assert own.sequences_per_second == 20
    assert own.to_best_peer == benchmarks("report").Spread.of([2.0, 4.0, 2.0])
    assert own.to_reference == benchmarks("report").Spread.of([4.0, 8.0, 2.0])
    assert table.best_peers == {"peer": 2, "slow": 1}
    assert "| **own** |" in table.text()
    lossy = replace(measured, near=near | {"peer": (0.5, 0.98)})
    fed = replace(measured, arms=[arms[0], replace(arms[1], stock=False), arms[2]])
    for changed, why in ((lossy, "cosine below 0.99"), (fed, "not stock")):
        table = harness.summarise("T", changed)
        assert table.best_peers == {"slow": 3}, "it is reported, and never the fastest peer"
        assert table.rows[2].to_best_peer == benchmarks("report").Spread.of([4.0, 8.0, 2.0])
        assert f"| peer ({why}) |" in table.text()


def test_ratios_to_several_groups_of_peers(benchmarks: Any, fake: Any) -> None:
    forward, harness = benchmarks("forward"), benchmarks("harness")
    job = benchmarks("engines").Job(engine="padded", precision="float32", folder="")
    names = {
        "usual": {},
        "int": {"precision": "int8"},
        "rows": {"engine": "openvino rows"},
        "own": {"engine": "packed"},
    }
    jobs = {name: replace(job, **more) for name, more in names.items()}
    arms = [replace(fake(name, is_heedful=name == "own"), stock=name != "rows") for name in jobs]
    facts = {"tokens": 100, "sequences": 10, "inputs": "same", "settings": "", "checksum": ""}
    seconds = {"usual": [8.0, 8.0], "int": [4.0, 2.0], "rows": [1.0, 0.5], "own": [2.0, 1.0]}
    turns = {name: [facts | {"seconds": second} for second in several] for name, several in seconds.items()}
    near = dict.fromkeys(jobs, (0.0, 1.0))
    measured = harness.Measured(arms=arms, first=dict.fromkeys(jobs, facts), turns=turns, near=near, others=0.0)
    ratios = forward.against(harness.summarise("T", measured), jobs)["own"]
    assert {group: (spread.low, spread.high) for group, spread in ratios.items()} == {
        "the fastest peer": (2.0, 2.0),
        "the fastest but int8": (4.0, 8.0),
        "OpenVINO on our rows": (0.5, 0.5),
        "usual": (4.0, 8.0),
    }


def test_plans_of_attention_are_timed(benchmarks: Any) -> None:
    arms = benchmarks("attention_arms")
    batches = arms.make_batches(arms.Case("forward", "float32", "12 x 32", "SHORT"), 256)
    run, layouts = arms.runner(next(kernel for kernel in arms.settings() if kernel.name == "fused"), batches)
    run()
    seconds = [list(layout.spent) for layout in layouts]
    assert all(sum(spent) > 0 for spent in seconds)
    run()
    assert [layout.spent for layout in layouts] == seconds, "a plan is made once"


def test_latency_is_compared_in_each_round(benchmarks: Any, fake: Any) -> None:
    latency, harness = benchmarks("latency"), benchmarks("harness")
    job = benchmarks("engines").Job(engine="padded", precision="float32", folder="")
    jobs = {"peer": job, "int": replace(job, precision="int8"), "own": replace(job, engine="packed")}
    arms = [fake(name, is_heedful=name == "own") for name in jobs]
    calls = {"peer": [4.0, 8.0], "int": [1.0, 2.0], "own": [2.0, 2.0]}
    turns = {
        name: [{"times": {"16": [middle / 1e3] * 99 + [1.0, 1.0]}} for middle in middles]
        for name, middles in calls.items()
    }
    near = dict.fromkeys(jobs, (0.0, 1.0))
    first = {name: {"settings": "", "checksum": ""} for name in jobs}
    measured = harness.Measured(arms=arms, first=first, turns=turns, near=near, others=0.0)
    own = latency.lines(measured, jobs, 16)[2]
    assert own.middles == pytest.approx((2.0, 2.0))
    assert own.highs == pytest.approx((1000.0, 1000.0))
    assert (own.to_peers.low, own.to_peers.high) == pytest.approx((1.0, 2.0))
    assert (own.to_floats.low, own.to_floats.high) == pytest.approx((0.25, 0.5))
    lossy = replace(measured, near=near | {"int": (0.5, 0.98)})
    assert latency.lines(lossy, jobs, 16)[2].to_peers == own.to_floats
    assert [len(sequence) for sequence in latency.sequences(16, 3)] == [16, 16, 16]


def test_packed_rows_for_a_peer(benchmarks: Any) -> None:
    peers, sequences = benchmarks("peers"), benchmarks("lengths").sequences("MIXED", 40)
    seen = []
    for batch in peers.rows(sequences):
        tokens, positions, mask = batch.sent
        assert tokens.size <= peers.BUDGET and tokens.shape[1] <= 512
        sequence_of_token = np.full(tokens.size, -1)
        for (start, stop), index in zip(batch.spans, batch.indices, strict=True):
            assert (sequence_of_token[start:stop] == -1).all()
            assert tokens.ravel()[start:stop].tolist() == sequences[index]
            assert positions.ravel()[start:stop].tolist() == list(range(len(sequences[index])))
            sequence_of_token[start:stop] = index
        for line, sees in zip(sequence_of_token.reshape(tokens.shape), mask[:, 0], strict=True):
            assert ((sees == 0) == np.equal.outer(line, line)).all()
        flat = np.random.default_rng(0).normal(size=(tokens.size, 3)).astype(np.float32)
        means = [flat[start:stop].mean(0) for start, stop in batch.spans]
        np.testing.assert_allclose(peers.means(flat, batch.spans), means, atol=1e-5)
        seen += batch.indices
    assert sorted(seen) == list(range(40))


def test_peers_that_are_not_installed_are_named(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peers = benchmarks("peers")
    monkeypatch.setattr(peers, "missing", lambda peer: ["nncf"] if peer == "openvino" else [])
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "made").touch()
    available, unmeasured = peers.make_models("minilm", ["openvino", "onnxruntime"], "", tmp_path)
    assert available == ["onnxruntime"]
    assert unmeasured == (
        " Not measured: OpenVINO is not installed (nncf): pip install 'heedful[bench]'; CTranslate2 was not asked for."
    )
    assert peers.make_models("t5", ["openvino"], "", tmp_path)[0] == []
    job = benchmarks("engines").Job(engine="padded", precision="float32", folder="")
    alone, several = (peers.jobs(peers.TITLES, tmp_path, job, alone=is_alone) for is_alone in (True, False))
    assert len(alone) == 7 and len(several) == 11
    assert {job.engine for job in several.values()} == peers.ENGINES.keys()


def test_arms_alternate_and_never_overlap(benchmarks: Any, fake: Any, tmp_path: Path) -> None:
    arms = [
        fake("slow", seconds=0.08),
        fake("peer", seconds=0.04),
        fake("own", seconds=0.01, first=1.0001, is_heedful=True),
    ]
    table = benchmarks("harness").measure("T", arms, 3, pause=0.0)
    order = (tmp_path / "log").read_text().split()
    warm_up, *rounds = [order[start : start + 3] for start in range(0, 12, 3)]
    assert warm_up == ["slow", "peer", "own"]
    assert rounds == [["slow", "peer", "own"], ["peer", "own", "slow"], ["own", "slow", "peer"]]
    own = table.rows[2]
    assert own.to_best_peer.median > 1
    assert own.to_reference.median > 1
    assert own.difference == pytest.approx(5e-5)
    assert table.rows[0].checksum == table.rows[1].checksum != own.checksum
    report = benchmarks("report")
    path = report.write("fake", "About.", [table.text()], [table.title], tmp_path / "results")
    assert path.name == f"fake-{report.facts()['date']}.md"
    assert "## T: 10 sequences, 100 real tokens a round" in path.read_text()
    assert json.loads(path.with_suffix(".json").read_text())["tables"] == ["T"]
    assert {"commit", "processor", "cores", "has", "has not", "versions"} <= report.facts().keys()


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a git checkout with one committed file, and let records be about it."""
    folder = tmp_path / "checkout"
    (folder / "benchmarks" / "results").mkdir(parents=True)
    (folder / "code.py").write_text("x = 1\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    monkeypatch.setattr(benchmarks("report"), "ROOT", folder)
    monkeypatch.setattr(benchmarks("report"), "RESULTS", folder / "benchmarks" / "results")
    return folder


def test_a_record_names_the_commit_that_it_measured(benchmarks: Any, checkout: Path) -> None:
    report = benchmarks("report")
    (report.RESULTS / "earlier.md").write_text("an earlier record, not yet committed")
    path = report.write("fake", "About.", [], [], report.RESULTS)
    commit = git(checkout, "rev-parse", "HEAD")
    assert f"* commit: {commit}\n" in path.read_text()
    assert json.loads(path.with_suffix(".json").read_text())["machine"]["commit"] == commit


@pytest.mark.parametrize("name", ["code.py", "new.py"])
def test_a_record_of_uncommitted_changes_is_refused_among_the_results(
    benchmarks: Any, checkout: Path, tmp_path: Path, name: str
) -> None:
    report = benchmarks("report")
    (checkout / name).write_text("x = 2\n")
    for folder in (report.RESULTS, report.RESULTS / "finetune"):
        with pytest.raises(SystemExit, match=rf"has uncommitted changes \({name}\): commit them before measuring"):
            report.write("fake", "About.", [], [], folder)
    assert not any(report.RESULTS.iterdir())
    path = report.write("fake", "About.", [], [], tmp_path / "rehearsal")
    assert f"* commit: {git(checkout, 'rev-parse', 'HEAD')} with uncommitted changes\n" in path.read_text()


def test_a_record_without_a_git_checkout_is_refused_among_the_results(
    benchmarks: Any, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = benchmarks("report")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (checkout / ".git").rename(tmp_path / "git")
    with pytest.raises(SystemExit, match="is not a git checkout, so a record cannot name its commit"):
        report.write("fake", "About.", [], [], report.RESULTS)
    assert report.facts()["commit"] == "unknown"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"first": 1.1}, "computes something else: largest difference 5.00e-02"),
        ({"first": "nan"}, "computes something else"),
        ({"inputs": "others"}, "has other inputs: others, not same"),
        ({"first": "dies"}, 'the arm "wrong" ended with 3'),
    ],
)
def test_a_wrong_arm_is_not_timed(benchmarks: Any, fake: Any, wrong: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        benchmarks("harness").measure("T", [fake("right"), fake("wrong", is_heedful=True, **wrong)], 1, pause=0.0)


def test_an_arm_may_be_compared_with_another_than_the_first(benchmarks: Any, fake: Any) -> None:
    arms = [fake("right"), fake("other", first=2.0, inputs="others"), fake("own", first=2.0002, inputs="others")]
    arms[1:] = [replace(arm, like="own", is_heedful=arm.name == "own") for arm in arms[1:]]
    table = benchmarks("harness").measure("T", arms, 1, pause=0.0)
    assert [row.difference for row in table.rows] == pytest.approx([0, 1e-4, 0], rel=1e-3)
    with pytest.raises(RuntimeError, match='the arm "own" has other inputs'):
        benchmarks("harness").measure("T", [*arms[:2], replace(arms[2], like=None)], 1, pause=0.0)


def test_the_record_of_students(benchmarks: Any) -> None:
    distil = benchmarks("distil")
    speed = {"precision": "int8", "p50": 1.0, "p99": 2.0, "texts_per_second": 1500.0, "parameters": 10}
    quality = {name: {"mean": mean, "std": spread} for name, mean, spread in
               (("teacher", 0.9, None), ("student", 0.88, 0.001), ("baseline", 0.87, 0.002))}  # fmt: skip
    models = {name: speed | {"quality": score} for name, score in quality.items()}
    verdict = {"metric": "accuracy", "split": "test", "models": models}
    verdict |= {"quality_ratio": 0.978, "throughput_ratio": 2.0, "latency_ratio": 1 / 1.5}
    verdict["delta_vs_baseline"] = {"difference": 0.01, "low": 0.001, "high": 0.019}
    lines = distil.table({"layers=3": {"verdict": verdict}}).splitlines()
    assert lines[2].startswith("| the teacher | 90.00 |  |  | 100 % | 10 | int8 |")
    assert lines[3].startswith(
        "| layers=3 | 88.00 ± 0.10 | 87.00 ± 0.20 | +1.00 (+0.10 to +1.90) | 97.8 % | 10 | int8 |"
    )
    verdicts = {
        f"{source} {n} bilstm": {"verdict": verdict} for source, n in (("SST-2", 0), ("SST-2", 10), ("IMDB", 10))
    }
    last = [line.split(" | ")[:2] for line in distil.curve(verdicts).splitlines()[2:]]
    assert last == [["| none", "0"], ["| SST-2", "10"], ["| IMDB", "10"], ["| no teacher", "0"]]


def test_finished_runs_are_reused_only_on_the_same_data(
    benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distil = benchmarks("distil")
    rows = [LabelledExample(text=f"a {word} {n}", label=word) for n in range(20) for word in ("cat", "dog")]

    def held_out(rows: list[LabelledExample]) -> dict[str, bytes]:
        monkeypatch.setattr(distil, "load", {"IMDB": SimpleNamespace(train=rows[4:], held=rows[:4])}.__getitem__)
        folder = distil.held_out_data("IMDB", distil.Run(folder=tmp_path, seeds=1, rehearsed=False))
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    written = held_out(rows)
    assert set(written) == {"train.csv", "dev.csv", "test.csv"}
    distil.held_out_data.cache_clear()  # as in another process
    assert held_out(rows) == written
    distil.held_out_data.cache_clear()
    with pytest.raises(SystemExit, match=r"has other data than this benchmark would write: give another --folder"):
        held_out([replace(row, text=row.text.upper()) for row in rows])
    assert {path.name: path.read_bytes() for path in (tmp_path / "IMDB-held-out-data").iterdir()} == written


def test_the_record_of_token_pruning(benchmarks: Any) -> None:
    chosen = {"layer": 3, "keep_rate": 0.3, "tokens_left": 0.31, "difference": 0.001, "low": -0.002, "high": 0.004}
    models = {"pruned": (0.896, 150.0), "all_tokens": (0.895, 100.0)}
    report = {name: {"value": value, "texts_per_second": speed} for name, (value, speed) in models.items()}
    report["chosen"] = chosen | {"speedup": 1.5}
    results = {"IMDB, seed 0, int8": report, "SST-2, seed 0, int8": {"refused": "no pruning is faster"}}
    first, second = benchmarks("distil").pruned_table(results).splitlines()[2:]
    assert first == (
        "| IMDB, seed 0, int8 | 3 | 30 % | 31 % | 89.60 | 89.50 | +0.10 (-0.20 to +0.40) | 150 | 100 | 1.50 |"
    )
    assert second.startswith("| SST-2, seed 0, int8 | no pruning is faster |")


@pytest.mark.parametrize("script", ["forward.py", "latency.py", "training.py", "pretraining.py", "decoding.py"])
def test_too_few_rounds_are_refused(script: str) -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, "--rounds", "4"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--rounds 4 are too few to say anything: give at least 5" in done.stderr


@pytest.mark.slow
def test_shares_of_the_matrix_rate(benchmarks: Any, tmp_path: Path) -> None:
    shares, lengths = benchmarks("shares"), benchmarks("lengths").draw("sst2", 96)
    work = shares.Work(layers=1, width=2, trained=True, head=5.0)
    assert work.flop([3.0, 1.0]) == 3 * (24 * 4 + 4 * 2 * 10 / 4 + 5)
    arms = [{"name": "heedful float32", "ours": True, "seconds": [2.0]}, {"name": "peer", "ours": False}]
    training = {"title": "sst2", "tokens": sum(lengths), "sequences": len(lengths), "rows": arms}
    record = tmp_path / "training.json"
    record.write_text(json.dumps({"tables": [training, training | {"title": "mean150"}]}))  # the same arm in both
    command = [sys.executable, BENCHMARKS / "shares.py", record, "--rounds", "1", "--output", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("shares-*.json")
    first, second = json.loads(path.read_text())["tables"]
    assert [first["arm"], second["arm"]] == ["sst2, heedful float32", "mean150, heedful float32"]
    gflop = sum(lengths) * shares.TRAINED.flop(lengths) / 1e9
    assert first["gflops"]["median"] == pytest.approx(gflop / 2.0)


BLOCKED = """
import runpy, sys
sys.modules["accelerate"] = None
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.slow
def test_a_claim_about_their_trainer_needs_accelerate() -> None:
    command = [sys.executable, "-c", BLOCKED, BENCHMARKS / "claims" / "accumulation.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs accelerate: pip install accelerate" in done.stderr
    assert not done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromedriver") is None, reason="needs Chromium: apt-get install chromium-driver")
def test_pages_are_measured_in_a_browser(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "page.py", "--quick", "--output", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for kind in ("form", "explorer"):
        ratio = re.search(
            rf"^\| {kind} \| [\d.]+ \| ([\d.]+) \| [\d,]+ \(.*\) \| [\d.,]+ \(.*\) \|$", done.stdout, re.MULTILINE
        )
        assert ratio and 1 < float(ratio[1]) < 1.4
    assert not list(tmp_path.iterdir()), "a rehearsal is no record"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        ("forward.py", ["--distributions", "SHORT"], FASTEST),
        ("latency.py", ["--tokens", "16"], "**heedful bfloat16**"),
        ("training.py", ["--attention-dropout", "0.1"], FASTEST),
        ("pretraining.py", ["--vocabulary", "4000", "--attention-dropout", "0.1"], "**heedful float32**"),
        ("forward.py", ["--distributions", "SHORT", "--shape", "t5", "--precisions", "bfloat16"], FASTEST),
        ("decoding.py", [], "**heedful bfloat16**"),
        ("attention.py", ["--modes", "forward", "--precisions", "float32"], "| fused |"),
    ],
)
def test_rehearsal(script: str, options: list[str], expected: str, tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / script, "--quick", "--rounds", "1", "--output", tmp_path, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # threads that wait for each other cost most of the time
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.md")
    assert expected in path.read_text()
    assert path.with_suffix(".json").exists()


def test_words_are_recorded(benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, data = benchmarks("words"), benchmarks("finetune_data")
    rows = [LabelledExample(text=f"{'good' if n % 2 else 'bad'} film {n}", label=str(n % 2)) for n in range(60)]
    task = data.Task(kind="classify", labels=("0", "1"), train=rows[:40], held=rows[40:], about="invented rows")
    monkeypatch.setattr(words, "load", lambda name: task)
    monkeypatch.setattr(words, "rows_of_splits", lambda *arguments: {"train": 20, "held": 20})
    words.main(["SST-2", "AG News", "--note", "A rehearsal.", "--output", str(tmp_path)])
    (record,) = tmp_path.glob("words-*.json")
    values = json.loads(record.read_text())
    assert values["about"].endswith(" A rehearsal.") and "invented rows" in values["about"]
    run, whole = (values["tables"]["SST-2"][arm] for arm in ("as in a run", "all rows"))
    assert (run["learned from"], whole["learned from"], run["of"]) == (20, 40, 40)
    assert run["accuracy"] == whole["accuracy"] == 100.0
    text = record.with_suffix(".md").read_text()
    assert "| AG News: rows | accuracy |" in text and "| as in a run | 100.00 |" in text


def test_flipped_labels_are_recorded(benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, data = benchmarks("label_errors"), benchmarks("finetune_data")
    nouns = {"animal": ["cat", "dog", "cow", "horse"], "tool": ["saw", "drill", "axe", "file"]}
    rows = [
        LabelledExample(text=f"the {noun} is {place} number {n}", label=label)
        for label, several in nouns.items()
        for noun in several
        for n, place in enumerate(["in the barn", "near the river", "by the road", "at home", "over there"])
    ]
    task = data.Task(kind="classify", labels=("animal", "tool"), train=rows, held=rows, about="invented rows")
    monkeypatch.setattr(script, "load", lambda name: task)
    labels, flipped = script.flipped_labels(["a", "b"] * 50, 0.06, 1)
    assert {n for n, label in enumerate(labels) if label != "ab"[n % 2]} == flipped and len(flipped) == 6
    assert script.precision([3, 1, 2, 0], {3, 2}) == 0.5
    script.main(["--seeds", "1", "2", "--output", str(tmp_path), "--parts", str(tmp_path / "parts")])
    (record,) = tmp_path.glob("label-errors-*.json")
    figures = json.loads(record.read_text())["tables"]["AG News, shipped, linear"]
    assert figures["rows"]["mean"] == 40 and figures["flipped"]["mean"] == 2
    assert figures["precision"]["high"] == 1.0 and figures["precision by loss"]["high"] == 1.0
    assert "| SST-2, shipped, linear | 2 | 40 | 2 |" in record.with_suffix(".md").read_text()
    monkeypatch.setattr(script, "find_label_errors", lambda *arguments, **options: pytest.fail("measured again"))
    record.unlink()
    script.main(["--seeds", "1", "2", "--output", str(tmp_path), "--parts", str(tmp_path / "parts")])
    assert json.loads(record.read_text())["tables"]["AG News, shipped, linear"] == figures


def test_selected_and_random_texts_are_compared(
    benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, data = benchmarks("active_learning"), benchmarks("finetune_data")
    nouns = ("cat", "dog", "cow", "horse", "sheep", "goat", "hen", "duck", "goose", "mule")
    rows = [
        LabelledExample(text=f"a {'good' if n % 2 else 'bad'} {noun} {place}", label=str(n % 2))
        for noun in nouns
        for n, place in enumerate(("in the barn", "near the river", "by the road", "at home"))
    ]
    task = data.Task(kind="classify", labels=("0", "1"), train=rows[:32], held=rows[32:], about="invented rows")
    monkeypatch.setattr(script, "load", lambda name: task)
    monkeypatch.setattr(script, "COUNT", 8)
    monkeypatch.setattr(script, "ROUNDS", 1)
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {"latency": {}, "throughput": 1})
    path = tmp_path / "active.json"
    script.main(["--tasks", "SST-2", "--draws", "1", "--output", str(path), "--parts", str(tmp_path / "parts")])
    record = json.loads(path.read_text())
    ((first, last), (same, other)) = (run["accuracies"] for run in record["runs"])
    assert first == same and record["summary"][0]["last difference"]["mean"] == pytest.approx(100 * (last - other))


def test_methods_for_few_labels_are_recorded(benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, data = benchmarks("few_labels"), benchmarks("finetune_data")
    rows = [LabelledExample(text=f"{'good' if n % 2 else 'bad'} film {n}", label=str(n % 2)) for n in range(60)]
    task = data.Task(kind="classify", labels=("0", "1"), train=rows[:40], held=rows[40:], about="invented rows")
    monkeypatch.setattr(script, "load", lambda name: task)
    train, held = script.draw_rows("SST-2", 3, 1)
    assert [row.label for row in train].count("0") == [row.label for row in train].count("1") == 3
    assert script.draw_rows("SST-2", 3, 1) == (train, held) != script.draw_rows("SST-2", 3, 2)
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {"latency": {}, "throughput": 1})
    path = tmp_path / "few.json"
    options = ["--tasks", "SST-2", "--arms", "linear", "words", "--shots", "8", "--draws", "1", "2"]
    options += ["--output", str(path), "--parts", str(tmp_path / "parts")]
    script.main(options)
    record = json.loads(path.read_text())
    assert [(row["arm"], row["draws"]) for row in record["summary"]] == [("linear", 2), ("words", 2)]
    assert all(row["mean"] > 90 and row["std"] is not None for row in record["summary"])
    assert record["regret"] == []
    (tmp_path / "parts" / "SST-2-8-a-label-draw-2-shipped-words.json").unlink()
    monkeypatch.setattr(script, "by_heedful", lambda *arguments: pytest.fail("measured again"))
    script.main(options)
    assert json.loads(path.read_text())["summary"][0] == record["summary"][0]


def test_the_regret_of_the_chosen_method(benchmarks: Any) -> None:
    script = benchmarks("few_labels")
    accuracies = {"contrastive": (0.8, 0.9), "linear": (0.7, 0.7), "finetune": (0.9, 0.6), "auto": (0.9, 0.75)}
    chosen = {"auto": ("finetune", "linear")}
    runs = [
        {
            "task": "SST-2",
            "shots": 8,
            "draw": draw,
            "start": "shipped",
            "arm": arm,
            "accuracy": accuracy,
            "seconds": 1.0,
        }
        | {"method": chosen.get(arm, (arm, arm))[draw]}
        for arm, values in accuracies.items()
        for draw, accuracy in enumerate(values)
    ]
    (regret,) = script.regrets(script.summary(runs), runs)
    assert (regret["best method"], regret["regret"]) == ("contrastive", 2.5)
    assert regret["chosen"] == {"finetune": 1, "linear": 1}
    assert script.regrets(script.summary(runs[:-1]), runs[:-1]) == [], "a draw of auto is missing"


def test_frozen_layers_are_compared_by_the_time_to_the_same_accuracy(benchmarks: Any) -> None:
    script = benchmarks("freezing")
    interval = {"low": 0.87, "high": 0.91}
    every = {"seed": 1, "seconds": 70.0, "evaluations": [[20.0, 0.88], [40.0, 0.9], [60.0, 0.89]]}
    frozen = {"seconds": 40.0, "evaluations": [[10.0, 0.87], [16.0, 0.9], [30.0, 0.901]], "interval": interval}
    reached = script.compare(every, frozen)
    assert (reached["target"], reached["seconds"], reached["frozen seconds"]) == (0.9, 40.0, 16.0)
    assert reached["ratio"] == 2.5
    missed = script.compare(every, frozen | {"evaluations": [[10.0, 0.87], [16.0, 0.89]]})
    assert missed["ratio"] is None and missed["gap"] == pytest.approx(0.01)
    first, second = script.table([reached, missed]).splitlines()[2:]
    assert first == "| 1 | 90.00 | 90.10 (87.00 to 91.00) | 40 | 16 | 2.50 | 70 / 40 |"
    assert second == "| 1 | 90.00 | 89.00 (87.00 to 91.00) | 40 | not reached | gap 1.00 | 70 / 40 |"


def test_finished_results_are_not_measured_again(benchmarks: Any, tmp_path: Path) -> None:
    parts = benchmarks("parts")
    folder = tmp_path / "parts"
    assert parts.Parts(folder).result("SST-2, layers=3, draw 1", lambda: {"accuracy": 0.5, "arms": (1, 2)}) == {
        "accuracy": 0.5,
        "arms": [1, 2],
    }
    (path,) = folder.iterdir()
    assert path.name == "SST-2-layers=3-draw-1.json"
    part = json.loads(path.read_text())
    path.write_text(json.dumps(part | {"commit": "earlier"}))
    again = parts.Parts(folder)
    assert again.result("SST-2, layers=3, draw 1", lambda: pytest.fail("measured again"))["accuracy"] == 0.5
    again.result("another", lambda: 1)
    assert again.commits == {"earlier", part["commit"]}
    with pytest.raises(ValueError, match="has the result 'SST-2, layers=3, draw 1', not 'SST-2 layers=3 draw 1'"):
        again.result("SST-2 layers=3 draw 1", lambda: 2)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again.result("third", interrupted)
    assert len(list(folder.iterdir())) == 2, "a result that was interrupted leaves nothing"


def test_rows_are_held_out_with_their_phrases(benchmarks: Any) -> None:
    data = benchmarks("finetune_data")
    sentences = [f"the {noun} in scene {n} is well acted" for n, noun in enumerate(["hero", "dog", "sea", "cow"] * 10)]
    beginnings = [" ".join(sentence.split()[:5]) for sentence in sentences]
    texts = [*sentences, *beginnings, "well acted", "the"]
    rows = [LabelledExample(text=text, label="x") for text in texts]
    train, held_out = data.hold_out(rows, 30)
    assert len(held_out) == 20, "a quarter, in whole groups"
    assert sorted(map(texts.index, (row.text for row in train + held_out))) == list(range(82))
    assert (train, held_out) == data.hold_out(rows, 30)
    for row in held_out:
        assert not [other for other in train if f" {row.text} " in f" {other.text} "]
        sentence_and_phrase = [other for other in held_out if row.text.split()[:5] == other.text.split()[:5]]
        assert len(sentence_and_phrase) == 2
    assert len(data.hold_out(rows, 5)[1]) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("pruned --judge", "to measure prunings again, remove the folder of --parts"),
        ("SST-2 --train", "--train and --precisions are for the task pruned"),
        ("STS-B --precisions int8", "--train and --precisions are for the task pruned"),
    ],
)
def test_options_of_another_task_are_refused(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["distil.py", *options.split()])
    with pytest.raises(SystemExit, match="2"):
        benchmarks("distil").main()
    assert message in capsys.readouterr().err


def test_the_record_of_cascades(benchmarks: Any) -> None:
    cascade, harness = benchmarks("cascade"), benchmarks("harness")
    teacher, right = np.ones(400), np.ones(400)
    teacher[:40], right[:44] = 0.0, 0.0
    delta = cascade.difference(right, teacher)
    assert delta["difference"] == pytest.approx(-0.01) and delta["low"] < -0.01 < delta["high"] <= 0
    result = {"shares": [0.75, 0.25], "dev accuracies": [0.8, 0.9], "test accuracies": [0.7, 0.9], "accuracy": 0.89}
    (row,) = cascade.quality_table({"IMDB, static, seed 0": result | delta}).splitlines()[2:]
    cells = "75.0 % / 25.0 % | 80.00 / 90.00 | 70.00 / 90.00 | 89.00 | -1.00 (-"
    assert row.startswith(f"| IMDB, static, seed 0 | {cells}")
    arms = [
        harness.Arm(name=name, command=(), is_heedful=not name.startswith("OpenVINO"), bound=None, like=name)
        for name in ("static", "OpenVINO int8, latency: the teacher", "OpenVINO int8, throughput: the teacher",
                     "OpenVINO int8, latency: layers=2")
    ]  # fmt: skip
    facts = {"tokens": 100, "sequences": 10, "inputs": "same", "settings": "", "checksum": ""}
    seconds = [(1.0, 1.0), (4.0, 3.0), (3.0, 5.0), (2.0, 2.0)]
    turns = {
        arm.name: [facts | {"seconds": second} for second in several]
        for arm, several in zip(arms, seconds, strict=True)
    }
    near = {arm.name: (0.0, 1.0) for arm in arms}
    measured = harness.Measured(arms=arms, first={arm.name: facts for arm in arms}, turns=turns, near=near, others=0.0)
    ratios = cascade.ratios_to_openvino(harness.summarise("IMDB", measured), "static")
    assert (ratios["the teacher"]["median"], ratios["layers=2"]["median"]) == (3.0, 2.0)
    speeds = {"text": "T", "ratios": {"static": ratios}, "reports": {"static": {"sentence": "Fast."}}}
    text = cascade.speed_text("IMDB", speeds | {"first answer": [0.3, 0.2, 0.25]})
    assert "| static | 3.00 (3.00 to 3.00) | 2.00 (2.00 to 2.00) |" in text and "0.25 s" in text
    assert "* static: Fast." in text


@pytest.mark.slow
def test_the_arms_of_zero_shot_classification_agree(benchmarks: Any, tmp_path: Path) -> None:
    script = benchmarks("zero_shot")
    labels = ("entailment", "neutral", "contradiction")
    rows = [
        {"text": f"a {label} film", "text_pair": f"number {n}", "label": label} for label in labels for n in range(8)
    ]
    settings = {"method": "finetune", "train.max_steps": 10, "eval_baseline": False}
    script.finetune(
        "classify", {"train": rows, "dev": rows}, tmp_path / "run", model=script.minilm(), overrides=settings
    )
    folder = str(tmp_path / "run" / "model")
    texts = ["The team won the final.", "Shares fell as oil prices rose, and companies cut jobs.", "Rain."]
    jobs = script.jobs_of(folder, 3)
    first, _ = script.pipeline_arm(jobs["pipeline float32, one pair at a time"], texts)
    own, _ = script.heedful_arm(jobs["heedful float32"], texts)
    probabilities = first(texts)
    assert probabilities.shape == (3, 10) and probabilities.std() > 1e-3, "the model tells labels apart"
    np.testing.assert_allclose(own(texts), probabilities, atol=1e-4)
    assert len(script.token_ids(folder, texts)) == 30


def test_calibration_and_sets_are_measured(benchmarks: Any) -> None:
    script = benchmarks("calibration")
    stream = np.random.default_rng(0)
    table = stream.dirichlet([1.0, 1.0, 1.0], size=4000)
    gold = ["abc"[stream.choice(3, p=row)] for row in table]
    assert script.calibration_error("abc", table, gold) < 3, "drawn by these probabilities"
    sharper = script.without_temperature(table, 3.0)
    assert script.calibration_error("abc", sharper, gold) > 10
    assert np.allclose(script.without_temperature(sharper, 1 / 3), table, atol=1e-3)
    for row in script.measured_sets(["a", "b", "c"], table, gold):
        assert row["coverage"] == pytest.approx(row["asked"], abs=1.5)
        assert 1 <= row["mean size"] <= 3


def test_rerankers_are_recorded(benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, folder = benchmarks("rank"), tmp_path / "data/tasks/trecqa"
    folder.mkdir(parents=True)
    for split in ("train", "dev", "test"):
        rows = [f"who wrote {n} ?,{int(word == 'wrote')},ada {word} {n}" for n in range(8) for word in ("wrote", "ran")]
        (folder / f"{split}.csv").write_text("\n".join(["qtext,label,atext", *rows, ""]))
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(script, "BUNDLED_ENCODER", str(make_model_dir(tmp_path / "model", "bare")))
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {"latency": {}, "throughput": 1})
    options = ["--models", "shipped", "--losses", "binary", "--seeds", "2", "--epochs", "1", "--output", str(tmp_path)]
    script.main(options)
    (record,) = tmp_path.glob("rank-*.json")
    (arm,) = json.loads(record.read_text())["tables"]["arms"]
    assert arm["numbers"]["count"] == 8 and len(arm["test map of each seed"]) == 2
    assert arm["settings"]["epochs"] == 1 and "| shipped | binary |" in record.with_suffix(".md").read_text()
