"""How many processes there may be."""

from __future__ import annotations

import os

import pytest

from heedful.data.corpus.workers import available_cores


def test_cores_are_counted_where_no_process_is_bound_to_some(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_cores() == 6
