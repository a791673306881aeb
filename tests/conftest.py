"""Set-up of every test: shapes and types are checked, there is no network, and results do not depend on the machine."""

from __future__ import annotations

import gc
import os
import pathlib
import re
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import hypothesis
import jaxtyping
import pytest
import torch

# before anything imports heedful; checks of shapes and types in all signatures would take half of the time of the tests
_CHECKS_ALL = "HEEDFUL_CHECK_ALL" in os.environ  # set by scripts/test --slow
_BETWEEN_LAYERS = [
    f"heedful.{module}" for module in ("packed", "nn.attend", "nn.positions", "model.heads", "objectives.base")
]
_TESTS_OF_LAYERS = ("nn", "model", "objectives", "test_packed.py")
_PACKAGES = (path.stem for path in (pathlib.Path(__file__).parents[1] / "heedful").iterdir())
_ALL = [
    f"heedful.{package}" for package in _PACKAGES if package not in ("__init__", "cli")
]  # typer passes its own contexts to cli
jaxtyping.install_import_hook(_ALL if _CHECKS_ALL else _BETWEEN_LAYERS, "type_checks.check")
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["HEEDFUL_AUTOTUNE"] = "off"  # the fastest plan differs from run to run
os.environ["HEEDFUL_CACHE"] = ""
os.environ["HEEDFUL_KERNELS"] = "off"  # except in tests with the fixture `native`
os.environ["OMP_NUM_THREADS"] = "1"  # so that sums in processes that tests start have the same bits
torch.set_num_threads(1)

collect_ignore = ["conftest.py"]  # has no doctests, and its module name is also that of other folders' conftest.py
_SLOW_VARIANTS = pathlib.Path(__file__).with_name("slow_variants.txt")

hypothesis.settings.register_profile("heedful", deadline=None, derandomize=True, database=None, max_examples=50)
hypothesis.settings.load_profile("heedful")


def pytest_collection() -> None:
    """Turn off garbage collection while tests are imported and collected."""
    gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the parameter sets in slow_variants.txt as slow.

    Raises:
        pytest.UsageError: If all tests are collected and a pattern matches none of them.
    """
    lines = (line.strip() for line in _SLOW_VARIANTS.read_text().splitlines())
    by_id = [(item.nodeid, item) for item in items]
    for line in [line for line in lines if line and not line.startswith("#")]:
        pattern = re.compile("tests/" + re.escape(line).replace(r"\*", ".*"))
        prefix = "tests/" + line.partition("*")[0]
        matched = [item for node_id, item in by_id if node_id.startswith(prefix) and pattern.fullmatch(node_id)]
        for item in matched:
            item.add_marker(pytest.mark.slow)
        if not matched and config.args == config.getini("testpaths"):
            raise pytest.UsageError(f"{_SLOW_VARIANTS.name}: {line} matches no test; correct or remove that line")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check shapes and types in the tests of the layers that declare them, or in all tests if all signatures are."""
    is_checked = _CHECKS_ALL or item.path.relative_to(pathlib.Path(__file__).parent).parts[0] in _TESTS_OF_LAYERS
    jaxtyping.config.update("jaxtyping_disable", not is_checked)


def pytest_collection_finish() -> None:
    """Turn on garbage collection again, and exclude the objects that exist now, which would slow it down."""
    gc.freeze()
    gc.enable()


_LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1", "0.0.0.0", "::", "", None, socket.gethostname()}


class NetworkError(RuntimeError):
    """A test tried to connect to another machine."""


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """Raise NetworkError when a test connects to another machine or looks up its address."""
    connect, connect_ex, getaddrinfo = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def check(host: Any) -> None:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in _LOCAL_HOSTS and not str(name).startswith("127."):
            raise NetworkError(f"tests use no network, and this one tried to reach {name}")

    def guarded(original: Any) -> Any:
        def call(self: socket.socket, address: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6):
                check(address[0])
            return original(self, address)

        return call

    def guarded_getaddrinfo(host: Any, *arguments: Any, **keywords: Any) -> Any:
        check(host)
        return getaddrinfo(host, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded(connect))
        patch.setattr(socket.socket, "connect_ex", guarded(connect_ex))
        patch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_fsync() -> Iterator[None]:
    """Let os.fsync do nothing, since tests need no protection against power cuts, and it takes a quarter of a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _quick_timing() -> Iterator[None]:
    """Let runs measure latency and throughput with few small batches."""
    from heedful.runs import timing
    from heedful.runs.distil import verdict

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "ROUNDS", 2)
        patch.setattr(timing, "BATCH_TOKENS", 256)
        patch.setattr(verdict, "MAX_BATCH_SECONDS", 0.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_run_plots() -> Iterator[None]:
    """Runs draw no plots at their end; they would take more time than the training of a tiny model."""
    from heedful.runs import run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "draw_run_plots", lambda folder: [])
        yield


@pytest.fixture
def run_plots() -> Iterator[None]:
    """Runs of this test draw their plots."""
    from heedful.runs import run
    from heedful.runs.plots.figures import draw_run_plots

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "draw_run_plots", draw_run_plots)
        yield


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """The folder of public data sets that HEEDFUL_DATA names; tests are skipped without it."""
    path = pathlib.Path(os.environ.get("HEEDFUL_DATA", "absent"))
    if not (path / "MANIFEST.json").is_file():
        pytest.skip("data folder not found: set HEEDFUL_DATA")
    return path


@pytest.fixture(scope="session")
def kernels_path() -> pathlib.Path:
    """The library of the C++ kernels, built once for all tests of this user; tests are skipped without a compiler."""
    from heedful import cache
    from heedful.csrc import library
    from heedful.errors import HeedfulWarning

    if kernels_file := os.environ.get("HEEDFUL_TEST_KERNELS"):
        return pathlib.Path(kernels_file)
    if not any(map(shutil.which, library.COMPILERS)):
        pytest.skip("no C++ compiler")
    folder = pathlib.Path(tempfile.gettempdir(), f"heedful-kernels-of-{os.getuid()}")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore", HeedfulWarning)
        patch.setattr(cache, "GIVE_UP_AFTER", 110.0)  # another worker may be building it
        return library.build(folder)


@pytest.fixture
def native(kernels_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Turn on the C++ kernels for a test."""
    from heedful.csrc import library

    loaded = library.load_library(kernels_path)
    monkeypatch.setattr(library, "_library_or_reason", lambda: loaded)
    return loaded
