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

from heedful.checkpoint import BundleConfig, ModelBundle, create, load, save
from heedful.checkpoint.new_head import rescaled, with_head
from heedful.checkpoint.notes import TrainingVectors
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

LABEL_NAMES = tuple(LABELS.values())
OTHER_LABELS = ("up", "down")
LAST_LAYERS = ("classifier", "classifier.out_proj", "qa_outputs")  # HF names of layers with a row for each label
UNSHARED = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert")  # encoders whose layers share no weights
OTHER_FAMILIES = [family for family in TINY if family not in UNSHARED]
KINDS = [
    (family, kind, architecture)
    for family in UNSHARED
    for kind, architecture in FAMILIES[family].kinds().items()
    if kind != "none"
]
STARTS = [
    (*head, ending)
    for head in KINDS
    for ending in ("MaskedLM", "SequenceClassification", "Model")
    if head[0] in ("bert", "roberta", "distilbert") or ending == "MaskedLM"  # other families differ only in names
]
all_kinds = pytest.mark.parametrize(("family", "kind", "architecture"), KINDS)


Start = Callable[..., tuple[Path, ModelBundle]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Function that saves a tiny model of transformers and loads it, once for each architecture.

    Its arguments are a family and the end of the name of an architecture; it returns the folder and the model.
    """

    @cache
    def make_folder(family: str, ending: str, **changed: Any) -> tuple[Path, ModelBundle]:
        folder = tmp_path_factory.mktemp(f"{family}-{ending}")
        architecture = next(name for name in FAMILIES[family].heads if name.endswith(ending))
        save_tiny(folder, family, architecture, **changed)
        return folder, load(folder)

    return make_folder


def hf_tensors(folder: Path, family: str) -> dict[str, Tensor]:
    """Return the tensors of a folder by HF names, with the prefix of the family."""
    prefix = FAMILIES[family].prefix
    saved = load_file(folder / "model.safetensors")
    bare = not any(name.startswith(prefix) for name in saved)
    return {prefix * bare + name: tensor for name, tensor in saved.items()}


def module_name(name: str) -> str:
    """Return the name of a tensor without .weight or .bias."""
    return name.rpartition(".")[0]


def head_options(kind: str, labels: tuple[str, ...] = OTHER_LABELS) -> dict[str, Any]:
    """Return the options of `with_head` for a kind of head."""
    return {"labels": labels} if kind in ("sequence_classification", "token_classification") else {}


def copy_weights(loaded: ModelBundle) -> dict[str, Tensor]:
    """Return a copy of all parameters."""
    return {name: tensor.detach().clone() for name, tensor in loaded.named_tensors().items()}


def equal_names(first: dict[str, Tensor], second: dict[str, Tensor]) -> set[str]:
    """Return the names of the tensors that are equal bit for bit."""
    return {name for name in first if torch.equal(first[name], second[name])}


@pytest.mark.parametrize(("family", "kind", "architecture", "ending"), STARTS)
def test_shared_weights_are_kept_and_others_are_initialised(
    start: Start, tmp_path: Path, family: str, kind: str, architecture: str, ending: str
) -> None:
    folder, loaded = start(family, ending)
    before = copy_weights(loaded)
    new_model = with_head(loaded, kind, seed=3, **head_options(kind))
    save(new_model, tmp_path / "out")
    old, new = hf_tensors(folder, family), hf_tensors(tmp_path / "out", family)
    body = {name for name in new if name.startswith(FAMILIES[family].prefix) and "pooler" not in name}
    assert len(body) > 60 and body <= old.keys()
    for name, tensor in new.items():
        # no model here has a last layer for the same labels
        is_kept = name in old and module_name(name) not in LAST_LAYERS
        is_equal = name in old and torch.equal(tensor, old[name])
        assert is_equal == is_kept, name
        if not is_kept:
            expected = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            assert tensor.mean() == pytest.approx(expected, abs=0.01), name
            std = tensor.std(correction=0)
            assert std < 0.03 and (std > 0.01) == (tensor.ndim > 1), name
    assert equal_names(before, copy_weights(loaded)) == before.keys()  # the model that was given is unchanged
    assert not {p.data_ptr() for p in new_model.parameters()} & {p.data_ptr() for p in loaded.parameters()}


@all_kinds
def test_the_seed_decides_initialised_weights(start: Start, family: str, kind: str, architecture: str) -> None:
    _, loaded = start(family, "MaskedLM" if kind != "masked_lm" else "SequenceClassification")
    before = torch.random.get_rng_state()
    first, repeated, other_seed = (
        copy_weights(with_head(loaded, kind, seed=seed, **head_options(kind))) for seed in (5, 5, 6)
    )
    assert equal_names(first, repeated) == first.keys()
    changed = first.keys() - equal_names(first, other_seed)
    weights = {name for name, tensor in first.items() if name.startswith("head.") and tensor.ndim > 1}
    assert changed == weights - {"head.masked." + name for name in ("dense.weight", "decoder.weight")}
    assert changed or kind == "embedding"
    assert torch.equal(before, torch.random.get_rng_state())  # the global generator of PyTorch is unchanged


@all_kinds
def test_transformers_and_heedful_load_the_saved_folder(
    start: Start, tmp_path: Path, family: str, kind: str, architecture: str
) -> None:
    _, loaded = start(family, "MaskedLM")
    new_model = with_head(loaded, kind, **head_options(kind))
    save(new_model, tmp_path / "out")
    values = json.loads((tmp_path / "out/config.json").read_text())
    assert values["architectures"] == [architecture]
    reloaded = load(tmp_path / "out")
    assert reloaded.config.head == new_model.config.head
    assert equal_names(copy_weights(new_model), copy_weights(reloaded)) == new_model.named_tensors().keys()
    reference, report = getattr(transformers, architecture).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    if kind in ("sequence_classification", "token_classification"):
        assert reference.config.id2label == dict(enumerate(OTHER_LABELS))
    ids, types = random_sequences(family)
    with torch.no_grad():
        outputs = our_outputs(new_model.eval(), random_batch(family))
        for actual, expected in zip(outputs, hf_outputs(reference.eval(), family, ids, types), strict=True):
            assert actual.shape == expected.shape
            assert (actual - expected).abs().max() <= 2e-6 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("family", UNSHARED)
@pytest.mark.parametrize("kind", ["sequence_classification", "token_classification"])
def test_the_last_layer_is_kept_for_the_same_labels(start: Start, family: str, kind: str) -> None:
    ending = {"sequence_classification": "SequenceClassification", "token_classification": "TokenClassification"}[kind]
    _, loaded = start(family, ending)
    weights = copy_weights(loaded)
    last_layer = {name for name in weights if name.startswith("head.out.")}

    def changed_names(new_model: ModelBundle) -> set[str]:
        return weights.keys() - equal_names(weights, copy_weights(new_model))

    assert not changed_names(with_head(loaded, kind, labels=LABEL_NAMES))
    reordered = with_head(loaded, kind, labels=LABEL_NAMES[::-1])  # same shapes, other labels
    assert changed_names(reordered) == last_layer
    assert reordered.config.head.labels == LABEL_NAMES[::-1]  # type: ignore[union-attr]
    if kind == "sequence_classification":
        multi_label = with_head(loaded, kind, labels=LABEL_NAMES, problem_type="multi_label_classification")
        assert changed_names(multi_label) == last_layer
    assert changed_names(with_head(loaded, kind, labels=OTHER_LABELS)) == last_layer


@pytest.mark.parametrize("family", UNSHARED)
def test_layers_of_the_same_name_for_other_predictions_are_initialised(start: Start, family: str) -> None:
    """In transformers, classifiers of texts, of words and of candidates have the same name."""
    for ending, kind in itertools.permutations(("SequenceClassification", "TokenClassification"), 2):
        _, loaded = start(family, ending)
        new_model = with_head(
            loaded,
            "token_classification" if kind == "TokenClassification" else "sequence_classification",
            labels=LABEL_NAMES,
        )
        assert not torch.equal(new_model.named_tensors()["head.out.weight"], loaded.named_tensors()["head.out.weight"])
        assert not new_model.named_tensors()["head.out.bias"].any()


def test_the_pooler_of_pretraining_is_used(start: Start) -> None:
    _, loaded = start("bert", "PreTraining")
    weights = loaded.named_tensors()
    for kind in ("sequence_classification", "multiple_choice", "pooler", "next_sentence"):
        new_model = with_head(loaded, kind, **head_options(kind)).named_tensors()
        assert torch.equal(new_model["head.first.dense.weight"], weights["head.next.first.dense.weight"])
    assert torch.equal(
        new_model["head.out.weight"], weights["head.next.out.weight"]
    )  # the last layer of next sentence prediction
    masked = with_head(loaded, "masked_lm").named_tensors()
    assert torch.equal(masked["head.dense.weight"], weights["head.masked.dense.weight"])
    back = with_head(with_head(loaded, "next_sentence"), "pretraining").named_tensors()
    assert torch.equal(back["head.next.out.weight"], weights["head.next.out.weight"])
    assert not torch.equal(back["head.masked.dense.weight"], weights["head.masked.dense.weight"])


@pytest.mark.parametrize("family", UNSHARED)
@pytest.mark.parametrize("tied", [True, False])
def test_output_layers_stay_tied_or_untied(start: Start, tmp_path: Path, family: str, tied: bool) -> None:
    _, loaded = start(family, "SequenceClassification", tie_word_embeddings=tied)
    for source in (loaded, with_head(with_head(loaded, "masked_lm", seed=1), "masked_lm", seed=2)):
        new_model: Any = with_head(source, "masked_lm", seed=1)
        assert (new_model.head.decoder.weight is new_model.model.embedding.tokens.weight) is tied
        assert torch.equal(new_model.model.embedding.tokens.weight, loaded.model.embedding.tokens.weight)
        save(new_model, tmp_path / "out", overwrite=True)
        architecture = FAMILIES[family].kinds()["masked_lm"]
        _, report = getattr(transformers, architecture).from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report


@pytest.mark.parametrize("problem_type", get_args(ProblemType))
@pytest.mark.parametrize("family", UNSHARED)
def test_transformers_reads_the_problem_type(
    start: Start, tmp_path: Path, family: str, problem_type: ProblemType
) -> None:
    _, loaded = start(family, "Model")
    labels = ("stars",) if problem_type == "regression" else OTHER_LABELS
    save(with_head(loaded, "sequence_classification", labels=labels, problem_type=problem_type), tmp_path / "out")
    head = load(tmp_path / "out").config.head
    assert isinstance(head, Classes) and (head.labels, head.problem_type) == (labels, problem_type)
    assert head.dropout == 0.3 and (head.activation == "relu") is (family == "distilbert")  # as in the family
    hf_config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert hf_config.problem_type == problem_type and hf_config.num_labels == len(labels)


@pytest.mark.parametrize(
    ("family", "kind", "architecture"),
    [
        (family, kind, architecture)
        for family in OTHER_FAMILIES
        for kind, architecture in FAMILIES[family].kinds().items()
        if kind not in ("none", "encoder")
    ],
)
def test_heads_of_the_other_families(start: Start, tmp_path: Path, family: str, kind: str, architecture: str) -> None:
    """A new head on a bare model: the body is kept, and transformers computes the same from the saved folder."""
    _, loaded = start(family, "Model")
    new_model = with_head(loaded, kind, seed=5, **head_options(kind))
    old, new = copy_weights(loaded), copy_weights(new_model)
    body = {name for name in new if not name.startswith("head.")}
    removed = ("head.", "decoder.") if new_model.model.decoder is None else ("head.",)
    assert body == {name for name in old if not name.startswith(removed)}
    assert all(torch.equal(old[name], new[name]) for name in body)
    assert equal_names(new, copy_weights(with_head(loaded, kind, seed=5, **head_options(kind)))) == new.keys()
    head = {name for name, tensor in new.items() if name.startswith("head.") and tensor.ndim > 1}
    has_kept_pooler = family == "albert" or (
        family in ("mpnet", "jina_embeddings_v3") and kind in ("pooler", "multiple_choice")
    )
    pooler = {name for name in head if name.endswith("first.dense.weight")} if has_kept_pooler else set()
    changed = new.keys() - equal_names(new, copy_weights(with_head(loaded, kind, seed=6, **head_options(kind))))
    assert changed == head - pooler
    save(new_model, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == [architecture]
    reference, report = getattr(transformers, architecture).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    ids, types = random_sequences(family)
    with torch.no_grad():
        outputs = our_outputs(new_model.eval(), random_batch(family))
        for actual, expected in zip(outputs, hf_outputs(reference.eval(), family, ids, types), strict=True):
            assert actual.shape == expected.shape
            assert (actual - expected).abs().max() <= 5e-6 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("reinit_layers", [0, 1, 3, 4])
def test_upper_blocks_can_be_initialised_again(start: Start, family: str, reinit_layers: int) -> None:
    _, loaded = start(family, "SequenceClassification")
    old = copy_weights(loaded)
    new_model = with_head(loaded, "sequence_classification", labels=LABEL_NAMES, reinit_layers=reinit_layers)
    new = copy_weights(new_model)
    top_blocks = tuple(f"encoder.blocks.{layer}." for layer in range(4 - reinit_layers, 4))
    initialised = {name for name in old if name.startswith(top_blocks)}
    if reinit_layers:
        initialised |= {name for name in old if name.startswith("head.")}
    assert old.keys() - equal_names(old, new) == initialised
    for name in initialised:
        assert new[name].std(correction=0) < 0.03, name


def test_embeddings_keep_the_pooler(start: Start, tmp_path: Path) -> None:
    folder, loaded = start("bert", "Model")
    new_model = with_head(loaded, "embedding")
    assert new_model.config.head == SentenceEmbedding(keeps_pooler=True)
    save(new_model, tmp_path / "out")
    assert load(tmp_path / "out").config.head == new_model.config.head
    assert load_file(tmp_path / "out/model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    assert with_head(new_model, "embedding").config.head == new_model.config.head
    assert torch.equal(
        with_head(new_model, "sequence_classification", labels=OTHER_LABELS).named_tensors()["head.first.dense.weight"],
        loaded.named_tensors()["head.first.dense.weight"],
    )
    _, masked = start("bert", "MaskedLM")
    assert with_head(masked, "embedding").config.head == SentenceEmbedding()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_and_mode_are_kept(start: Start, dtype: torch.dtype) -> None:
    folder, single = start("bert", "MaskedLM")
    loaded = load(folder, dtype=dtype)
    new_model = with_head(loaded, "sequence_classification", labels=OTHER_LABELS, seed=1)
    assert {p.dtype for p in new_model.parameters()} == {dtype} and not new_model.training
    assert new_model(random_batch("bert")).dtype == dtype
    in_float32 = with_head(single, "sequence_classification", labels=OTHER_LABELS, seed=1)
    expected = in_float32.named_tensors()["head.out.weight"].to(dtype)  # the same random numbers for each dtype
    assert torch.equal(new_model.named_tensors()["head.out.weight"], expected)
    assert with_head(loaded.train(), "sequence_classification", labels=OTHER_LABELS).training


def heedful_model(**fields: Any) -> ModelBundle:
    """Return a new model of the family "heedful"."""
    model = ModelConfig(
        embedding=EmbeddingConfig(vocabulary=99, width=16, positions=Learned(count=40), types=2, dropout=0.2),
        encoder=StackConfig(width=16, layers=2, heads=2, head_width=8, inner_width=24),
    )
    return create(BundleConfig(family="heedful", model=model, **fields), seed=1)


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES["heedful"].kinds() if kind != "none"] + ["embedding"])
def test_heads_of_the_family_heedful(tmp_path: Path, kind: str) -> None:
    bare = heedful_model()
    new_model = with_head(bare, kind, seed=2, **head_options(kind))
    assert new_model.config.head is not None and new_model.config.head.kind == kind
    assert equal_names(copy_weights(bare), copy_weights(new_model)) == bare.named_tensors().keys()
    assert getattr(new_model.config.head, "dropout", 0.2) == 0.2
    save(new_model, tmp_path / "out")
    reloaded = load(tmp_path / "out")
    assert reloaded.config.head == new_model.config.head
    assert equal_names(copy_weights(new_model), copy_weights(reloaded)) == new_model.named_tensors().keys()
    classifier = with_head(reloaded, "sequence_classification", labels=LABEL_NAMES)
    save(with_head(with_head(classifier, "pooler"), "embedding"), tmp_path / "vectors")
    assert load(tmp_path / "vectors").config.head == SentenceEmbedding()


INVALID: list[tuple[str, dict[str, Any], str]] = [
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


@pytest.mark.parametrize(("kind", "options", "message"), INVALID)
def test_invalid_options_are_refused(start: Start, kind: str, options: dict[str, Any], message: str) -> None:
    _, loaded = start("bert", "Model")
    with pytest.raises(HeedfulError, match=message):
        with_head(loaded, kind, **options)


# -- rescaled heads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "distilbert", "gpt2"])
def test_a_rescaled_head_outputs_scaled_scores(start: Start, family: str, tmp_path: Path) -> None:
    _, loaded = start(family, "SequenceClassification")
    before, batch = copy_weights(loaded), random_batch(family)
    shift = 3.0 if "head.out.bias" in loaded.named_tensors() else 0.0
    new_model = rescaled(loaded, 20.0, shift)
    with torch.no_grad():
        first, scaled = loaded(batch), new_model(batch)
    assert torch.allclose(scaled, 20 * first + shift, rtol=1e-5, atol=1e-5)
    assert equal_names(before, copy_weights(loaded)) == before.keys(), "the model that was given has changed"
    assert rescaled(loaded, 1.0, 0.0) is loaded
    save(new_model, tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "out")(batch), scaled)
        shifted = rescaled(loaded, 1.0, 7.0)(batch)  # adds a bias to a layer without one
    assert torch.allclose(shifted, first + 7, rtol=1e-5, atol=1e-5)


# -- heedful.json -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["thresholds", "label_scaling"])
def test_thresholds_and_scaling_are_saved_but_not_for_another_head(start: Start, tmp_path: Path, name: str) -> None:
    _, loaded = start("bert", "SequenceClassification")
    assert getattr(loaded, name) == {}
    loaded = copy(loaded)
    setattr(loaded, name, {"ache": 0.25, "calm": 1e-3})
    save(loaded, tmp_path / "out")
    reloaded = load(tmp_path / "out")
    assert getattr(reloaded, name) == {"ache": 0.25, "calm": 1e-3}
    assert getattr(with_head(reloaded, "sequence_classification", labels=LABEL_NAMES), name) == {}
    for wrong in ({"ache": "0.5"}, {"ache": True}, [1], {"ache": None}):
        notes = json.loads((tmp_path / "out/heedful.json").read_text())
        (tmp_path / "out/heedful.json").write_text(json.dumps(notes | {name: wrong}))
        with pytest.raises(HeedfulError, match=rf"heedful\.json: {name} is .*; expected names with a number each"):
            load(tmp_path / "out")


def test_a_calibration_is_saved_but_not_for_another_head(start: Start, tmp_path: Path) -> None:
    loaded = copy(start("bert", "SequenceClassification")[1])
    loaded.calibration = (0.25, 0.5)
    save(loaded, tmp_path / "out")
    reloaded = load(tmp_path / "out")
    assert reloaded.calibration == (0.25, 0.5)
    assert with_head(reloaded, "sequence_classification", labels=LABEL_NAMES).calibration == ()
    notes = json.loads((tmp_path / "out/heedful.json").read_text())
    for wrong in ({"a": 0.5}, ["0.5"], [1.5], [True]):
        (tmp_path / "out/heedful.json").write_text(json.dumps(notes | {"calibration": wrong}))
        with pytest.raises(ModelError):
            load(tmp_path / "out")


def test_training_vectors_are_saved_but_not_for_another_head(start: Start, tmp_path: Path) -> None:
    loaded = copy(start("bert", "SequenceClassification")[1])
    width = loaded.config.model.width
    loaded.training_vectors = TrainingVectors(mean=(0.5,) * width, radius=2.0, held_out={"0.5": 0.06})
    save(loaded, tmp_path / "out")
    reloaded = load(tmp_path / "out")
    assert reloaded.training_vectors == loaded.training_vectors
    assert with_head(reloaded, "sequence_classification", labels=LABEL_NAMES).training_vectors is None
    assert load(tmp_path / "out", head="pooler").training_vectors is None
    notes = json.loads((tmp_path / "out/heedful.json").read_text())
    right = notes["training_vectors"]
    for wrong in ([1], {}, {"mean": [0.5]}, right | {"mean": ["0.5"]}, right | {"radius": 0}, right | {"held_out": [1]},
                  right | {"mean": [0.5] * (width + 1)}, right | {"more": 1}):  # fmt: skip
        (tmp_path / "out/heedful.json").write_text(json.dumps(notes | {"training_vectors": wrong}))
        with pytest.raises(ModelError, match=r"training_vectors|held_out"):
            load(tmp_path / "out")


@pytest.mark.parametrize("pairs", [None, False, True])
def test_a_folder_has_whether_the_classifier_was_trained_on_pairs(
    start: Start, tmp_path: Path, pairs: bool | None
) -> None:
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


def test_max_length_is_the_smallest_limit(start: Start) -> None:
    assert heedful_model().max_length == 40
    _, loaded = start("roberta", "Model")
    assert loaded.max_length == 40  # 42 position embeddings; two are not used
    config = BundleConfig(family="heedful", model=heedful_model().config.model, head=SentenceEmbedding(max_length=7))
    assert ModelBundle(config).max_length == 7


def test_tensors_of_other_heads_in_the_folder_are_used(tmp_path: Path) -> None:
    """The published BERT is a masked language model, and its folder also has a pooler and next sentence prediction."""
    save_tiny(tmp_path, "bert", "BertForPreTraining")
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    saved = load_file(tmp_path / "model.safetensors")
    with pytest.warns(HeedfulWarning, match="takes what its head has of them"):
        loaded = load(tmp_path)
    assert set(loaded.other_head_tensors) == {
        f"{name}.{part}" for name in ("bert.pooler.dense", "cls.seq_relationship") for part in ("weight", "bias")
    }
    classes = with_head(loaded, "sequence_classification", labels=("x", "y")).named_tensors()
    assert torch.equal(classes["head.first.dense.weight"], saved["bert.pooler.dense.weight"])
    pretraining = with_head(loaded, "pretraining").named_tensors()
    assert torch.equal(pretraining["head.next.first.dense.weight"], saved["bert.pooler.dense.weight"])
    assert torch.equal(pretraining["head.next.out.weight"], saved["cls.seq_relationship.weight"])
    expected = transformers.BertForSequenceClassification.from_pretrained(tmp_path, num_labels=2)
    assert torch.equal(expected.bert.pooler.dense.weight, classes["head.first.dense.weight"])


def test_the_last_layer_of_another_head_is_not_used(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertForSequenceClassification")
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(HeedfulWarning, match="belong to other heads"):
        loaded = load(tmp_path)
    classes = with_head(loaded, "sequence_classification", labels=("x", "y", "z")).named_tensors()
    saved = load_file(tmp_path / "model.safetensors")
    assert not torch.equal(classes["head.out.weight"], saved["classifier.weight"]), (
        "the last layer may have other labels"
    )


def test_shared_layers_cannot_be_initialised_again(tmp_path: Path) -> None:
    save_tiny(tmp_path, "albert", "AlbertModel")
    with pytest.raises(HeedfulError, match="layers of this model share"):
        with_head(load(tmp_path), "sequence_classification", labels=("x", "y"), reinit_layers=1)
