"""Models made ready to answer: they compute what they did, and what was measured is kept."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import heedful.infer.tuning.autotune as module
import heedful.infer.tuning.execution_plan as execution_plan
from heedful.checkpoint import load, save
from heedful.csrc import library
from heedful.errors import HeedfulError, HeedfulWarning
from heedful.infer.batch.file_prediction import fingerprint
from heedful.infer.engine import Engine
from heedful.infer.tuning import tuning_cache
from heedful.infer.tuning.autotune import autotune, median_times
from heedful.infer.tuning.execution_plan import ExecutionPlan
from heedful.infer.tuning.precision_gate import open_in_precision
from heedful.model.decode import BeamSearch, Greedy, generate
from heedful.nn.inference_linear import OneDnnLinear, cannot_use_onednn
from heedful.nn.layout import AttentionArgs, RelativeBias
from heedful.packed import Packed
from tests.support.model_folders import make
from tests.support.tiny_models import our_hidden_states, random_batch, save_tiny

ONEDNN = not cannot_use_onednn(torch.float32)


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Measurements are made, and kept in a folder."""
    monkeypatch.delenv("HEEDFUL_AUTOTUNE")
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("ready"), "single")


def taken(monkeypatch: pytest.MonkeyPatch, **way: Any) -> None:
    monkeypatch.setattr(module, "fastest_plan", lambda loaded, precision: ExecutionPlan(precision=precision, **way))


@pytest.mark.skipif(not ONEDNN, reason=cannot_use_onednn(torch.float32))
@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("bert", "BertModel"),
        ("albert", "AlbertModel"),
        ("modernbert", "ModernBertModel"),
        ("xlnet", "XLNetModel"),
        ("t5", "T5Model"),
        ("gpt2", "GPT2Model"),
        ("eurobert", "EuroBertModel"),
        ("qwen3", "Qwen3Model"),
    ],
)
def test_every_way_computes_the_same(
    family: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, family, architecture)
    plain, changed = load(tmp_path), load(tmp_path)
    batch = random_batch(family)
    with torch.inference_mode():
        expected = our_hidden_states(plain, batch)
        for attention in ("bmm", "fused"):
            taken(monkeypatch, linears="onednn", attention=attention)
            autotune(changed, "float32")
            scale = expected.abs().max()
            assert (our_hidden_states(changed, batch) - expected).abs().max() < 1e-5 * scale
    blocks = [stack.blocks for stack in (changed.model.encoder, changed.model.decoder) if stack is not None]
    layers = [module for block in blocks for module in block.modules()]
    assert any(isinstance(layer, OneDnnLinear) for layer in layers) and not any(
        type(layer) is torch.nn.Linear for layer in layers
    )
    known, tensors = plain.named_tensors(), changed.named_tensors()
    assert tensors.keys() == known.keys() and all(torch.equal(tensor, known[name]) for name, tensor in tensors.items())


@pytest.mark.skipif(not ONEDNN, reason=cannot_use_onednn(torch.float32))
@pytest.mark.parametrize(
    ("family", "architecture"), [("t5", "T5ForConditionalGeneration"), ("gpt2", "GPT2LMHeadModel")]
)
def test_laid_out_layers_write_the_same(
    family: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, family, architecture)
    plain, changed = load(tmp_path), load(tmp_path)
    taken(monkeypatch, linears="onednn", attention="bmm")
    autotune(changed, "float32")
    prompts = Packed.of([[5, 6, 7], [8]])
    arguments = {"prompts": prompts} if family == "gpt2" else {"prompts": Packed.of([[0], [0]]), "source": prompts}
    for how in (Greedy(), BeamSearch(num_beams=3)):
        output, expected = (
            generate(model.model, model.head, method=how, max_new_tokens=8, stop=[], **arguments)  # type: ignore[arg-type]
            for model in (changed, plain)
        )
        for actual, expected_output in zip(output, expected, strict=True):
            assert actual[0].tokens == expected_output[0].tokens
            assert actual[0].log_probability == pytest.approx(expected_output[0].log_probability, abs=1e-4)


@pytest.mark.skipif(not ONEDNN, reason=cannot_use_onednn(torch.float32))
def test_a_model_that_answers_is_saved_copied_and_sent(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Engine(folder)(["the cat sat"])
    taken(monkeypatch, linears="onednn", attention="bmm")
    engine = Engine(folder)
    save(engine.loaded, tmp_path / "saved")
    tensors = load(tmp_path / "saved").named_tensors()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load(folder).named_tensors().items())
    for copied in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine)), Engine(tmp_path / "saved")):
        assert any(isinstance(module, OneDnnLinear) for module in copied.loaded.modules())
        assert copied(["the cat sat"])[0]["probabilities"] == pytest.approx(expected[0]["probabilities"], abs=1e-5)
    rounded = Engine(load(folder))
    taken(monkeypatch, linears="int8")
    autotune(rounded.loaded, "int8")
    with pytest.raises(HeedfulError, match="computes in int8, its weights are rounded: load it again"):
        save(rounded.loaded, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    assert copy.deepcopy(rounded)(["the cat sat"]) == rounded(["the cat sat"])


def test_answers_and_fingerprints_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Engine(folder)
    taken(monkeypatch, linears="onednn" if ONEDNN else "plain", attention="bmm", why=("because",))
    engine = Engine(folder)
    for answer, usual_answer in zip(engine(["the cat sat", ""]), usual(["the cat sat", ""]), strict=True):
        assert answer["probabilities"] == pytest.approx(usual_answer["probabilities"], abs=1e-5)
    assert fingerprint(engine) == fingerprint(usual)
    assert engine.parameters == usual.parameters == usual.loaded.count()
    assert engine.explain().startswith("answers in float32\nbecause\nattention of ")
    assert "bmm            taken" in engine.explain() and "fused          taken" in usual.explain()


@pytest.mark.parametrize(("precision", "ways"), [("bfloat16", ("plain", "onednn")), ("int8", ("int8", "int8"))])
def test_fingerprints_are_of_what_was_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, precision: Any, ways: tuple[str, str]
) -> None:
    """Where kernels can be used, some ways hold norms in float32."""
    measured = []
    for linears, kernels in zip(ways, (None, "some"), strict=True):
        monkeypatch.setattr(execution_plan, "usable_kernels", lambda weight, kernels=kernels: kernels)
        taken(monkeypatch, linears=linears)
        engine = open_in_precision(folder, precision)
        measured.append(fingerprint(engine))
    norms = [module for module in engine.loaded.model.encoder.modules() if isinstance(module, torch.nn.LayerNorm)]  # type: ignore[union-attr]
    assert any(norm.weight.dtype == torch.float32 for norm in norms) and measured[0] == measured[1]
    taken(monkeypatch)
    assert measured[0] != fingerprint(Engine(folder))


def test_a_measurement_is_kept(folder: Path, measuring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Engine(folder).plan
    assert first is not None and first.attention in ("bmm", "fused") and len(first.why) == 2
    assert len(list(measuring.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(module, "_measure_plan", lambda *arguments: pytest.fail("it was measured again"))
        assert Engine(folder).plan == first
        patch.setattr(tuning_cache, "machine_facts", lambda: {"threads": 9})
        with pytest.raises(pytest.fail.Exception):
            Engine(folder)
    (file,) = measuring.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and measuring.stat().st_mode & 0o777 == 0o700
    for bad in (b"", b"{", b"[" * 100_000, b'{"facts": {}, "found": {}}', b"\xff"):
        file.write_bytes(bad)
        again = Engine(folder).plan
        assert again is not None and asdict(again).keys() == asdict(first).keys()
    monkeypatch.setenv("HEEDFUL_CACHE", str(file))  # no folder can be made there
    assert Engine(folder).plan is not None


DAMAGED: list[Any] = [
    *([], {}, "x", 3, None, float("nan"), {"a": 1}, {"why": None}, {"why": [1]}),
    *({"linears": "none"}, {"attention": "no kernel"}, {"precision": "int4"}, {"more": 1}),
]


@pytest.mark.parametrize("damage", DAMAGED, ids=str)
def test_a_damaged_measurement_counts_as_none(
    folder: Path, measuring: Path, damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_measure_plan", lambda *arguments: expected)
    expected = ExecutionPlan(precision="float32", attention="fused", why=("measured",))
    assert Engine(folder).plan == expected
    (file,) = measuring.iterdir()
    held = json.loads(file.read_text())
    changes = isinstance(damage, dict) and damage.keys() != {"a"}
    held["found"] = held["found"] | damage if changes and damage else damage
    file.write_text(json.dumps(held))
    expected = ExecutionPlan(precision="float32", attention="fused", why=("measured again",))
    assert Engine(folder).plan == expected
    monkeypatch.setattr(module, "_measure_plan", lambda *arguments: pytest.fail("it was measured again"))
    assert Engine(folder).plan == expected


def test_a_measurement_that_others_may_have_written_is_not_believed(
    folder: Path, measuring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = [ExecutionPlan(precision="float32", why=(str(number),)) for number in range(3)]
    left = iter(ways)
    monkeypatch.setattr(module, "_measure_plan", lambda *arguments: next(left))
    assert Engine(folder).plan == ways[0]
    (file,) = measuring.iterdir()
    file.chmod(0o666)
    assert Engine(folder).plan == ways[1] == Engine(folder).plan  # it was written anew
    measuring.chmod(0o777)
    with pytest.warns(HeedfulWarning, match="the measurement is not kept: .* can be written by everybody"):
        assert Engine(folder).plan == ways[2]
    assert file.stat().st_mode & 0o777 == 0o600 and json.loads(file.read_text())["found"]["why"] == ["1"]


def test_nothing_random_is_drawn(folder: Path, measuring: Path) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    Engine(folder)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_faster_one_has_the_smaller_time() -> None:
    calls: list[str] = []
    long, short = torch.randn(2, 300, 300)[0], torch.randn(3, 3)

    def run(name: str, matrix: torch.Tensor) -> Any:
        def turn() -> None:
            calls.append(name)
            for _ in range(5):
                matrix @ matrix

        return turn

    times = median_times({"slow": run("slow", long), "quick": run("quick", short)}, rounds=3)
    assert times["quick"] < times["slow"] and calls == ["slow", "quick"] * 4


@pytest.mark.parametrize(("family", "architecture"), [("t5", "T5EncoderModel"), ("xlnet", "XLNetModel")])
def test_attention_is_measured_with_the_bias_of_the_model(
    family: str, architecture: str, tmp_path: Path, measuring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[AttentionArgs] = []
    usual = module.attend_with
    monkeypatch.setattr(module, "attend_with", lambda q, k, v, call: calls.append(call) or usual(q, k, v, call))
    save_tiny(tmp_path, family, architecture)
    loaded = load(tmp_path)
    way = module.fastest_plan(loaded, "float32")
    if family == "xlnet":  # a bias of each row's own: nothing is measured, and no kernel is named
        assert not calls and way.attention == ""
        return
    assert calls and all(isinstance(call.bias, RelativeBias) for call in calls)
    stack = loaded.config.model.encoder
    assert stack is not None and calls[0].bias.table.shape[0] == stack.heads  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "architecture", "timed"), [("bert", "BertModel", "block"), ("gpt2", "GPT2Model", "layer")]
)
def test_whole_blocks_are_timed_where_native_layers_make_them_one_call(
    family: str,
    architecture: str,
    timed: str,
    dtype: torch.dtype,
    native: Any,
    tmp_path: Path,
    measuring: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BERT's blocks can be one call, GPT-2's, with the norm first, cannot."""
    if dtype == torch.bfloat16 and not native.has_bfloat16:
        pytest.skip("this processor does not multiply bfloat16")
    wide = (
        {"n_embd": 64, "n_head": 4}
        if family == "gpt2"
        else {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}
    )
    save_tiny(tmp_path, family, architecture, **wide)
    fused: list[int] = []

    def times(runs: dict[str, Any]) -> dict[str, float]:
        """Compute each once; for what has linear layers, native ones are the fastest."""
        for run in runs.values():
            run()
        return {name: 0.5 if name == "native" else 1.0 for name in runs}

    def block(*arguments: Any) -> None:
        fused.append(arguments[3])  # number of rows
        native.block(*arguments)

    stand_in = replace(native, block=block)
    monkeypatch.setattr(library, "_library_or_reason", lambda: stand_in)
    monkeypatch.setattr(module, "median_times", times)
    plan = module.fastest_plan(load(tmp_path, dtype=dtype), "float32" if dtype == torch.float32 else "bfloat16")
    assert plan.linears == "native" and f"rows of a {timed}" in plan.why[-1]
    assert fused == (list(module.LINEAR_ROWS) if timed == "block" else [])
