"""Inference on a GPU: the default precision, token budgets, texts by CUDA graphs, and decoding.

scripts/test tests/gpu        # on a machine with a CUDA device
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import heedful
from heedful.device import tf32_products
from heedful.errors import DataError
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.cuda_graphs import CudaGraphs
from heedful.infer.encoded_input import Chunk
from heedful.infer.engine_options import GPU_TOKEN_BUDGET, TOKEN_BUDGET, default_token_budget
from heedful.infer.tuning.execution_plan import ExecutionPlan, apply_plan
from heedful.model import decode
from heedful.model.decode import BeamSearch, Greedy, generate
from heedful.model.recorded_decoding import RecordedSteps
from heedful.packed import Packed
from tests.support.model_folders import make_model_dir
from tests.support.tiny_models import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TEXTS = ["the cat sat on the mat", "a dog", "ada lives in paris and wrote the first program of it", ""]


def probabilities(engine: BundleEngine, texts: Sequence[str] = TEXTS) -> Tensor:
    return torch.tensor([list(answer["probabilities"].values()) for answer in engine(list(texts))])


# -- precision and batches ----------------------------------------------------------------------------------------


def test_an_engine_uses_the_tensor_cores_by_default(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path, "single")
    right = probabilities(heedful.Engine(folder, device="cpu"))
    engine = heedful.Engine(folder)
    expected = "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
    assert engine.precision == expected and next(engine.loaded.parameters()).dtype == getattr(torch, expected)
    assert engine.gpu_line() == f"on {torch.cuda.get_device_name()}, {expected}"
    assert engine.gpu_line() in engine.explain()
    assert (probabilities(engine) - right).abs().max() < 0.1
    explicit_default = heedful.Engine(folder, precision=engine.precision)  # type: ignore[arg-type]
    assert explicit_default.precision_log == (), "what is the default is not measured"
    for options, tolerance in (({"precision": "float32"}, 1e-2), ({"dtype": torch.float32}, 1e-5)):
        explicit = heedful.Engine(folder, device="cuda", **options)  # type: ignore[arg-type]
        assert explicit.precision == "float32"
        assert (probabilities(explicit) - right).abs().max() < tolerance


def test_float32_products_are_tf32_in_an_engine_alone() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))
    right, outside = a.double() @ b.double(), a @ b
    with tf32_products(), tf32_products():
        inside = a @ b
    assert torch.equal(a @ b, outside) and torch.backends.cuda.matmul.fp32_precision == before
    assert (outside - right).abs().max() < 1e-3 < (inside - right).abs().max() < 0.3


def test_a_batch_has_as_many_tokens_as_the_memory_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model_dir(tmp_path, "single")
    engine, batches = heedful.Engine(folder), list[int]()
    assert engine.token_budget == GPU_TOKEN_BUDGET, "a tiny model on a GPU with gigabytes"
    score = BundleEngine.score

    def counted(self: BundleEngine, chunks: Sequence[Chunk], *rest: Any, **more: Any) -> list[object]:
        batches.append(sum(len(chunk.encoded) for chunk in chunks))
        return score(self, chunks, *rest, **more)

    texts = [" ".join(["ada lives in paris"] * (1 + number % 9)) for number in range(1000)]
    small = probabilities(heedful.Engine(folder, token_budget=500), texts)
    monkeypatch.setattr(BundleEngine, "score", counted)
    assert (probabilities(engine, texts) - small).abs().max() < 0.1
    assert TOKEN_BUDGET < max(batches) <= GPU_TOKEN_BUDGET
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 30))
    assert default_token_budget(engine.loaded) == TOKEN_BUDGET


# -- texts by graphs ----------------------------------------------------------------------------------------------

ENCODERS = {"bert": "BertModel", "modernbert": "ModernBertModel", "gpt2": "GPT2Model", "xlnet": "XLNetModel"}
ENCODERS |= {"deberta-v2": "DebertaV2Model"}


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_texts_by_the_graph_of_the_next_size(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The error to float64 is at most twice that of the usual way."""
    save_tiny(tmp_path, family, ENCODERS[family])
    exact = heedful.load(tmp_path, dtype=torch.float64).eval().model
    bundle = heedful.load(tmp_path, dtype=dtype).to("cuda").eval()
    apply_plan(bundle, ExecutionPlan(precision="float32"))
    graphs = CudaGraphs(bundle.model, max_tokens=20)
    graphs.prepare()
    assert sorted(graphs._recorded) == [8, 16, 20]
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for lengths in ((20,), (7,), (12,), (8,), (1,), (3, 14), (1, 1, 1), (10, 10)):
            ids = [torch.randint(5, 60, (length,), generator=generator).tolist() for length in lengths]
            batch = Packed.of(ids)
            assert not graphs.cannot(batch)
            right, recorded = exact(batch), graphs(batch)
            usual = bundle.model(batch.to("cuda"))
            errors = [(rows.cpu().double() - right).abs().max() for rows in (usual, recorded)]
            eps = torch.finfo(dtype).eps * right.abs().max()
            assert recorded.dtype == dtype and errors[1] <= 2 * errors[0] + 4 * eps, (lengths, errors)
            before = recorded.clone()
            graphs(Packed.of([text[::-1] for text in ids]))
            assert torch.equal(recorded, before), "an answer was overwritten by the next one"
        with pytest.raises(DataError, match="token id 1000000 is unknown"):
            graphs(Packed.of([[1_000_000]]))
    assert len(graphs._recorded) == 3


def test_a_server_records_graphs_when_it_loads_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette")
    from heedful.serve.service import load_models

    engine = load_models(str(make_model_dir(tmp_path, "single")))
    graphs = engine._cuda_graphs
    assert graphs is not None and sorted(graphs._recorded) == sorted(graphs.sizes)
    together = probabilities(heedful.Engine(engine.loaded))
    monkeypatch.setattr(CudaGraphs, "_record", lambda *_: pytest.fail("a graph was recorded on the path of a request"))
    alone = torch.cat([probabilities(engine, [text]) for text in TEXTS])
    assert (alone - together).abs().max() < 0.1


def test_attention_of_a_model_on_the_gpu(tmp_path: Path) -> None:
    from heedful.serve.attention import attention_response

    folder = make_model_dir(tmp_path, "single")
    responses = [
        attention_response(heedful.Engine(folder, device=device, precision="float32"), TEXTS[0], [0], None, 10_000)
        for device in ("cpu", "cuda")
    ]
    weights = [torch.tensor(response["layers"][0]["weights"]) for response in responses]
    torch.testing.assert_close(*weights, atol=1e-3, rtol=0)


# -- decoding -----------------------------------------------------------------------------------------------------

DECODERS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_positions": 100}),
    "t5": ("T5ForConditionalGeneration", {}),
    "qwen3": ("Qwen3ForCausalLM", {"max_position_embeddings": 200}),
}
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16], [17, 18]]


def inputs(family: str, count: int = len(PROMPTS)) -> dict[str, Packed]:
    prompts = PROMPTS[:count]
    if family != "t5":
        return {"prompts": Packed.of(prompts)}
    return {"prompts": Packed.of([[0]] * count), "source": Packed.of(prompts)}


def on_gpu(batches: dict[str, Packed]) -> dict[str, Packed]:
    return {name: batch.to("cuda") for name, batch in batches.items()}


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tokens_are_those_of_a_cpu(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, changed = DECODERS[family]
    save_tiny(tmp_path, family, architecture, **changed)
    cpu, gpu = (heedful.load(tmp_path, dtype=dtype).to(device).eval() for device in ("cpu", "cuda"))
    assert cpu.head is not None and gpu.head is not None
    records, record = list[int](), RecordedSteps.record

    def counted(steps: RecordedSteps) -> None:
        records.append(len(steps.tokens))
        record(steps)

    monkeypatch.setattr(RecordedSteps, "record", counted)
    how: dict[str, Any] = {"method": Greedy(), "max_new_tokens": 90}
    for count in (1, len(PROMPTS)):
        batches = inputs(family, count)
        right = generate(cpu.model, cpu.head, stop=[], **how, **batches)
        last = [text[0].tokens[place] for text, place in zip(right, (60, 30, 12, 3), strict=False)]
        for stop in ([], last):
            right = generate(cpu.model, cpu.head, stop=stop, **how, **batches)
            records.clear()
            mine = generate(gpu.model, gpu.head, stop=stop, **how, **on_gpu(batches))
            assert [text[0].tokens for text in mine] == [text[0].tokens for text in right]
            scores = ([text[0].log_probability for text in texts] for texts in (mine, right))
            assert next(scores) == pytest.approx(next(scores), rel=1e-4, abs=1e-4)
            assert stop or records == [count], "a step was recorded once, for all sequences"


@pytest.mark.parametrize("family", DECODERS)
def test_beams_are_those_of_a_cpu(family: str, tmp_path: Path) -> None:
    architecture, changed = DECODERS[family]
    save_tiny(tmp_path, family, architecture, **changed)
    cpu, gpu = (heedful.load(tmp_path, dtype=torch.float64).to(device).eval() for device in ("cpu", "cuda"))
    assert cpu.head is not None and gpu.head is not None
    how: dict[str, Any] = {"method": BeamSearch(num_beams=3), "max_new_tokens": 12, "stop": [20, 21]}
    right = generate(cpu.model, cpu.head, **how, **inputs(family))
    mine = generate(gpu.model, gpu.head, **how, **on_gpu(inputs(family)))
    assert [text[0].tokens for text in mine] == [text[0].tokens for text in right]


@pytest.mark.parametrize("recorded", [False, True])
def test_a_step_reads_the_device_once(recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "gpt2", "GPT2LMHeadModel", n_positions=100)
    bundle = heedful.load(tmp_path).to("cuda").eval()
    assert bundle.head is not None
    monkeypatch.setattr(decode, "worth_recording", lambda device, steps, generated: recorded and generated >= 2)
    decoding = decode.decode(
        bundle.model, bundle.head, inputs("gpt2")["prompts"].to("cuda"), Greedy(), max_new_tokens=20, stop=[]
    )
    for _ in range(5):
        decoding.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            decoding.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    assert len(waits) == 1, waits
