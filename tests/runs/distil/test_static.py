"""Static students: token vectors from the teacher's hidden states, their distillation, and refused settings."""

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
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("teacher"), "single")


@torch.no_grad()
def test_mean_states_are_those_of_transformers(teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "BATCH_TOKENS", 16)  # several batches
    reference = transformers.BertModel.from_pretrained(teacher).eval()
    tokenizer = transformers.BertTokenizer.from_pretrained(teacher)
    states_by_id: dict[int, list[torch.Tensor]] = {}
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        for id, state in zip(ids, reference(torch.tensor([ids])).last_hidden_state[0], strict=True):
            states_by_id.setdefault(id, []).append(state)
    for special_id in (tokenizer.cls_token_id, tokenizer.sep_token_id):
        del states_by_id[special_id]
    states, counts = mean_token_states(load(teacher), TEXTS)
    for id, expected_states in states_by_id.items():
        assert counts[id] == len(expected_states)
        torch.testing.assert_close(states[id], torch.stack(expected_states).mean(0), rtol=1e-4, atol=1e-5)
    assert counts.sum() == sum(map(len, states_by_id.values())), "no other token is counted"
    unseen_id = tokenizer.convert_tokens_to_ids("she")
    single_token = torch.tensor([[tokenizer.cls_token_id, unseen_id, tokenizer.sep_token_id]])
    expected = reference(single_token).last_hidden_state[0, 1]
    torch.testing.assert_close(states[unseen_id], expected, rtol=1e-4, atol=1e-5)


def test_long_texts_are_read_in_chunks(teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "MAX_CHUNK_TOKENS", 7)
    _, counts = mean_token_states(load(teacher), [" ".join(["cat", "dog", "mat"] * 20)])
    assert counts.sum() == 60
    assert counts[counts > 0].tolist() == [20, 20, 20]


def test_components_are_those_of_a_singular_value_decomposition() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(40, 12, generator=generator) * torch.arange(1, 13) + 3
    counts = torch.arange(40)
    vectors = weighted_components(states, counts, 5, None).double().numpy()
    centred = states.double().numpy() - states.double().numpy().mean(0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    expected = u[:, :5] * s[:5]
    expected /= np.linalg.norm(expected, axis=1).mean()
    np.testing.assert_allclose(np.abs(vectors), np.abs(expected), rtol=1e-4, atol=1e-6)  # signs are arbitrary
    weighted = weighted_components(states, counts, 5, 0.01).double().numpy()
    weights = 0.01 / (0.01 + np.arange(40) / np.arange(40).sum())
    np.testing.assert_allclose(weighted, vectors * weights[:, None], rtol=1e-4, atol=1e-7)


SPECIAL_IDS = [0, 2, 3]  # padding, and the tokens that begin and end every text


def test_special_tokens_do_not_change_the_components(teacher: Path) -> None:
    """They are in each of many texts, and the norms of their states are not those of words."""
    bundle, settings = load(teacher), StaticStudent(width=8, sif_coefficient=None)
    states, counts = mean_token_states(bundle, TEXTS * 40)
    assert not states[SPECIAL_IDS].any()
    assert not counts[SPECIAL_IDS].any()
    other_ids = [id for id in range(len(states)) if id not in SPECIAL_IDS]
    table = static_student(bundle, settings, TEXTS * 40, lambda line: None).model.embedding.tokens.weight
    expected = weighted_components(states[other_ids], counts[other_ids], 8, None)
    torch.testing.assert_close(table[other_ids].abs(), expected.abs())


def test_a_static_student_has_the_tokenizer_of_its_teacher_without_a_limit(teacher: Path) -> None:
    bundle = load(teacher)
    messages: list[str] = []
    student = static_student(bundle, StaticStudent(width=8), TEXTS, messages.append)
    config = student.config.model
    assert isinstance(config, ClassicConfig)
    assert config.embedding.width == 8
    assert student.max_length is None
    assert student.tokenizer.fingerprint == bundle.tokenizer.fingerprint
    table = student.model.embedding.tokens.weight
    assert not table[SPECIAL_IDS].any()
    assert table[5:].any(dim=1).all()
    assert messages[0].startswith("a table of 111 token vectors, 8 wide")
    assert "in 3 texts" in messages[0]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("head", "kind"), [("single", "single"), pytest.param("tag", "tag", marks=pytest.mark.slow),
                       pytest.param("regression", "regress", marks=pytest.mark.slow)]
)  # fmt: skip
def test_a_distilled_static_student_answers_long_texts(head: str, kind: str, tmp_path: Path) -> None:
    if head == "tag":
        pytest.importorskip("seqeval", reason="labels of the invented data are compared")
    teacher, data = make_model_dir(tmp_path / "teacher", head), write_splits(kind, tmp_path / "data")
    run = tmp_path / "run"
    result = distil(teacher, data, run, student="static", assignments=["student.width=16", *NO_BASELINE])
    assert result.status == "completed"
    assert result.results["base"] == "a table of token vectors, taught by teacher"
    initial, trained = (load(folder).named_tensors()["embedding.tokens.weight"] for folder in (run / "start", run))
    assert not torch.equal(initial, trained)
    (answer,) = Engine(run)(["the cat " * 100])
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


@pytest.mark.parametrize(("head", "assignments", "message"), REFUSALS)
def test_unusable_settings_are_refused(head: str, assignments: list[str], message: str, tmp_path: Path) -> None:
    teacher = make_model_dir(tmp_path / "teacher", head)
    data = write_splits("qa" if head == "span" else "single", tmp_path / "data")
    if head != "masked":  # a masked language model has other settings of training
        names = {assignment.partition("=")[0] for assignment in assignments}
        quick = [setting for setting in NO_BASELINE if setting.partition("=")[0] not in names]
        assignments = [*quick, *assignments]
    with pytest.raises(HeedfulError, match=message):
        distil(teacher, data, tmp_path / "run", student="static", assignments=assignments)
    assert not (tmp_path / "run").exists()


def test_a_decoder_can_be_a_teacher_and_a_model_without_layers_cannot(tmp_path: Path) -> None:
    assert parse_student("static") == StaticStudent()
    decoder = load(make_decoder(tmp_path / "decoder"))
    student = static_student(decoder, StaticStudent(width=8), ["a b c"], print)
    assert student.config.model.embedding.vocabulary == 11
    with pytest.raises(HeedfulError, match="is not an encoder or decoder alone, whose hidden states"):
        static_student(student, StaticStudent(width=8), ["a b c"], print)
