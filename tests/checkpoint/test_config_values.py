"""Invalid values in config.json are refused with the name of the key, before tensors are read or memory is used."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import heedful
from heedful.errors import HeedfulError, HeedfulWarning
from tests.support.tiny_models import save_tiny

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of three models, each loaded once; tests must not change them."""
    root = tmp_path_factory.mktemp("configs")
    save_tiny(root / "bert", "bert", "BertForSequenceClassification", **SMALL)
    save_tiny(root / "distilbert", "distilbert", "DistilBertForSequenceClassification", **SMALL | {"n_layers": 2})
    save_tiny(root / "masked", "bert", "BertForMaskedLM", num_hidden_layers=2)
    for name in ("bert", "distilbert", "masked"):
        heedful.load(root / name)
    return {name: root / name for name in ("bert", "distilbert", "masked")}


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a tensor is read or a connection is opened."""

    def refuse(*arguments: Any, **keywords: Any) -> None:
        pytest.fail("config.json should have been refused before")

    monkeypatch.setattr("heedful.checkpoint.loading.read_tensors", refuse)
    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


MISSING = object()  # value of a key that is left out


def changed_folder(folders: dict[str, Path], tmp_path: Path, family: str, changes: dict[str, Any] | str) -> Path:
    """Return a copy of a folder whose config.json has these values or this text, beside code that must not run."""
    folder = Path(shutil.copytree(folders[family], tmp_path / "model"))
    if isinstance(changes, str):
        text = changes
    else:
        values = json.loads((folder / "config.json").read_text()) | changes
        text = json.dumps({key: value for key, value in values.items() if value is not MISSING})
    (folder / "config.json").write_text(text)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\nclass Model: pass\n")
    return folder


def load_error(folder: Path, tmp_path: Path, message: str) -> str:
    """Check that loading fails with a message, runs no code and needs less than 1 MiB; returns the error."""
    modules = set(sys.modules)
    tracemalloc.start()
    try:
        with pytest.raises(HeedfulError, match=message) as caught:
            heedful.load(folder)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20, peak_bytes
    assert set(sys.modules) == modules
    assert not (tmp_path / "canary").exists()
    assert len(str(caught.value)) < 1500
    return str(caught.value)


NOT_SIZES = [0, -1, 10**9, 10**30, "x", None, [], [1], {}, True, 1.5, 32.0]
BERT_VALUES: list[tuple[dict[str, Any], str]] = [
    *(({field: value}, field) for field in ("hidden_size", "num_hidden_layers", "vocab_size") for value in NOT_SIZES),
    *(({"num_attention_heads": value}, "num_attention_heads") for value in (0, -1, 3, 7, 64, "4", None, {"a": 1})),
    *(({"intermediate_size": value}, "intermediate_size") for value in (0, -3072, 10**12, "big", None)),
    *(({"max_position_embeddings": value}, "max_position_embeddings") for value in (0, -5, 10**9, "512", None, [512])),
    *(({"type_vocab_size": value}, "type_vocab_size") for value in (0, -2, 10**9, "two", None)),
    *(({"hidden_dropout_prob": value}, "hidden_dropout_prob") for value in (-0.1, 1.5, "0.1", [], True)),
    *(({"attention_probs_dropout_prob": value}, "attention_probs_dropout_prob") for value in (-1, 2, 10**400)),
    *(({"layer_norm_eps": value}, "layer_norm_eps") for value in (-1e-12, 2, "1e-12", {})),
    *(({"initializer_range": value}, "initializer_range") for value in (-1, 10**9, "0.02")),
    *(({"pad_token_id": value}, "pad_token_id") for value in (-1, 99, 10**9, "0", [0], 0.0)),
    *(
        ({"hidden_act": value}, "hidden_act")
        for value in ("nope", "", "GELU", None, 3, ["gelu"], {"gelu": 1}, "os.system")
    ),
    *(({"classifier_dropout": value}, "classifier_dropout") for value in (-1, 2, "x", [])),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
    ({"num_hidden_layers": 1000}, "num_hidden_layers"),
    ({"num_hidden_layers": 1024, "hidden_size": 2**20, "num_attention_heads": 1}, "num_hidden_layers"),
    ({"hidden_size": 2**24, "num_attention_heads": 2**24}, "hidden_size"),
    ({"hidden_size": 2**24, "intermediate_size": 2**24, "vocab_size": 2**24}, "hidden_size"),
    ({"vocab_size": 2**24}, "vocab_size"),
    *(({field: MISSING}, f"{field} is missing") for field in ("hidden_size", "vocab_size", "hidden_act")),
    # values that would run code or change the model
    ({"custom_pipelines": {"x": {"impl": "evil.Model"}}}, "custom_pipelines.*runs no code"),
    ({"trust_remote_code": True}, "trust_remote_code.*runs no code"),
    ({"trust_remote_code": "yes"}, "trust_remote_code.*runs no code"),
    ({"_attn_implementation_internal": "maker/kernel"}, "_attn_implementation_internal.*runs no code"),
    ({"_experts_implementation_internal": "x"}, "_experts_implementation_internal.*runs no code"),
    ({"_attn_implementation": "kernels-community/evil"}, "_attn_implementation"),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config.*unquantised"),
    ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
    ({"is_decoder": True}, "is_decoder"),
    ({"is_decoder": "file:///etc/passwd"}, "is_decoder"),
    ({"add_cross_attention": True}, "add_cross_attention"),
    ({"position_embedding_type": "relative_key"}, "missing: .*distance_embedding"),
    ({"position_embedding_type": "relative_key_query"}, "position_embedding_type is 'relative_key_query'"),
    ({"position_embedding_type": "rotary"}, "position_embedding_type"),
    ({"position_embedding_type": None}, "position_embedding_type"),
    ({"text_config": {"hidden_size": 32}}, "text_config"),
    ({"weights_url": "file:///etc/passwd"}, "weights_url"),
    ({"base_model": "https://example.org/model"}, "base_model"),
    ({"hiden_size": 32}, r"hiden_size.*did you mean \"hidden_size\"\?"),
    ({"num_attention_head": 4}, r"num_attention_head'.*did you mean \"num_attention_heads\"\?"),
    ({"window": 5}, "window.*cannot tell whether it changes what the model computes"),
    ({"x" * 5000: 1}, "does not know the key 'xxx"),
    ({f"unknown{number}": number for number in range(1000)}, "does not know the key 'unknown0'"),
    ({"\x1b[2J": "\ud800"}, "does not know the key"),
    # model type and head
    *(
        ({"model_type": value}, "model_type")
        for value in (MISSING, None, "", "brt", 5, ["bert"], {}, "../bert", "mamba")
    ),
    ({"architectures": ["Evil"]}, "architectures"),
    ({"architectures": ["BertModel", "BertForMaskedLM"]}, "architectures"),
    *(({"architectures": value}, "architectures") for value in ("BertModel", 5, [5], [None], [[]], [{}], {"a": 1})),
    # labels
    *(
        ({"id2label": value}, "id2label")
        for value in ([], "x", {}, {"1": "a"}, {"0": 5}, {"a": "b"}, {"0": "a", "00": "b"})
    ),
    ({"id2label": {"0": "a", "2": "b"}}, "id2label"),
    ({"id2label": {"0": "a"}, "label2id": None}, "classifier.weight .*id2label"),
    ({"label2id": {"no": 1, "yes": 0}}, "label2id"),
    ({"label2id": {"no": "0"}}, "label2id"),
    ({"label2id": 7}, "label2id"),
    *(({"num_labels": value}, "num_labels") for value in (0, -1, 10**9, "2", None)),
    *(({"num_labels": value, "id2label": MISSING}, "num_labels") for value in (0, 4097, 10**6)),
    ({"num_labels": 4096, "id2label": MISSING, "label2id": MISSING}, "classifier.weight .*num_labels"),
    *(({"problem_type": value}, "problem_type") for value in ("x", 1, ["regression"])),
]
DISTILBERT_VALUES: list[tuple[dict[str, Any], str]] = [
    *(({field: value}, field) for field in ("dim", "n_layers") for value in (0, -1, 10**9, "x", None, [], {}, True)),
    *(({"n_heads": value}, "n_heads") for value in (0, -1, 3, 64, "4")),
    *(({"hidden_dim": value}, "hidden_dim") for value in (0, 10**12, None)),
    *(({"activation": value}, "activation") for value in ("nope", None, 1)),
    *(({"dropout": value}, "dropout") for value in (-1, 1.5, "x")),
    *(({"attention_dropout": value}, "attention_dropout") for value in (-1, 1.5, {})),
    *(({"seq_classif_dropout": value}, "seq_classif_dropout") for value in (-1, "x", [])),
    *(({"vocab_size": value}, "vocab_size") for value in (0, 10**9, None)),
    ({"n_layers": 10**6}, "n_layers"),
    ({"n_layers": 900}, "n_layers"),
    ({"hidden_size": 32}, "hidden_size"),
    ({"quantization_config": {}}, "quantization_config"),
]
INVALID = [("bert", *case) for case in BERT_VALUES] + [("distilbert", *case) for case in DISTILBERT_VALUES]


@pytest.mark.usefixtures("no_reads")
@pytest.mark.parametrize(
    ("family", "changes", "message"),
    INVALID,
    ids=[f"{index}-{message[:30]}" for index, (*_, message) in enumerate(INVALID)],
)
def test_invalid_values_are_refused(
    family: str, changes: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    error_text = load_error(changed_folder(folders, tmp_path, family, changes), tmp_path, message)
    assert "config.json" in error_text
    assert error_text.isprintable()


@pytest.mark.usefixtures("no_reads")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "bert", "hidden_size": NaN}', "holds NaN"),
        ('{"model_type": "bert", "hidden_size": 1e999}', "holds 1e999"),
        ('{"model_type": "bert", "hidden_size": 32, "hidden_size": 64}', "gives the key 'hidden_size' twice"),
        ('{"model_type": "bert", "a": {"b": 1, "b": 2}}', "gives the key 'b' twice"),
        ('{"model_type": "bert", "hidden_size": 1' + "0" * 5000 + "}", "not valid JSON"),
        ('{"model_type": "bert", "a": ' + "[" * 200_000 + "]" * 200_000 + "}", "not valid JSON"),
        ("{}", "model_type is None"),
        ("", "not valid JSON"),
    ],
)
def test_invalid_json_is_refused(text: str, message: str, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match=message):
        heedful.load(changed_folder(folders, tmp_path, "bert", text))


WORDS = "bert.embeddings.word_embeddings.weight"
PLAUSIBLE: list[tuple[str, dict[str, Any], str, str]] = [
    ("masked", {"hidden_size": 64}, r"\[99, 64\] .see hidden_size.", WORDS),
    ("masked", {"hidden_size": 28}, r"see hidden_size", WORDS),
    ("masked", {"hidden_size": 48}, r"\[99, 48\] .see hidden_size", WORDS),
    ("masked", {"vocab_size": 100}, r"\[100, 32\] .see vocab_size.", WORDS),
    ("masked", {"vocab_size": 98}, r"\[98, 32\] .see vocab_size.", WORDS),
    ("masked", {"intermediate_size": 64}, r"\[64, 32\] .see intermediate_size.", "intermediate.dense.weight"),
    ("masked", {"max_position_embeddings": 39}, r"\[39, 32\] .see max_position_embeddings.", "position_embeddings"),
    ("masked", {"type_vocab_size": 3}, r"\[3, 32\] .see type_vocab_size.", "token_type_embeddings"),
    (
        "masked",
        {"num_hidden_layers": 1},
        r"1 layers .see num_hidden_layers.*weights have 2",
        "not expected: bert.encoder.layer.1",
    ),
    (
        "masked",
        {"num_hidden_layers": 3},
        r"3 layers .see num_hidden_layers.*weights have 2",
        "missing: bert.encoder.layer.2",
    ),
    ("masked", {"tie_word_embeddings": False}, r"missing: cls\.predictions\.decoder", "cls.predictions.decoder.weight"),
    ("masked", {"architectures": ["BertForTokenClassification"]}, "missing", "classifier.weight"),
    ("masked", {"model_type": "distilbert"}, "architectures is", "DistilBertModel"),
    ("bert", {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": MISSING}, "see .*id2label", "classifier.weight"),
    ("distilbert", {"dim": 64}, r"\[99, 64\] .see dim.", "distilbert.embeddings.word_embeddings.weight"),
    ("distilbert", {"n_layers": 3}, r"3 layers .see n_layers.", "distilbert.transformer.layer.2"),
    ("distilbert", {"n_layers": 1}, r"1 layers .see n_layers.", "distilbert.transformer.layer.1"),
    ("distilbert", {"vocab_size": 98}, "see vocab_size", "distilbert.embeddings.word_embeddings.weight"),
    ("distilbert", {"hidden_dim": 64}, "see hidden_dim", "ffn.lin1.weight"),
]


@pytest.mark.usefixtures("no_reads")
@pytest.mark.parametrize(("family", "changes", "message", "tensor"), PLAUSIBLE)
def test_plausible_values_of_another_model(
    family: str, changes: dict[str, Any], message: str, tensor: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    assert tensor in load_error(changed_folder(folders, tmp_path, family, changes), tmp_path, message)


@pytest.mark.parametrize(
    "changes",
    [
        {"_name_or_path": "https://example.org/model"},
        {"_name_or_path": "file:///etc/passwd"},
        {"auto_map": {}, "quantization_config": None, "is_decoder": False, "position_embedding_type": "absolute"},
        {"transformers_version": "99.0", "torch_dtype": "float8", "dtype": "int4"},
    ],
)
def test_harmless_values_are_accepted_and_not_used(
    changes: dict[str, Any], folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "socket", lambda *arguments, **keywords: pytest.fail("no connection is needed"))
    modules = set(sys.modules)
    heedful.load(changed_folder(folders, tmp_path, "bert", changes))
    assert set(sys.modules) == modules
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "code", [{"AutoModel": "evil.Model"}, {"AutoModel": "owner/name--https://example.org/evil.py"}]
)
def test_code_of_a_known_model_type_is_not_run_and_warned_of(
    code: dict[str, Any], folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "socket", lambda *arguments, **keywords: pytest.fail("no connection is needed"))
    modules = set(sys.modules)
    folder = changed_folder(folders, tmp_path, "bert", {"auto_map": code})
    with pytest.warns(HeedfulWarning, match=r"names code \(.*evil.* in auto_map\), which is not run: .* as bert"):
        loaded = heedful.load(folder)
    assert set(sys.modules) == modules and not (tmp_path / "canary").exists()
    assert loaded.weights_digest() == heedful.load(folders["bert"]).weights_digest()
    heedful.save(loaded, tmp_path / "saved")
    assert "auto_map" not in json.loads((tmp_path / "saved/config.json").read_text())


def test_an_unknown_key_can_be_ignored_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed_folder(folders, tmp_path, "bert", {"window": 5, "rope": {}})
    with pytest.raises(HeedfulError, match=r"pass ignore=\('window', 'rope',\)"):
        heedful.load(folder)
    loaded = heedful.load(folder, ignore=("window", "rope", "hidden_size"))
    heedful.save(loaded, tmp_path / "saved")
    reloaded = heedful.load(tmp_path / "saved")
    assert reloaded.config == loaded.config
    written_keys = json.loads((folder / "config.json").read_text()).keys()
    assert reloaded.config.hf_config.keys() == written_keys - {"window", "rope"}


HEEDFUL_VALUES: list[tuple[str, Any]] = [
    ("width", 10**12),
    ("width", -1),
    ("layers", 10**6),
    ("heads", 0),
    ("heads", -2),
    ("head_width", 0),
    ("head_width", 10**18),
    ("inner_width", 2**62),
    ("dropout", "x"),
    ("activation", "nope"),
    ("norm_eps", None),
    ("unknown", 1),
]


@pytest.mark.usefixtures("no_reads")
@pytest.mark.parametrize(("field", "value"), HEEDFUL_VALUES)
def test_invalid_values_of_the_family_heedful_are_refused(field: str, value: Any, tmp_path: Path) -> None:
    from heedful.checkpoint import create, read_config
    from heedful.families.heedful import write
    from heedful.model.vaswani import VaswaniSize, vaswani_config

    shape = VaswaniSize(layers=6, width=8, heads=2, inner=16, dropout=0.1)
    values = {"model_type": "heedful", **write(vaswani_config(shape, 37_000))}
    heedful.save(create(read_config(values, "test")), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["model"]["encoder"][field] = value
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeedfulError, match=r"config\.json"):
        heedful.load(tmp_path / "model")
