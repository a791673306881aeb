"""How gradients of ranks come together: in which buckets, when, and in which precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heedful.train import ddp
from heedful.train.ddp import Replicated
from heedful.train.ranks import Ranks
from tests.support.processes import ForkServer, Job, final_weights, fork_server
from tests.support.tiny_runs import LARGE_EPS, TASKS, relative_error

TABLE = "embedding.tokens.weight"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """The fork server that starts the processes of ranks."""
    with fork_server("heedful.train.fsdp", "heedful.train.checkpoint_sharded", "torch._dynamo") as running:
        yield running


class Echo(Ranks):
    """Two ranks, of which the other has the same gradients; it notes how large what goes off is."""

    def __init__(self, events: list[Any], dtype: torch.dtype) -> None:
        super().__init__(size=2)
        object.__setattr__(self, "events", events)
        object.__setattr__(self, "dtype", dtype)

    def all_reduce_async(self, flat: Tensor) -> Any:
        self.events.append(flat.numel())  # type: ignore[attr-defined]
        assert flat.dtype == self.dtype  # type: ignore[attr-defined]
        return flat.mul_(2)

    def wait(self, work: Any) -> None:
        pass

    def all_gather_scalars(self, *values: int | float) -> list[list[float]]:
        return [list(values)] * 2


@pytest.mark.parametrize(("partial head", "least"), [(False, 1e-5), (True, 1e-2)])
def test_the_tied_table_goes_off_alone_and_last(monkeypatch: pytest.MonkeyPatch, half: bool, least: float) -> None:
    monkeypatch.setattr(ddp, "BUCKET_NUMEL", 3000)
    loaded, objective, samples = TASKS["packed"](0.0)
    events: list[Any] = []
    loaded.named_tensors()[TABLE].register_post_accumulate_grad_hook(lambda _: events.append("table"))
    made = Replicated(
        loaded, None, Echo(events, torch.bfloat16 if half else torch.float32), reduce_bf16=half, overlap=True
    )
    order = [bucket.names for bucket in made._buckets]
    assert [TABLE] in order and [name for names in order for name in names] == list(reversed(made.parameters))
    batch = objective.batch(samples[:3], [1, 2, 3])
    made.backward(objective, batch, precision=torch.float32, weight=1.0, last=True)
    sizes = [sum(made.parameters[name].numel() for name in names) for names in order]
    assert order[-1] == [TABLE] and len(order) > 3
    assert events == [*sizes[:-1], "table", sizes[-1]], "the others have gone off before"
    found = made.reduce_gradients()
    made.zero_grad()
    other = Replicated(loaded, None, Ranks(), reduce_bf16=False, overlap=True)
    for _ in range(2):
        other.backward(objective, batch, precision=torch.float32, weight=1.0, last=False)
    assert relative_error(found, other.reduce_gradients()) < least


@dataclass
class Both:
    """The same run with sums of two kinds."""

    server: ForkServer
    folder: Path

    def __call__(self, **more: Any) -> list[dict[str, Tensor]]:
        found = []
        for sums in ("float32", "bfloat16"):
            how: dict[str, Any] = {
                "max_steps": 4,
                "optimizer": LARGE_EPS,
                "grad_reduce_dtype": sums,
            } | more
            job = Job(output_dir=str(self.folder / sums), kind="updates", task="packed", dropout=0.0, train=how)
            assert self.server.run(job, 2) == [0, 0]
            found.append(final_weights(job))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("shard", [1, 2])
def test_sums_in_bfloat16(server: ForkServer, tmp_path: Path, shard: int) -> None:
    exact, rough = Both(server, tmp_path)(shard=shard)
    start = TASKS["packed"](0.0)[0].named_tensors()
    assert 1e-6 < relative_error(exact, rough) < 0.02
    assert relative_error(exact, start) > 0.05
