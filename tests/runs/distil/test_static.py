"""Static students: their vectors come from the teacher's hidden states, and training and serving them works as ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from heedful.checkpoint import load
from heedful.errors import HeedfulError
from heedful.infer.engine import Engine
from heedful.model.classic_config import ClassicConfig
from heedful.runs.distil import static
from heedful.runs.distil.run import distil
from heedful.runs.distil.settings import StaticStudent, parse_student
from heedful.runs.distil.static import mean_token_states, static_student, weighted_components
from tests.support.distillation import NO_BASELINE
from tests.support.generated_data import write_splits
from tests.support.model_folders import make_decoder, make_model_dir

TEXTS = ("the cat sat on the mat", "the dog ran to Paris, the capital of France!", "ada loved the first program")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("teacher"), "single")


@torch.no_grad()
def test_states_are_those_of_transformers(teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "BATCH_TOKENS", 16)  # several batches
    theirs = transformers.BertModel.from_pretrained(teacher).eval()
    tokenizer = transformers.BertTokenizer.from_pretrained(teacher)
    expected: dict[int, list[torch.Tensor]] = {}
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        for id, state in zip(ids, theirs(torch.tensor([ids])).last_hidden_state[0], strict=True):
            expected.setdefault(id, []).append(state)
    states, counts = mean_token_states(load(teacher), TEXTS)
    around = {tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id}
    for id, own in expected.items():
        if id not in around:
            assert counts[id] == len(own)
            torch.testing.assert_close(states[id], torch.stack(own).mean(0), rtol=1e-4, atol=1e-5)
    assert counts.sum() == sum(len(own) for id, own in expected.items() if id not in around)
    unseen = tokenizer.convert_tokens_to_ids("she")
    alone = theirs(torch.tensor([[tokenizer.cls_token_id, unseen, tokenizer.sep_token_id]])).last_hidden_state[0, 1]
    torch.testing.assert_close(states[unseen], alone, rtol=1e-4, atol=1e-5)


def test_long_texts_are_read_in_parts(teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "MAX_CHUNK_TOKENS", 7)
    _, counts = mean_token_states(load(teacher), [" ".join(["cat", "dog", "mat"] * 20)])
    assert counts.sum() == 60 and sorted(counts[counts > 0].tolist()) == [20, 20, 20]


def test_components_are_those_of_a_singular_value_decomposition() -> None:
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(40, 12, generator=draw) * torch.arange(1, 13) + 3
    counts = torch.arange(40)
    rows = weighted_components(states, counts, 5, None).double().numpy()
    centred = states.double().numpy() - states.double().numpy().mean(0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    expected = u[:, :5] * s[:5]
    expected /= np.linalg.norm(expected, axis=1).mean()
    np.testing.assert_allclose(np.abs(rows), np.abs(expected), rtol=1e-4, atol=1e-6)  # signs are free
    weighted = weighted_components(states, counts, 5, 0.01).double().numpy()
    weights = 0.01 / (0.01 + np.arange(40) / np.arange(40).sum())
    np.testing.assert_allclose(weighted, rows * weights[:, None], rtol=1e-4, atol=1e-7)


def test_tokens_around_texts_do_not_shape_the_components(teacher: Path) -> None:
    """They are in each of many texts, and their states are of another size than those of words."""
    bundle, settings = load(teacher), StaticStudent(width=8, sif_coefficient=None)
    states, counts = mean_token_states(bundle, TEXTS * 40)
    assert not states[[0, 2, 3]].any() and not counts[[0, 2, 3]].any()
    words = [id for id in range(len(states)) if id not in (0, 2, 3)]
    table = static_student(bundle, settings, TEXTS * 40, lambda line: None).model.embedding.tokens.weight
    torch.testing.assert_close(table[words].abs(), weighted_components(states[words], counts[words], 8, None).abs())


def test_a_student_reads_any_length_and_ignores_tokens_around_a_text(teacher: Path) -> None:
    bundle = load(teacher)
    log: list[str] = []
    student = static_student(bundle, StaticStudent(width=8), TEXTS, log.append)
    config = student.config.model
    assert isinstance(config, ClassicConfig) and config.embedding.width == 8 and student.max_length is None
    table = student.model.embedding.tokens.weight
    assert not table[[0, 2, 3]].any() and table[5:].any(dim=1).all()
    assert student.tokenizer.fingerprint == bundle.tokenizer.fingerprint
    assert log[0].startswith("a table of 111 token vectors, 8 wide") and "in 3 texts" in log[0]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("head", "kind"), [("single", "single"), pytest.param("tag", "tag", marks=pytest.mark.slow),
                       pytest.param("regression", "regress", marks=pytest.mark.slow)]
)  # fmt: skip
def test_a_distillation_gives_a_model_that_answers(head: str, kind: str, tmp_path: Path) -> None:
    if head == "tag":
        pytest.importorskip("seqeval", reason="labels of the invented data are compared")
    folder, wishes = make_model_dir(tmp_path / "teacher", head), ["student.width=16", *NO_BASELINE]
    done = distil(folder, write_splits(kind, tmp_path / "data"), tmp_path / "run", student="static", assignments=wishes)
    assert done.status == "completed" and done.results["base"] == "a table of token vectors, taught by teacher"
    start, trained = load(tmp_path / "run" / "start"), load(tmp_path / "run")
    name = "embedding.tokens.weight"
    assert not torch.equal(start.named_tensors()[name], trained.named_tensors()[name])
    (answer,) = Engine(tmp_path / "run")(["the cat " * 100])
    assert answer["windows"] == 1


REFUSALS: list[tuple[str, list[str], str]] = [
    ("single", ["student.width=33"], "student.width is 33, but the hidden states of .* are 32 wide: give a number up"),
    ("single", ["student.width=0"], "width is 0; expected a whole number from 1"),
    ("single", ["student.width=8", "student.sif_coefficient=2"], "sif_coefficient is 2.0; expected a number from 0"),
    ("single", ["student.width=8", "verdict.precision=int8"], "int8, which rounds the linear layers of blocks"),
    ("single", ["student.width=8", "loss.states.weight=1"], "does not have a single stack of Transformer layers"),
    ("single", ["student.width=8", "train.freeze_layers=1"], "the model is no Transformer"),
    ("span", ["student.width=8"], 'student.kind is "static": classic models have no head for qa'),
    ("masked", ["student.width=8"], "a static student has no head for masked tokens"),
]


@pytest.mark.parametrize(("head", "wishes", "message"), REFUSALS)
def test_refusals(head: str, wishes: list[str], message: str, tmp_path: Path) -> None:
    kind = {"span": "qa"}.get(head, "single")
    quick = [
        setting
        for setting in NO_BASELINE
        if head != "masked" and setting.partition("=")[0] not in dict(wish.split("=") for wish in wishes)
    ]
    teacher, source = make_model_dir(tmp_path / "teacher", head), write_splits(kind, tmp_path / "data")
    with pytest.raises(HeedfulError, match=message):
        distil(teacher, source, tmp_path / "run", student="static", assignments=[*quick, *wishes])
    assert not (tmp_path / "run").exists()


def test_a_writer_with_two_parts_is_no_teacher_of_vectors(tmp_path: Path) -> None:
    assert parse_student("static") == StaticStudent()
    decoder = load(make_decoder(tmp_path / "writer"))
    student = static_student(decoder, StaticStudent(width=8), ["a b c"], print)
    assert student.config.model.embedding.vocabulary == 11
    with pytest.raises(HeedfulError, match="is not an encoder or decoder alone, whose hidden states"):
        static_student(student, StaticStudent(width=8), ["a b c"], print)
