"""New heads: kept weights are bitwise equal, the rest comes from the seed, and transformers loads the saved folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import heedful
from heedful.checkpoint import BundleConfig, ModelBundle, create, load, save
from heedful.checkpoint.new_head import rescaled, with_head
from heedful.errors import HeedfulError, HeedfulWarning, ModelError
from heedful.families import FAMILIES
from heedful.model.config import (
    Classes,
    EmbeddingConfig,
    Learned,
    ModelConfig,
    ProblemType,
    SentenceEmbedding,
    StackConfig,
)
from tests.support.tiny_models import LABELS, TINY, hf_outputs, our_outputs, random_batch, random_sequences, save_tiny

NAMES = tuple(LABELS.values())
OTHER = ("up", "down")
LAST = ("classifier", "classifier.out_proj", "qa_outputs")  # their names of layers that belong to labels
PLAIN = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert")  # encoders with blocks of their own
NEWER = [family for family in TINY if family not in PLAIN]
KINDS = [
    (family, kind, architecture)
    for family in PLAIN
    for kind, architecture in FAMILIES[family].kinds().items()
    if kind != "none"
]
STARTS = [
    (*each, ending)
    for each in KINDS
    for ending in ("MaskedLM", "SequenceClassification", "Model")
    if each[0] in ("bert", "roberta", "distilbert") or ending == "MaskedLM"  # the others differ in names alone
]
each_kind = pytest.mark.parametrize(("family", "kind", "architecture"), KINDS)


Start = Callable[..., tuple[Path, ModelBundle]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """A tiny model whose architecture ends so, saved by transformers; made once."""

    @cache
    def make_folder(family: str, ending: str, **changed: Any) -> tuple[Path, ModelBundle]:
        folder = tmp_path_factory.mktemp(f"{family}-{ending}")
        architecture = next(name for name in FAMILIES[family].heads if name.endswith(ending))
        save_tiny(folder, family, architecture, **changed)
        return folder, load(folder)

    return make_folder


def tensors(folder: Path, family: str) -> dict[str, Tensor]:
    """What a folder holds, by full names."""
    prefix = FAMILIES[family].prefix
    saved = load_file(folder / "model.safetensors")
    bare = not any(name.startswith(prefix) for name in saved)
    return {prefix * bare + name: tensor for name, tensor in saved.items()}


def module(name: str) -> str:
    """The name without its .weight or .bias."""
    return name.rpartition(".")[0]


def head_options(kind: str, labels: tuple[str, ...] = OTHER) -> dict[str, Any]:
    """What the kind needs."""
    return {"labels": labels} if kind in ("sequence_classification", "token_classification") else {}


def state(loaded: ModelBundle) -> dict[str, Tensor]:
    """A copy of all parameters."""
    return {name: tensor.detach().clone() for name, tensor in loaded.named_tensors().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    """The names of tensors that are bitwise the same."""
    return {name for name in one if torch.equal(one[name], other[name])}


@pytest.mark.parametrize(("family", "kind", "architecture", "ending"), STARTS)
def test_what_is_known_stays_and_the_rest_is_drawn(
    start: Start, tmp_path: Path, family: str, kind: str, architecture: str, ending: str
) -> None:
    folder, loaded = start(family, ending)
    before = state(loaded)
    new_model = with_head(loaded, kind, seed=3, **head_options(kind))
    save(new_model, tmp_path / "out")
    old, new = tensors(folder, family), tensors(tmp_path / "out", family)
    body = {name for name in new if name.startswith(FAMILIES[family].prefix) and "pooler" not in name}
    assert len(body) > 60 and body <= old.keys()
    for name, tensor in new.items():
        known = name in old and module(name) not in LAST  # no start has a last layer of the same labels
        assert torch.equal(tensor, old[name]) if known else not torch.equal(tensor, old.get(name, tensor + 1)), name
        if not known:
            expected = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            assert tensor.mean() == pytest.approx(expected, abs=0.01), name
            spread = tensor.std(correction=0)
            assert spread < 0.03 and (spread > 0.01) == (tensor.ndim > 1), name
    assert same(before, state(loaded)) == before.keys()  # the given one is untouched
    assert not {p.data_ptr() for p in new_model.parameters()} & {p.data_ptr() for p in loaded.parameters()}


@each_kind
def test_seeds(start: Start, family: str, kind: str, architecture: str) -> None:
    _, loaded = start(family, "MaskedLM" if kind != "masked_lm" else "SequenceClassification")
    before = torch.random.get_rng_state()
    one, again, other = (state(with_head(loaded, kind, seed=seed, **head_options(kind))) for seed in (5, 5, 6))
    assert same(one, again) == one.keys()
    changed = one.keys() - same(one, other)
    weights = {name for name, tensor in one.items() if name.startswith("head.") and tensor.ndim > 1}
    assert changed == weights - {"head.masked." + name for name in ("dense.weight", "decoder.weight")}
    assert changed or kind == "embedding"
    assert torch.equal(before, torch.random.get_rng_state())  # torch's own generator is left alone


@each_kind
def test_transformers_loads_it_and_so_do_we(
    start: Start, tmp_path: Path, family: str, kind: str, architecture: str
) -> None:
    _, loaded = start(family, "MaskedLM")
    new_model = with_head(loaded, kind, **head_options(kind))
    save(new_model, tmp_path / "out")
    values = json.loads((tmp_path / "out/config.json").read_text())
    assert values["architectures"] == [architecture]
    again = load(tmp_path / "out")
    assert (
        again.config.head == new_model.config.head
        and same(state(new_model), state(again)) == new_model.named_tensors().keys()
    )
    theirs, report = getattr(transformers, architecture).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    if kind in ("sequence_classification", "token_classification"):
        assert theirs.config.id2label == dict(enumerate(OTHER))
    ids, types = random_sequences(family)
    with torch.no_grad():
        outputs = our_outputs(new_model.eval(), random_batch(family))
        for ours, expected in zip(outputs, hf_outputs(theirs.eval(), family, ids, types), strict=True):
            assert ours.shape == expected.shape
            assert (ours - expected).abs().max() <= 2e-6 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("kind", ["sequence_classification", "token_classification"])
def test_the_last_layer_stays_where_the_labels_are_the_same(start: Start, family: str, kind: str) -> None:
    ending = {"sequence_classification": "SequenceClassification", "token_classification": "TokenClassification"}[kind]
    _, loaded = start(family, ending)
    out = {name for name in loaded.named_tensors() if name.startswith("head.out.")}
    assert same(state(loaded), state(with_head(loaded, kind, labels=NAMES))) == loaded.named_tensors().keys()
    moved = with_head(loaded, kind, labels=NAMES[::-1])  # the same shapes, another meaning
    assert loaded.named_tensors().keys() - same(state(loaded), state(moved)) == out
    assert moved.config.head.labels == NAMES[::-1]  # type: ignore[union-attr]
    if kind == "sequence_classification":
        several = with_head(loaded, kind, labels=NAMES, problem_type="multi_label_classification")
        assert loaded.named_tensors().keys() - same(state(loaded), state(several)) == out
    assert same(
        state(loaded), state(with_head(loaded, kind, labels=OTHER)) | {name: torch.zeros(1) for name in out}
    ) == (loaded.named_tensors().keys() - out)


@pytest.mark.parametrize("family", PLAIN)
def test_layers_of_one_name_and_another_meaning_are_drawn(start: Start, family: str) -> None:
    """A classifier of texts, of words and of candidates: transformers calls all three of them the same."""
    for ending, kind in itertools.permutations(("SequenceClassification", "TokenClassification"), 2):
        _, loaded = start(family, ending)
        other = with_head(
            loaded, "token_classification" if kind == "TokenClassification" else "sequence_classification", labels=NAMES
        )
        assert not torch.equal(other.named_tensors()["head.out.weight"], loaded.named_tensors()["head.out.weight"])
        assert not other.named_tensors()["head.out.bias"].any()


def test_the_pooler_of_pretraining_is_used(start: Start) -> None:
    _, loaded = start("bert", "PreTraining")
    known = loaded.named_tensors()
    for kind in ("sequence_classification", "multiple_choice", "pooler", "next_sentence"):
        new_model = with_head(loaded, kind, **head_options(kind)).named_tensors()
        assert torch.equal(new_model["head.first.dense.weight"], known["head.next.first.dense.weight"])
    assert torch.equal(new_model["head.out.weight"], known["head.next.out.weight"])  # the next sentence is what it was
    masked = with_head(loaded, "masked_lm").named_tensors()
    assert torch.equal(masked["head.dense.weight"], known["head.masked.dense.weight"])
    back = with_head(with_head(loaded, "next_sentence"), "pretraining").named_tensors()
    assert torch.equal(back["head.next.out.weight"], known["head.next.out.weight"])
    assert not torch.equal(back["head.masked.dense.weight"], known["head.masked.dense.weight"])


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("tied", [True, False])
def test_decoders_stay_tied_or_not(start: Start, tmp_path: Path, family: str, tied: bool) -> None:
    _, loaded = start(family, "SequenceClassification", tie_word_embeddings=tied)
    for source in (loaded, with_head(with_head(loaded, "masked_lm", seed=1), "masked_lm", seed=2)):
        new_model: Any = with_head(source, "masked_lm", seed=1)
        assert (new_model.head.decoder.weight is new_model.model.embedding.tokens.weight) is tied
        assert torch.equal(new_model.model.embedding.tokens.weight, loaded.model.embedding.tokens.weight)
        save(new_model, tmp_path / "out", overwrite=True)
        architecture = FAMILIES[family].kinds()["masked_lm"]
        _, report = getattr(transformers, architecture).from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report


@pytest.mark.parametrize("problem_type", get_args(ProblemType))
@pytest.mark.parametrize("family", PLAIN)
def test_transformers_reads_the_problem_type(
    start: Start, tmp_path: Path, family: str, problem_type: ProblemType
) -> None:
    _, loaded = start(family, "Model")
    labels = ("stars",) if problem_type == "regression" else OTHER
    save(with_head(loaded, "sequence_classification", labels=labels, problem_type=problem_type), tmp_path / "out")
    head = load(tmp_path / "out").config.head
    assert isinstance(head, Classes) and (head.labels, head.problem_type) == (labels, problem_type)
    assert head.dropout == 0.3 and (head.activation == "relu") is (family == "distilbert")  # the family's own
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert theirs.problem_type == problem_type and theirs.num_labels == len(labels)


@pytest.mark.parametrize(
    ("family", "kind", "architecture"),
    [
        (family, kind, architecture)
        for family in NEWER
        for kind, architecture in FAMILIES[family].kinds().items()
        if kind not in ("none", "encoder")
    ],
)
def test_heads_of_the_other_families(start: Start, tmp_path: Path, family: str, kind: str, architecture: str) -> None:
    """Upon the bare model: its body stays, the head is drawn, transformers loads it and computes the same."""
    _, loaded = start(family, "Model")
    new_model = with_head(loaded, kind, seed=5, **head_options(kind))
    known, drawn = state(loaded), state(new_model)
    kept = {name for name in drawn if not name.startswith("head.")}
    gone = ("head.", "decoder.") if new_model.model.decoder is None else ("head.",)
    assert kept == {name for name in known if not name.startswith(gone)}
    assert all(torch.equal(known[name], drawn[name]) for name in kept)
    assert same(drawn, state(with_head(loaded, kind, seed=5, **head_options(kind)))) == drawn.keys()
    head = {name for name, tensor in drawn.items() if name.startswith("head.") and tensor.ndim > 1}
    pooled = family == "albert" or (family in ("mpnet", "jina_embeddings_v3") and kind in ("pooler", "multiple_choice"))
    pooler = {name for name in head if name.endswith("first.dense.weight")} if pooled else set()
    other = drawn.keys() - same(drawn, state(with_head(loaded, kind, seed=6, **head_options(kind))))
    assert other == head - pooler
    save(new_model, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == [architecture]
    theirs, report = getattr(transformers, architecture).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    ids, types = random_sequences(family)
    with torch.no_grad():
        outputs = our_outputs(new_model.eval(), random_batch(family))
        for ours, expected in zip(outputs, hf_outputs(theirs.eval(), family, ids, types), strict=True):
            assert ours.shape == expected.shape
            assert (ours - expected).abs().max() <= 5e-6 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("reinit_layers", [0, 1, 3, 4])
def test_top_blocks_can_be_drawn_anew(start: Start, family: str, reinit_layers: int) -> None:
    _, loaded = start(family, "SequenceClassification")
    known = state(loaded)
    new_model = state(with_head(loaded, "sequence_classification", labels=NAMES, reinit_layers=reinit_layers))
    changed = known.keys() - same(known, new_model)
    anew = {name for name in known if reinit_layers and name.startswith("head.")} | {
        name
        for name in known
        if name.startswith(tuple(f"encoder.blocks.{3 - number}." for number in range(reinit_layers)))
    }
    assert changed == anew
    for name in anew:
        assert new_model[name].std(correction=0) < 0.03, name


def test_a_pooler_is_kept_for_embeddings(start: Start, tmp_path: Path) -> None:
    folder, loaded = start("bert", "Model")
    new_model = with_head(loaded, "embedding")
    assert new_model.config.head == SentenceEmbedding(keeps_pooler=True)
    save(new_model, tmp_path / "out")
    assert load(tmp_path / "out").config.head == new_model.config.head
    assert load_file(tmp_path / "out/model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    assert with_head(new_model, "embedding").config.head == new_model.config.head
    assert torch.equal(
        with_head(new_model, "sequence_classification", labels=OTHER).named_tensors()["head.first.dense.weight"],
        loaded.named_tensors()["head.first.dense.weight"],
    )
    _, masked = start("bert", "MaskedLM")
    assert with_head(masked, "embedding").config.head == SentenceEmbedding()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_and_mode_are_kept(start: Start, dtype: torch.dtype) -> None:
    folder, single = start("bert", "MaskedLM")
    loaded = load(folder, dtype=dtype)
    new_model = with_head(loaded, "sequence_classification", labels=OTHER, seed=1)
    assert {p.dtype for p in new_model.parameters()} == {dtype} and not new_model.training
    assert new_model(random_batch("bert")).dtype == dtype
    expected = with_head(single, "sequence_classification", labels=OTHER, seed=1).named_tensors()["head.out.weight"]
    assert torch.equal(new_model.named_tensors()["head.out.weight"], expected.to(dtype))  # the same draw in each dtype
    assert with_head(loaded.train(), "sequence_classification", labels=OTHER).training


def native(**more: Any) -> ModelBundle:
    """A model of our own family."""
    model = ModelConfig(
        embedding=EmbeddingConfig(vocabulary=99, width=16, positions=Learned(count=40), types=2, dropout=0.2),
        encoder=StackConfig(width=16, layers=2, heads=2, head_width=8, inner_width=24),
    )
    return create(BundleConfig(family="heedful", model=model, **more), seed=1)


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES["heedful"].kinds() if kind != "none"] + ["embedding"])
def test_our_own_family(tmp_path: Path, kind: str) -> None:
    bare = native()
    new_model = with_head(bare, kind, seed=2, **head_options(kind))
    assert new_model.config.head is not None and new_model.config.head.kind == kind
    assert same(state(bare), state(new_model)) == bare.named_tensors().keys()
    assert getattr(new_model.config.head, "dropout", 0.2) == 0.2
    save(new_model, tmp_path / "out")
    again = load(tmp_path / "out")
    assert (
        again.config.head == new_model.config.head
        and same(state(new_model), state(again)) == new_model.named_tensors().keys()
    )
    onward = with_head(again, "sequence_classification", labels=NAMES)  # from any head to another, and on to vectors
    save(with_head(with_head(onward, "pooler"), "embedding"), tmp_path / "vectors")
    assert load(tmp_path / "vectors").config.head == SentenceEmbedding()


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (
        "masked_ml",
        {},
        r'^this family has no head "masked_ml" \(did you mean "masked_lm"\?\); it has pooler, .*, embedding$',
    ),
    ("none", {}, r'^this family has no head "none"; it has pooler'),
    ("language_model", {}, r'^this family has no head "language_model"'),
    ("sequence_classification", {}, r'^labels are none; a "sequence_classification" head needs one or more'),
    (
        "token_classification",
        {"labels": ("a", "b", "a")},
        '^labels are "a", "b", "a"; a "token_classification" head needs',
    ),
    (
        "question_answering",
        {"reinit_layers": 5},
        "^reinit_layers is 5, but this model has 4 blocks: give 0 to 4$",
    ),
    ("question_answering", {"reinit_layers": -1}, "^reinit_layers is -1, but this model has 4 blocks"),
]


@pytest.mark.parametrize(("kind", "more", "message"), WRONG)
def test_wrong_wishes_are_named(start: Start, kind: str, more: dict[str, Any], message: str) -> None:
    _, loaded = start("bert", "Model")
    with pytest.raises(HeedfulError, match=message):
        with_head(loaded, kind, **more)


# -- numbers on another scale -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "distilbert", "gpt2"])
def test_a_head_may_give_numbers_on_another_scale(start: Start, family: str, tmp_path: Path) -> None:
    _, loaded = start(family, "SequenceClassification")
    before, batch = state(loaded), random_batch(family)
    shift = 3.0 if "head.out.bias" in loaded.named_tensors() else 0.0
    new_model = rescaled(loaded, 20.0, shift)
    with torch.no_grad():
        first, scaled = loaded(batch), new_model(batch)
    assert torch.allclose(scaled, 20 * first + shift, rtol=1e-5, atol=1e-5)
    assert same(before, state(loaded)) == before.keys(), "the given one is left as it is"
    assert rescaled(loaded, 1.0, 0.0) is loaded
    save(new_model, tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "out")(batch), scaled)
        moved = rescaled(loaded, 1.0, 7.0)(batch)  # a bias is added where there is none
    assert torch.allclose(moved, first + 7, rtol=1e-5, atol=1e-5)


# -- what a loaded model knows beside its weights ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["thresholds", "label_scaling"])
def test_facts_are_saved_and_are_not_another_heads(start: Start, tmp_path: Path, name: str) -> None:
    _, loaded = start("bert", "SequenceClassification")
    assert getattr(loaded, name) == {}
    loaded = copy(loaded)
    setattr(loaded, name, {"ache": 0.25, "calm": 1e-3})
    save(loaded, tmp_path / "out")
    again = load(tmp_path / "out")
    assert getattr(again, name) == {"ache": 0.25, "calm": 1e-3}
    assert getattr(with_head(again, "sequence_classification", labels=NAMES), name) == {}
    for wrong in ({"ache": "0.5"}, {"ache": True}, [1], {"ache": None}):
        notes = json.loads((tmp_path / "out/heedful.json").read_text())
        (tmp_path / "out/heedful.json").write_text(json.dumps(notes | {name: wrong}))
        with pytest.raises(HeedfulError, match=rf"heedful\.json: {name} is .*; expected names with a number each"):
            load(tmp_path / "out")


def test_a_calibration_is_saved_and_is_not_another_heads(start: Start, tmp_path: Path) -> None:
    loaded = copy(start("bert", "SequenceClassification")[1])
    loaded.calibration = (0.25, 0.5)
    save(loaded, tmp_path / "out")
    again = load(tmp_path / "out")
    assert again.calibration == (0.25, 0.5)
    assert with_head(again, "sequence_classification", labels=NAMES).calibration == ()
    notes = json.loads((tmp_path / "out/heedful.json").read_text())
    for wrong in ({"a": 0.5}, ["0.5"], [1.5], [True]):
        (tmp_path / "out/heedful.json").write_text(json.dumps(notes | {"calibration": wrong}))
        with pytest.raises(ModelError):
            load(tmp_path / "out")


@pytest.mark.parametrize("pairs", [None, False, True])
def test_a_folder_knows_whether_pairs_were_learned(start: Start, tmp_path: Path, pairs: bool | None) -> None:
    loaded = copy(start("bert", "SequenceClassification")[1])
    loaded.pairs = pairs
    save(loaded, tmp_path / "out")
    assert load(tmp_path / "out").pairs is pairs
    notes = json.loads((tmp_path / "out/heedful.json").read_text())
    assert notes.get("pairs") is pairs
    for wrong in (1, "yes", {}):
        (tmp_path / "out/heedful.json").write_text(json.dumps(notes | {"pairs": wrong}))
        with pytest.raises(HeedfulError, match=r"heedful\.json: pairs is .*; expected true or false"):
            load(tmp_path / "out")


def test_the_limit_is_the_least_of_all(start: Start) -> None:
    assert native().max_length == 40
    _, loaded = start("roberta", "Model")
    assert loaded.max_length == 40  # of 42 rows two are passed over
    assert (
        heedful.checkpoint.ModelBundle(
            BundleConfig(family="heedful", model=native().config.model, head=SentenceEmbedding(max_length=7))
        ).max_length
        == 7
    )


def test_what_other_heads_have_in_a_folder_is_taken(tmp_path: Path) -> None:
    """The published BERT says that it is a masked language model, and has its pooler and what follows beside it."""
    save_tiny(tmp_path, "bert", "BertForPreTraining")
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = load_file(tmp_path / "model.safetensors")
    with pytest.warns(HeedfulWarning, match="takes what its head has of them"):
        loaded = load(tmp_path)
    assert set(loaded.other_head_tensors) == {
        f"{name}.{part}" for name in ("bert.pooler.dense", "cls.seq_relationship") for part in ("weight", "bias")
    }
    classes = with_head(loaded, "sequence_classification", labels=("x", "y")).named_tensors()
    assert torch.equal(classes["head.first.dense.weight"], theirs["bert.pooler.dense.weight"])
    pretraining = with_head(loaded, "pretraining").named_tensors()
    assert torch.equal(pretraining["head.next.first.dense.weight"], theirs["bert.pooler.dense.weight"])
    assert torch.equal(pretraining["head.next.out.weight"], theirs["cls.seq_relationship.weight"])
    expected = transformers.BertForSequenceClassification.from_pretrained(tmp_path, num_labels=2)
    assert torch.equal(expected.bert.pooler.dense.weight, classes["head.first.dense.weight"])


def test_the_last_layer_of_a_head_that_was_not_read_is_not_taken(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertForSequenceClassification")
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(HeedfulWarning, match="belong to other heads"):
        loaded = load(tmp_path)
    classes = with_head(loaded, "sequence_classification", labels=("x", "y", "z")).named_tensors()
    theirs = load_file(tmp_path / "model.safetensors")
    assert not torch.equal(classes["head.out.weight"], theirs["classifier.weight"]), "its labels may be others"


def test_shared_layers_are_not_drawn_anew(tmp_path: Path) -> None:
    save_tiny(tmp_path, "albert", "AlbertModel")
    with pytest.raises(HeedfulError, match="layers of this model share"):
        with_head(load(tmp_path), "sequence_classification", labels=("x", "y"), reinit_layers=1)
