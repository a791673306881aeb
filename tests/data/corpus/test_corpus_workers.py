"""available_cores: how many processes a corpus may be built with."""

from __future__ import annotations

import os

import pytest

from heedful.data.corpus.workers import available_cores


def test_available_cores_without_cpu_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_cores() == 6
