"""Token pruning in engines: saved and loaded with the model, equal with all kernels, rejected where unsupported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heedful.checkpoint import BundleConfig, ModelBundle, create, load, save
from heedful.csrc import kernels
from heedful.errors import ModelError
from heedful.infer.batch.file_prediction import fingerprint
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.cuda_graphs import CudaGraphs
from heedful.infer.engine import Engine
from heedful.infer.export.onnx_export import export
from heedful.infer.tuning.execution_plan import ExecutionPlan, apply_plan
from heedful.look.inspection import Inspection
from heedful.model.config import Classes, EmbeddingConfig, Learned, ModelConfig, StackConfig
from heedful.model.stack import Transformer
from heedful.model.token_pruning import TokenPruning
from heedful.packed import Packed
from heedful.page.html import export_page
from tests.support.model_folders import long_text, make_model_dir

PRUNING = TokenPruning(layer=1, keep_rate=0.5)
TEXTS = [long_text(words) for words in (2, 30, 35, 20, 100, 33)]  # one text has several windows


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a model without and with token pruning."""
    path = tmp_path_factory.mktemp("models")
    bundle = load(make_model_dir(path / "unpruned", "single"))
    bundle.prune_tokens(PRUNING)
    save(bundle, path / "pruned")
    return path / "unpruned", path / "pruned"


def label_probabilities(engine: BundleEngine, texts: list[str]) -> Any:
    return [list(answer["probabilities"].values()) for answer in engine(texts)]


def test_pruning_is_saved_and_loaded_with_the_model(folders: tuple[Path, Path], tmp_path: Path) -> None:
    unpruned, pruned = (Engine(folder) for folder in folders)
    assert json.loads((folders[1] / "heedful.json").read_text())["token_pruning"] == {"layer": 1, "keep_rate": 0.5}
    assert pruned.loaded.token_pruning == PRUNING
    unpruned_answers, pruned_answers = label_probabilities(unpruned, TEXTS), label_probabilities(pruned, TEXTS)
    for number, text in enumerate(TEXTS):
        assert (unpruned_answers[number] == pytest.approx(pruned_answers[number], abs=1e-6)) == (len(text.split()) < 10)
    save(load(folders[1]), tmp_path / "copy")
    assert label_probabilities(Engine(tmp_path / "copy"), TEXTS) == pruned_answers
    assert "tokens after layer 1: 50 % of those of a text" in pruned.explain()
    assert "tokens after layer" not in unpruned.explain()
    assert fingerprint(unpruned) != fingerprint(pruned)
    pruned.loaded.prune_tokens(None)
    assert label_probabilities(pruned, TEXTS) == unpruned_answers
    assert fingerprint(unpruned) == fingerprint(pruned)


def test_answers_do_not_depend_on_the_batch(folders: tuple[Path, Path]) -> None:
    engine = Engine(folders[1])
    expected = [label_probabilities(engine, [text])[0] for text in TEXTS]
    for number, answer in enumerate(label_probabilities(engine, TEXTS)):
        assert answer == pytest.approx(expected[number], abs=1e-5)
    small_batch_answers = label_probabilities(Engine(folders[1], token_budget=64), TEXTS)
    for number, answer in enumerate(small_batch_answers):
        assert answer == pytest.approx(expected[number], abs=1e-5)


def test_engine_and_bundle_prune_the_same_tokens(folders: tuple[Path, Path]) -> None:
    engine = Engine(folders[1])
    (encoded,) = engine.tokenize([TEXTS[1]])
    batch = Packed.of([encoded.chunks[0].encoded.ids], [encoded.chunks[0].encoded.types])
    with torch.inference_mode():
        outputs = load(folders[1]).head_outputs(batch)
    assert isinstance(outputs, torch.Tensor)
    assert label_probabilities(engine, [TEXTS[1]])[0] == pytest.approx(outputs[0].softmax(0).tolist(), abs=1e-5)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("linears", ["plain", "onednn", "native", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_blocks_prune_the_same_tokens(linears: Any, dtype: torch.dtype) -> None:
    library = kernels()
    if library is None or not (library.has_bfloat16 and library.has_int8):
        pytest.skip("this processor does not multiply bfloat16 or bytes")
    embedding = EmbeddingConfig(vocabulary=50, width=64, positions=Learned(count=128), norm="layer")
    encoder = StackConfig(width=64, layers=3, heads=4, head_width=16, inner_width=96)
    config = ModelConfig(embedding=embedding, encoder=encoder)
    bundle = create(BundleConfig(family="heedful", model=config, head=Classes(labels=("bad", "good"))), seed=1)
    bundle = bundle.to(dtype).eval()
    bundle.prune_tokens(PRUNING)
    generator = torch.Generator().manual_seed(0)
    batch = Packed.of([torch.randint(1, 50, (length,), generator=generator).tolist() for length in (100, 3, 64, 40)])
    apply_plan(bundle, ExecutionPlan(precision="float32", linears=linears, attention="native"))
    assert bundle.token_pruning == PRUNING
    pruned = logits(bundle, batch)
    if linears in ("native", "int8"):
        assert bundle.model.execution.fused_block is not None
        bundle.model.execution = replace(bundle.model.execution, fused_block=None)
        assert torch.equal(logits(bundle, batch), pruned)
    bundle.prune_tokens(TokenPruning(layer=1, keep_rate=1.0))
    all_kept = logits(bundle, batch)
    bundle.prune_tokens(None)
    unpruned = logits(bundle, batch)
    assert torch.equal(all_kept, unpruned) and not torch.equal(pruned, unpruned)


def logits(bundle: ModelBundle, batch: Packed) -> torch.Tensor:
    with torch.inference_mode():
        outputs = bundle.head_outputs(batch)
    assert isinstance(outputs, torch.Tensor)
    return outputs


def test_a_model_loaded_with_a_head_for_tokens_does_not_prune(folders: tuple[Path, Path]) -> None:
    assert load(folders[1], head="token_classification").token_pruning is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"layer": 0, "keep_rate": 0.5}, "token_pruning: layer is 0; expected the number of lower layers"),
        ({"layer": 1, "keep_rate": 2}, "token_pruning: keep_rate is 2.0; expected a share"),
        ({"layer": 5, "keep_rate": 0.5}, "layer is 5, of 2 layers: give 1 to 1"),
        ({"layer": 1.5, "keep_rate": 0.5}, "token_pruning is .*; expected an object like"),
        ({"layer": True, "keep_rate": 0.5}, "token_pruning is .*; expected an object like"),
        ({"layer": 1}, "token_pruning is .*; expected an object like"),
        ({"layer": 1, "keep_rate": 0.5, "share": 1}, "token_pruning is .*; expected an object like"),
        ("half", "token_pruning is 'half'; expected an object like"),
    ],
    ids=str,
)
def test_damaged_notes_are_rejected(folders: tuple[Path, Path], tmp_path: Path, value: Any, message: str) -> None:
    save(load(folders[1]), tmp_path / "model")
    notes = json.loads((tmp_path / "model" / "heedful.json").read_text())
    (tmp_path / "model" / "heedful.json").write_text(json.dumps(notes | {"token_pruning": value}))
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "model")


def test_features_that_need_all_tokens_reject_a_pruned_model(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned = load(folders[1])
    with pytest.raises(ModelError, match="prunes tokens, and cannot be exported: give the run from which it was made"):
        export(pruned, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="prunes tokens, and cannot be exported"):
        export_page(pruned, tmp_path / "page.html")
    assert isinstance(pruned.model, Transformer)
    monkeypatch.setattr(CudaGraphs, "device", torch.device("cuda"))
    assert "token pruning" in CudaGraphs(pruned.model).cannot(Packed.of([[5, 6]]))
    with pytest.raises(ModelError, match="this model prunes tokens"):
        Inspection(pruned, "the cat sat on the mat")
