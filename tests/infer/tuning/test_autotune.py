"""Execution plans: a model computes the same with every plan, and measurements are cached."""

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
from tests.support.model_folders import make_model_dir
from tests.support.tiny_models import our_hidden_states, random_batch, save_tiny

ONEDNN = not cannot_use_onednn(torch.float32)


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Allow measurements; return the folder in which they are cached."""
    monkeypatch.delenv("HEEDFUL_AUTOTUNE")
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier."""
    return make_model_dir(tmp_path_factory.mktemp("ready"), "single")


def set_plan(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Make this plan the fastest plan of every model."""
    monkeypatch.setattr(module, "fastest_plan", lambda bundle, precision: ExecutionPlan(precision=precision, **fields))


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
def test_every_plan_computes_the_same_hidden_states(
    family: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, family, architecture)
    plain, changed = load(tmp_path), load(tmp_path)
    batch = random_batch(family)
    with torch.inference_mode():
        expected = our_hidden_states(plain, batch)
        for attention in ("bmm", "fused"):
            set_plan(monkeypatch, linears="onednn", attention=attention)
            autotune(changed, "float32")
            scale = expected.abs().max()
            assert (our_hidden_states(changed, batch) - expected).abs().max() < 1e-5 * scale
    blocks = [stack.blocks for stack in (changed.model.encoder, changed.model.decoder) if stack is not None]
    layers = [module for block in blocks for module in block.modules()]
    assert any(isinstance(layer, OneDnnLinear) for layer in layers)
    assert not any(type(layer) is torch.nn.Linear for layer in layers)
    expected_tensors, tensors = plain.named_tensors(), changed.named_tensors()
    assert tensors.keys() == expected_tensors.keys()
    assert all(torch.equal(tensor, expected_tensors[name]) for name, tensor in tensors.items())


@pytest.mark.skipif(not ONEDNN, reason=cannot_use_onednn(torch.float32))
@pytest.mark.parametrize(
    ("family", "architecture"), [("t5", "T5ForConditionalGeneration"), ("gpt2", "GPT2LMHeadModel")]
)
def test_models_with_onednn_layers_generate_the_same_texts(
    family: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, family, architecture)
    plain, changed = load(tmp_path), load(tmp_path)
    set_plan(monkeypatch, linears="onednn", attention="bmm")
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
def test_a_model_with_a_plan_can_be_saved_copied_and_pickled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Engine(folder)(["the cat sat"])
    set_plan(monkeypatch, linears="onednn", attention="bmm")
    engine = Engine(folder)
    save(engine.loaded, tmp_path / "saved")
    tensors = load(tmp_path / "saved").named_tensors()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load(folder).named_tensors().items())
    for copied in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine)), Engine(tmp_path / "saved")):
        assert any(isinstance(module, OneDnnLinear) for module in copied.loaded.modules())
        assert copied(["the cat sat"])[0]["probabilities"] == pytest.approx(expected[0]["probabilities"], abs=1e-5)
    int8_engine = Engine(load(folder))
    set_plan(monkeypatch, linears="int8")
    autotune(int8_engine.loaded, "int8")
    with pytest.raises(HeedfulError, match="computes in int8, its weights are rounded: load it again"):
        save(int8_engine.loaded, tmp_path / "rejected")
    assert not (tmp_path / "rejected").exists()
    assert copy.deepcopy(int8_engine)(["the cat sat"]) == int8_engine(["the cat sat"])


def test_plans_change_neither_answers_nor_fingerprints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Engine(folder)
    set_plan(monkeypatch, linears="onednn" if ONEDNN else "plain", attention="bmm", why=("because",))
    engine = Engine(folder)
    for answer, plain_answer in zip(engine(["the cat sat", ""]), plain(["the cat sat", ""]), strict=True):
        assert answer["probabilities"] == pytest.approx(plain_answer["probabilities"], abs=1e-5)
    assert fingerprint(engine) == fingerprint(plain)
    assert engine.parameters == plain.parameters == plain.loaded.count()
    assert engine.explain().startswith("answers in float32\nbecause\nattention of ")
    assert "bmm            taken" in engine.explain() and "fused          taken" in plain.explain()


@pytest.mark.parametrize(
    ("precision", "linear_kernels"), [("bfloat16", ("plain", "onednn")), ("int8", ("int8", "int8"))]
)
def test_fingerprints_do_not_depend_on_the_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch, precision: Any, linear_kernels: tuple[str, str]
) -> None:
    """Plans with C++ kernels hold norms in float32, whatever the activation dtype."""
    fingerprints = []
    for linears, kernels in zip(linear_kernels, (None, "some"), strict=True):
        monkeypatch.setattr(execution_plan, "usable_kernels", lambda weight, kernels=kernels: kernels)
        set_plan(monkeypatch, linears=linears)
        engine = open_in_precision(folder, precision)
        fingerprints.append(fingerprint(engine))
    norms = [module for module in engine.loaded.model.encoder.modules() if isinstance(module, torch.nn.LayerNorm)]  # type: ignore[union-attr]
    assert any(norm.weight.dtype == torch.float32 for norm in norms) and fingerprints[0] == fingerprints[1]
    set_plan(monkeypatch)
    assert fingerprints[0] != fingerprint(Engine(folder))


def test_a_measurement_is_cached(folder: Path, measuring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Engine(folder).plan
    assert first is not None and first.attention in ("bmm", "fused") and len(first.why) == 2
    assert len(list(measuring.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(module, "_measure_plan", lambda *args: pytest.fail("it was measured again"))
        assert Engine(folder).plan == first
        patch.setattr(tuning_cache, "machine_facts", lambda: {"threads": 9})
        with pytest.raises(pytest.fail.Exception):
            Engine(folder)
    (file,) = measuring.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and measuring.stat().st_mode & 0o777 == 0o700
    for damaged in (b"", b"{", b"[" * 100_000, b'{"facts": {}, "found": {}}', b"\xff"):
        file.write_bytes(damaged)
        new_plan = Engine(folder).plan
        assert new_plan is not None and asdict(new_plan).keys() == asdict(first).keys()
    monkeypatch.setenv("HEEDFUL_CACHE", str(file))  # a file cannot be the cache folder
    assert Engine(folder).plan is not None


DAMAGED: list[Any] = [
    *([], {}, "x", 3, None, float("nan"), {"a": 1}, {"why": None}, {"why": [1]}),
    *({"linears": "none"}, {"attention": "no kernel"}, {"precision": "int4"}, {"more": 1}),
]


@pytest.mark.parametrize("damage", DAMAGED, ids=str)
def test_a_damaged_cache_entry_is_measured_again(
    folder: Path, measuring: Path, damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_measure_plan", lambda *args: expected)
    expected = ExecutionPlan(precision="float32", attention="fused", why=("measured",))
    assert Engine(folder).plan == expected
    (file,) = measuring.iterdir()
    entry = json.loads(file.read_text())
    changes_fields = isinstance(damage, dict) and damage.keys() != {"a"}
    entry["found"] = entry["found"] | damage if changes_fields and damage else damage
    file.write_text(json.dumps(entry))
    expected = ExecutionPlan(precision="float32", attention="fused", why=("measured again",))
    assert Engine(folder).plan == expected
    monkeypatch.setattr(module, "_measure_plan", lambda *args: pytest.fail("it was measured again"))
    assert Engine(folder).plan == expected


def test_a_cache_entry_that_others_may_have_written_is_not_used(
    folder: Path, measuring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [ExecutionPlan(precision="float32", why=(str(number),)) for number in range(3)]
    remaining_plans = iter(plans)
    monkeypatch.setattr(module, "_measure_plan", lambda *args: next(remaining_plans))
    assert Engine(folder).plan == plans[0]
    (file,) = measuring.iterdir()
    file.chmod(0o666)
    assert Engine(folder).plan == plans[1] == Engine(folder).plan  # the second engine reads the new entry
    measuring.chmod(0o777)
    with pytest.warns(HeedfulWarning, match="the measurement is not cached: .* can be written by everybody"):
        assert Engine(folder).plan == plans[2]
    assert file.stat().st_mode & 0o777 == 0o600 and json.loads(file.read_text())["found"]["why"] == ["1"]


def test_measuring_does_not_change_the_random_state(folder: Path, measuring: Path) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    Engine(folder)
    assert torch.equal(torch.get_rng_state(), before)


def test_median_times_run_all_functions_in_turn() -> None:
    calls: list[str] = []
    large, small = torch.randn(2, 300, 300)[0], torch.randn(3, 3)

    def multiply(name: str, matrix: torch.Tensor) -> Any:
        def run() -> None:
            calls.append(name)
            for _ in range(5):
                matrix @ matrix

        return run

    times = median_times({"slow": multiply("slow", large), "quick": multiply("quick", small)}, rounds=3)
    assert times["quick"] < times["slow"] and calls == ["slow", "quick"] * 4


@pytest.mark.parametrize(("family", "architecture"), [("t5", "T5EncoderModel"), ("xlnet", "XLNetModel")])
def test_attention_is_timed_with_a_bias_like_the_models(
    family: str, architecture: str, tmp_path: Path, measuring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[AttentionArgs] = []
    attend_with = module.attend_with
    monkeypatch.setattr(module, "attend_with", lambda q, k, v, args: calls.append(args) or attend_with(q, k, v, args))
    save_tiny(tmp_path, family, architecture)
    bundle = load(tmp_path)
    plan = module.fastest_plan(bundle, "float32")
    if family == "xlnet":  # with a bias for each row, attention is not timed
        assert not calls and plan.attention == ""
        return
    assert calls and all(isinstance(args.bias, RelativeBias) for args in calls)
    stack = bundle.config.model.encoder
    assert stack is not None and calls[0].bias.table.shape[0] == stack.heads  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "architecture", "timed_module"), [("bert", "BertModel", "block"), ("gpt2", "GPT2Model", "layer")]
)
def test_whole_blocks_are_timed_if_they_can_be_fused(
    family: str,
    architecture: str,
    timed_module: str,
    dtype: torch.dtype,
    native: Any,
    tmp_path: Path,
    measuring: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BERT's blocks can be fused; GPT-2's cannot, since they are pre-norm."""
    if dtype == torch.bfloat16 and not native.has_bfloat16:
        pytest.skip("this processor does not multiply bfloat16")
    sizes = (
        {"n_embd": 64, "n_head": 4}
        if family == "gpt2"
        else {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}
    )
    save_tiny(tmp_path, family, architecture, **sizes)
    fused_rows: list[int] = []

    def fake_times(functions: dict[str, Any]) -> dict[str, float]:
        """Run each function once; native linear layers are the fastest."""
        for function in functions.values():
            function()
        return {name: 0.5 if name == "native" else 1.0 for name in functions}

    def block(*args: Any) -> None:
        fused_rows.append(args[3])  # number of rows
        native.block(*args)

    spying_library = replace(native, block=block)
    monkeypatch.setattr(library, "_library_or_reason", lambda: spying_library)
    monkeypatch.setattr(module, "median_times", fake_times)
    plan = module.fastest_plan(load(tmp_path, dtype=dtype), "float32" if dtype == torch.float32 else "bfloat16")
    assert plan.linears == "native" and f"rows of a {timed_module}" in plan.why[-1]
    assert fused_rows == (list(module.LINEAR_ROWS) if timed_module == "block" else [])
