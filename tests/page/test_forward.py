"""The forward pass in WebAssembly equals the model's, layer by layer and with each kind of head."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import heedful
from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.errors import HeedfulError
from heedful.model.config import (
    Buckets,
    Classes,
    DenseLayer,
    EmbeddingConfig,
    Head,
    Learned,
    LinearScaling,
    ModelConfig,
    Pooling,
    Rotary,
    SentenceEmbedding,
    Sinusoidal,
    StackConfig,
    TokenClasses,
    Yarn,
)
from heedful.model.trace import Trace
from heedful.packed import Packed
from heedful.page.html import CODE
from heedful.page.serialize import serialize_model
from tests.support.model_folders import make_model_dir
from tests.support.page_scripts import page_rows
from tests.support.tiny_models import random_sequences, randomise, save_tiny

ROOT = Path(__file__).parent.parent.parent
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "int8": 0.1}  # of the largest number
FIELDS = 9  # of BlockTrace
MODELS = [
    ("bert", "BertForSequenceClassification"),
    ("bert", "BertForMaskedLM"),
    ("bert", "BertForMultipleChoice"),
    ("roberta", "RobertaForTokenClassification"),
    ("distilbert", "DistilBertForQuestionAnswering"),
    ("albert", "AlbertForMaskedLM"),
    ("electra", "ElectraForSequenceClassification"),
    ("modernbert", "ModernBertForSequenceClassification"),
    ("modernbert", "ModernBertForMaskedLM"),
    ("mpnet", "MPNetForSequenceClassification"),
    ("nomic_bert", "NomicBertForSequenceClassification"),
    ("gte", "GteForSequenceClassification"),
]
POOLINGS: tuple[Pooling, ...] = ("mean", "first", "max", "mean_sqrt_length", "last")
SIDE = StackConfig(width=24, layers=3, heads=3, head_width=10, inner_width=20)  # no multiples of 4 and 16
EMBEDDING = EmbeddingConfig(vocabulary=50, width=24, types=3, norm="layer")
MIXTURES: dict[str, tuple[EmbeddingConfig, StackConfig, Head]] = {
    "sinusoids, gated, shared blocks": (
        replace(EMBEDDING, positions=Sinusoidal(), scale=3.0),
        replace(SIDE, activation="silu", gated=True, blocks=2),
        Classes(labels=("a", "b"), pooling="last", activation="relu", norm_eps=1e-5),
    ),
    "rotary, windows": (
        replace(EMBEDDING, positions=Learned(count=30, offset=2), norm="rms"),
        replace(
            SIDE,
            activation="tanh",
            relation=Rotary(
                base=50.0,
                local_base=99.0,
                scaling=Yarn(factor=3.0, trained=5, magnitude=1.2, fast=2.0, slow=0.5),
                local_scaling=LinearScaling(factor=2.0),
            ),
            window=2,
            global_layers=(1,),
            attention_bias=False,
        ),
        SentenceEmbedding(pooling=POOLINGS, normalise=True),
    ),
    "shared keys, normed queries": (
        replace(EMBEDDING, types=0, width=7),
        replace(SIDE, relation=Rotary(), kv_heads=1, qk_norm=True, norm="rms", norm_at="pre", final_norm=True),
        SentenceEmbedding(dense=(DenseLayer(width=5), DenseLayer(width=9, activation=None, bias=False))),
    ),
    "buckets": (
        replace(EMBEDDING, types=0, norm=None),
        replace(SIDE, relation=Buckets(count=8, reach=6), activation="gelu_tanh", score_scale=1.0),
        TokenClasses(labels=("a", "b", "c"), dense=True, norm_eps=1e-3),
    ),
}


def mixture(name: str) -> ModelBundle:
    embedding, encoder, head = MIXTURES[name]
    bundle = create(BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=encoder), head=head))
    torch.manual_seed(1)
    with torch.no_grad():
        randomise(bundle)
    return bundle.eval()


def check(folder: Path, bundle: ModelBundle, ids: list[int], types: list[int], precision: str = "float32") -> None:
    """Compare the states of all layers with those of a trace, and the outputs of the head."""
    encoder, trace = bundle.config.model.encoder, Trace(what=["states"])
    assert encoder is not None
    with torch.inference_mode():
        outputs = bundle(Packed.of([ids], [types]), trace=trace)
    references = [trace.states["encoder", layer, 0].numpy() for layer in range(encoder.layers + 1)]
    last = 1 + encoder.layers + int(encoder.final_norm)
    counts = [*range(1, encoder.layers + 1), last, serialize_model(bundle).num_ops]
    *states, scores = page_rows(
        folder, bundle, ids, types, wanted=list(range(len(ids))), op_counts=counts, precision=precision
    )
    for reference, rows in [*zip(references, states, strict=True), (outputs.numpy(), scores)]:
        got = np.array(rows).reshape(reference.shape)
        assert np.abs(got - reference).max() <= TOLERANCE[precision] * max(1.0, np.abs(reference).max())


@pytest.mark.parametrize(("family", "architecture"), MODELS)
def test_equals_the_model(tmp_path: Path, family: str, architecture: str) -> None:
    save_tiny(tmp_path / "model", family, architecture)
    bundle = heedful.load(tmp_path / "model").eval()
    ids, types = random_sequences(family, (23,))
    check(tmp_path, bundle, ids[0], types[0])


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_configurations_that_no_family_has(tmp_path: Path, name: str, precision: str) -> None:
    ids = torch.randint(50, (19,), generator=torch.Generator().manual_seed(0)).tolist()
    bundle = mixture(name)
    check(
        tmp_path, bundle, ids, [number % max(1, bundle.config.model.embedding.types) for number in range(19)], precision
    )


@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_texts_of_few_tokens(tmp_path: Path, count: int) -> None:
    """Products are computed in tiles of four rows."""
    check(tmp_path, mixture("buckets"), list(range(count)), [0] * count)


def test_int8_with_one_scale_for_each_row(tmp_path: Path) -> None:
    bundle = heedful.load(make_model_dir(tmp_path / "model", "single")).eval()
    check(tmp_path, bundle, list(range(20)), [0] * 20, "int8")


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """forward.cpp, compiled for this machine with checks for undefined behaviour."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("g++ is not installed: apt-get install g++")
    library = tmp_path_factory.mktemp("native") / "forward.so"
    flags = ("-std=c++17", "-O1", "-fsanitize=undefined", "-fno-sanitize-recover=all", "-fPIC", "-shared")
    subprocess.run([compiler, *flags, "-o", library, CODE.with_suffix(".cpp")], check=True)
    loaded = ctypes.CDLL(str(library))
    for name in ("reserve_model", "reserve_input", "run", "scores"):
        getattr(loaded, name).restype = ctypes.c_void_p
    return loaded


def assert_near(got: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert np.abs(got - expected).max() <= tolerance * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", MIXTURES)
def test_the_same_source_computes_natively(native: ctypes.CDLL, name: str, precision: str) -> None:
    bundle, count = mixture(name), 19
    model = serialize_model(bundle, precision)
    ids, types = list(range(count)), [number % max(1, bundle.config.model.embedding.types) for number in range(count)]
    place = native.reserve_model(len(model.data))
    ctypes.memmove(place, model.data, len(model.data))
    words = np.array([*ids, *types, *range(count)], np.int32)
    start = native.reserve_input(len(words))
    ctypes.memmove(start, words.ctypes.data, words.nbytes)
    tokens, kinds, wanted = (ctypes.c_void_p(start + 4 * count * part) for part in range(3))
    stack = bundle.config.model.encoder
    assert stack is not None
    embedded = (ctypes.c_void_p * 3)()
    blocks = (ctypes.c_void_p * (FIELDS * stack.layers))()  # of BlockTrace
    gates = (ctypes.c_float * (stack.layers * stack.heads))(*[1.0] * (stack.layers * stack.heads))
    call = ctypes.c_void_p(place), model.ops_offset, tokens, kinds, count, wanted, count, model.num_ops
    result = native.run(*call, gates, embedded, blocks)
    shape = native.rows() * native.columns()
    rows = np.ctypeslib.as_array(ctypes.cast(result, ctypes.POINTER(ctypes.c_float)), (shape,))
    with torch.inference_mode():
        trace = Trace(what=["states", "scores"])
        expected = bundle(Packed.of([ids], [types]), trace=trace).numpy().ravel()
    for layer in range(stack.layers):
        width = count * stack.width
        states = np.ctypeslib.as_array(ctypes.cast(blocks[FIELDS * layer], ctypes.POINTER(ctypes.c_float)), (width,))
        assert_near(states, trace.states["encoder", layer, 0].numpy().ravel(), TOLERANCE[precision])
        for head in range(stack.heads):
            place = native.scores(ctypes.byref(blocks, FIELDS * layer * ctypes.sizeof(ctypes.c_void_p)), head, count)
            scores = np.ctypeslib.as_array(ctypes.cast(place, ctypes.POINTER(ctypes.c_float)), (count, count))
            recorded = trace.attention["encoder", layer, 0].scores
            assert recorded is not None
            seen = np.isfinite(recorded[head].numpy())
            assert (np.isfinite(scores) == seen).all()
            assert_near(scores[seen], recorded[head].numpy()[seen], TOLERANCE[precision])
    assert_near(rows, expected, TOLERANCE[precision])


@pytest.mark.parametrize(
    ("family", "architecture", "message"),
    [
        ("gpt2", "GPT2ForSequenceClassification", "is not an encoder alone"),
        ("t5", "T5ForConditionalGeneration", "is not an encoder alone"),
        ("deberta-v2", "DebertaV2ForSequenceClassification", 'relative positions of the kind "disentangled"'),
        ("xlnet", "XLNetForSequenceClassification", 'relative positions of the kind "transformer_xl"'),
        ("bert", "BertModel", 'has a "pooler" head'),
        ("electra", "ElectraForPreTraining", 'has a "replaced_token_detection" head'),
    ],
)
def test_other_models_are_refused(tmp_path: Path, family: str, architecture: str, message: str) -> None:
    save_tiny(tmp_path / "model", family, architecture)
    with pytest.raises(HeedfulError, match=f"{family}.*{message}: HTML export supports encoders"):
        serialize_model(heedful.load(tmp_path / "model"))


def test_precisions() -> None:
    with pytest.raises(HeedfulError, match="precision is 'int4'; a page has one of auto, float32, float16, int8"):
        serialize_model(mixture("buckets"), "int4")


def test_the_module_is_what_its_source_compiles_to(tmp_path: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    package, _, version = extras["wasm"][0].partition("==")
    if importlib.util.find_spec(package) is None or importlib.metadata.version(package) != version:
        pytest.skip(f"{package}=={version} is not installed: make wasm")
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from wasm import compile_wasm  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    compile_wasm(tmp_path / "forward.wasm")
    assert (tmp_path / "forward.wasm").read_bytes() == CODE.read_bytes(), "run `make wasm`"
