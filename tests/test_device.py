"""Devices: a missing device is an error with a reason, and each process of a host has a GPU of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import heedful
from heedful.bundled import BUNDLED_ENCODER
from heedful.cli import main
from heedful.device import resolve_device, resolve_dtype, unused_gpu_note
from heedful.errors import HeedfulError
from heedful.infer.engine import Engine
from heedful.runs.run_folder import resolve_precision
from heedful.train.ranks import SINGLE_PROCESS
from heedful.train.settings import TrainSettings


def test_each_process_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert resolve_device("cuda") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert resolve_device("cuda") == torch.device("cuda", 1) and resolve_device("cuda:0") == torch.device("cuda", 0)
    assert taken == [0, 1, 0]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(HeedfulError, match=r"GPU 2, but this host has 2, counted from 0: start at most as many"):
        resolve_device("cuda")
    assert resolve_device("cpu") == torch.device("cpu")


def test_a_missing_device_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    message = r'the device is "cuda", but PyTorch .* sees no GPU'
    for refused in (
        lambda: heedful.load(BUNDLED_ENCODER, device="cuda"),
        lambda: Engine(BUNDLED_ENCODER, device="cuda"),
    ):
        with pytest.raises(HeedfulError, match=message):
            refused()
    with pytest.raises(HeedfulError, match=message):
        resolve_precision(TrainSettings(epochs=1.0, device="cuda"), tmp_path, SINGLE_PROCESS, print)
    with pytest.raises(HeedfulError, match='the device is "tpu2": give cpu, or cuda'):
        resolve_device("tpu2")
    with pytest.raises(SystemExit) as stop:
        main(["predict", BUNDLED_ENCODER, "a [MASK]", "--device", "cuda"])
    assert stop.value.code == 2 and "sees no GPU" in capsys.readouterr().err


def test_the_device_decides_the_default_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    assert resolve_dtype("auto") == torch.float32 and resolve_dtype("auto", torch.device("cuda", 0)) == torch.bfloat16
    assert resolve_precision(TrainSettings(epochs=3.0), Path("none"), SINGLE_PROCESS, print).precision == "float32"


def test_an_unused_gpu_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda.is_available() or not unused_gpu_note(None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (
        "train.device=cuda" in unused_gpu_note(None)
        and "train.device=cuda" in unused_gpu_note("cpu")
        and not unused_gpu_note("cuda")
    )
