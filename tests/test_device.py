"""Devices: a missing device is an error with a reason, each process of a host has its own GPU, default precisions."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import heedful
from heedful.bundled import BUNDLED_ENCODER
from heedful.cli import main
from heedful.device import auto_precision, autocast, gpu_identity, resolve_device, resolve_dtype, tf32_products
from heedful.errors import HeedfulError, HeedfulWarning, SettingError
from heedful.infer.engine import Engine
from heedful.infer.engine_options import GPU_TOKEN_BUDGET, TOKEN_BUDGET, default_token_budget
from heedful.infer.tuning.execution_plan import default_precision, unsupported_reason
from heedful.infer.tuning.precision_gate import choose_precision, early_stage_precision
from heedful.runs.run_folder import resolve_auto
from heedful.train.ranks import SINGLE_PROCESS, Ranks
from heedful.train.settings import TrainSettings
from heedful.train.trainer import Trainer
from tests.support.tiny_runs import make_trainer


def test_each_process_of_a_host_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current_devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current_devices.append)
    assert resolve_device("cuda") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert resolve_device("cuda") == torch.device("cuda", 1) and resolve_device("cuda:0") == torch.device("cuda", 0)
    assert current_devices == [0, 1, 0]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(HeedfulError, match=r"is GPU 2, but PyTorch sees 2 on this host \(0 to 1\): start at most one"):
        resolve_device("cuda")
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("value", ["", "first", "-1"])
def test_a_local_rank_that_is_not_a_number_is_reported(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("auto", "cuda"):
        with pytest.raises(SettingError, match=f'LOCAL_RANK is "{value}"; expected the index of this process'):
            resolve_device(name)


def test_a_missing_device_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    message = r'the device is "cuda", but PyTorch .* sees no GPU'
    for load in (heedful.load, Engine):
        with pytest.raises(HeedfulError, match=message):
            load(BUNDLED_ENCODER, device="cuda")
    with pytest.raises(HeedfulError, match=message):
        resolve_auto(TrainSettings(epochs=1.0, device="cuda"), tmp_path, SINGLE_PROCESS, print)
    with pytest.raises(HeedfulError, match='the device is "tpu2": use auto, cpu, or cuda'):
        resolve_device("tpu2")
    with pytest.raises(HeedfulError, match='the device is "xpu", on which Heedful does not compute: use auto, cpu'):
        resolve_device("xpu")
    with pytest.raises(SystemExit) as stop:
        main(["predict", BUNDLED_ENCODER, "a [MASK]", "--device", "cuda"])
    assert stop.value.code == 2 and "sees no GPU" in capsys.readouterr().err


def test_apples_gpus_are_refused_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    expected = (
        'the device is "{}", and Apple\'s GPUs have no float64, .*: use the device cpu, or cuda on a machine with'
    )
    for refused in (
        lambda: resolve_device("mps"),
        lambda: heedful.load(BUNDLED_ENCODER, device="mps"),
        lambda: Engine(BUNDLED_ENCODER, device="mps"),
        lambda: resolve_auto(TrainSettings(epochs=1.0, device="mps"), tmp_path, SINGLE_PROCESS, print),
    ):
        with pytest.raises(HeedfulError, match=expected.format("mps")):
            refused()
    monkeypatch.setattr(trainer.loaded, "parameters", lambda: iter([SimpleNamespace(device=torch.device("mps", 0))]))
    with pytest.raises(HeedfulError, match=expected.format("mps:0")):
        Engine(trainer.loaded)
    with pytest.raises(HeedfulError, match=expected.format("mps:0")):
        Trainer(trainer.loaded, trainer.objective, trainer.samples, trainer.settings)


def test_the_device_decides_the_default_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert resolve_dtype("auto") == torch.float32 and resolve_dtype("auto", torch.device("cuda", 0)) == torch.bfloat16
    assert resolve_auto(TrainSettings(epochs=3.0), Path("none"), SINGLE_PROCESS, print).precision == "float32"


def test_an_unknown_precision_is_reported() -> None:
    with pytest.raises(SettingError, match='the precision is "fp16": use auto, float32, bfloat16, float16'):
        resolve_dtype("fp16")  # type: ignore[arg-type]


def test_each_gpu_of_a_host_has_its_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {0: (7, 5), 1: (9, 0)}  # by index
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=capabilities[device][0])
    )
    assert [auto_precision(torch.device("cuda", index)) for index in (0, 1)] == ["float16", "bfloat16"]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 0), "float16"), ((7, 5), "float16"), ((6, 1), "float32"), ((8, 0), "bfloat16")],
)
def test_gpus_without_bfloat16_train_in_float16(
    capability: tuple[int, int], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert auto_precision(gpu) == expected
    assert resolve_dtype("auto", gpu) == getattr(torch, expected)
    assert resolve_auto(TrainSettings(epochs=1.0), tmp_path, SINGLE_PROCESS, print).precision == expected
    assert resolve_dtype("float16", gpu) == torch.float16
    with autocast("cpu", resolve_dtype("float16", gpu)):
        assert torch.get_autocast_dtype("cpu") == torch.float16 and torch.is_autocast_enabled("cpu")
    with autocast("cpu", torch.float64):
        assert not torch.is_autocast_enabled("cpu")


def test_auto_is_a_gpu_if_there_is_one_for_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert resolve_device("auto") == torch.device("cuda", 0)
    messages: list[str] = []
    settings = resolve_auto(TrainSettings(epochs=1.0), tmp_path, SINGLE_PROCESS, messages.append)
    assert (settings.device, settings.precision) == ("cuda", "bfloat16")
    assert not messages  # the training loop reports the device, with the size of micro-batches
    monkeypatch.setenv("LOCAL_RANK", "2")  # the third process, to which the launcher shows one GPU
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # the third process of a host with two GPUs
    with pytest.warns(HeedfulWarning, match=r"computes on the CPU: it has LOCAL_RANK=2, and PyTorch sees 2 GPUs"):
        assert resolve_device("auto") == torch.device("cpu")


class ManyRanks(Ranks):
    """Rank 0 of several, whose GPUs are given."""

    gpus: ClassVar[list[str]] = []

    def all_gather_object(self, value: Any) -> list[Any]:
        if isinstance(value, tuple):
            assert value[0] == self.gpus[0]
            return [(gpu, value[1]) for gpu in self.gpus]
        return [value] * len(self.gpus)


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (["host/a", "host/b", "other/a"], ""),
        (["host/a", "host/b", ""], "training on the CPU: there is no GPU for rank 2 alone; start at most one process"),
        (["host/a", "host/b", "host/a"], "training on the CPU: there is no GPU for ranks 0 and 2 alone"),
    ],
)
def test_ranks_train_on_gpus_if_each_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[str], message: str
) -> None:
    monkeypatch.setattr(ManyRanks, "gpus", gpus)
    monkeypatch.setattr("heedful.runs.run_folder.gpu_identity", lambda: gpus[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    ranks, messages = ManyRanks(size=len(gpus)), list[str]()
    device = resolve_auto(TrainSettings(epochs=1.0), tmp_path, ranks, messages.append).device
    assert device == ("cpu" if message else "cuda")
    assert len(messages) == bool(message) and "".join(messages).startswith(message)
    gpu = TrainSettings(epochs=1.0, device="cuda")
    shared = len({*gpus}) < len(gpus)
    with pytest.raises(SettingError, match="ranks 0 and 2 share a GPU") if shared else nullcontext():
        assert resolve_auto(gpu, tmp_path, ranks, print).device == "cuda"


def test_a_gpu_is_known_by_its_host_and_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("heedful.device.socket.gethostname", lambda: "host")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    for count, identity in {2: "host/uuid-1", 1: "host/uuid-0"}.items():
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert gpu_identity() == identity
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert gpu_identity() == ""


def test_a_run_resumes_on_the_device_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings.toml").write_text('train.device = "cpu"\ntrain.precision = "float32"\n')
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_auto(TrainSettings(epochs=1.0), tmp_path, SINGLE_PROCESS, print).device == "cpu"


def test_a_finished_run_needs_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings.toml").write_text('train.device = "cuda"\ntrain.precision = "bfloat16"\n')
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError, match="sees no GPU"):
        resolve_auto(TrainSettings(epochs=1.0), tmp_path, SINGLE_PROCESS, print)
    (tmp_path / "results.json").write_text("{}")
    settings = resolve_auto(TrainSettings(epochs=1.0), tmp_path, SINGLE_PROCESS, print)
    assert (settings.device, settings.precision) == ("cuda", "bfloat16")
    with pytest.raises(SettingError, match="sees no GPU"):
        resolve_auto(TrainSettings(epochs=1.0, device="cuda"), tmp_path, SINGLE_PROCESS, print)


def test_inference_on_a_gpu_uses_the_precision_of_its_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for capability, expected in {(9, 0): "bfloat16", (8, 6): "bfloat16", (7, 5): "float16", (6, 1): "float32"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert default_precision(gpu) == expected and default_precision(torch.device("cpu")) == "float32"
        # the default precision of a device is used without a measurement
        assert choose_precision("no folder", expected, device=gpu) == (expected, ())
        assert early_stage_precision("no folder", expected, gpu) == expected
    model = Engine(BUNDLED_ENCODER).loaded.config.model
    assert "float16 is for GPUs" in unsupported_reason("float16", model, torch.device("cpu"))
    assert not unsupported_reason("float16", model, gpu)
    with pytest.raises(HeedfulError, match="float16 is for GPUs: on cpu use float32, bfloat16 or auto"):
        Engine(BUNDLED_ENCODER, precision="float16", device="cpu")


def test_tf32_ends_with_the_last_context() -> None:
    matmul = torch.backends.cuda.matmul
    default_precision = matmul.fp32_precision
    first, second = tf32_products(), tf32_products()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert matmul.fp32_precision == "tf32"
    second.__exit__(None, None, None)
    assert matmul.fp32_precision == default_precision
    with pytest.raises(ValueError, match="stopped"), tf32_products():
        raise ValueError("stopped")
    assert matmul.fp32_precision == default_precision


def test_the_token_budget_depends_on_the_free_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Engine(BUNDLED_ENCODER).loaded
    assert default_token_budget(bundle) == TOKEN_BUDGET
    parameter = SimpleNamespace(device=torch.device("cuda", 0), element_size=lambda: 2)
    monkeypatch.setattr(bundle, "parameters", lambda: iter([parameter]))
    budgets = []
    for gigabytes in (0.01, 1.0, 80.0):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=gigabytes: (int(free * 2**30), 2**37))
        budgets.append(default_token_budget(bundle))
    assert budgets[0] == TOKEN_BUDGET < budgets[1] <= budgets[2] == GPU_TOKEN_BUDGET
