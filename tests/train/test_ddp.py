"""Sums of gradients over ranks: the buckets, when each is summed, and the precision of the sum."""

from __future__ import annotations

from collections.abc import Iterator
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


class TwoEqualRanks(Ranks):
    """Two ranks with equal gradients, as this one would see them; records the size of each tensor that is summed."""

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


@pytest.mark.parametrize(("reduce_bf16", "tolerance"), [(False, 1e-5), (True, 1e-2)])
def test_the_tied_table_has_its_own_bucket_which_is_summed_last(
    monkeypatch: pytest.MonkeyPatch, reduce_bf16: bool, tolerance: float
) -> None:
    monkeypatch.setattr(ddp, "BUCKET_NUMEL", 3000)
    loaded, objective, samples = TASKS["packed"](0.0)
    events: list[Any] = []
    loaded.named_tensors()[TABLE].register_post_accumulate_grad_hook(lambda _: events.append("table"))
    ranks = TwoEqualRanks(events, torch.bfloat16 if reduce_bf16 else torch.float32)
    replicated = Replicated(loaded, None, ranks, reduce_bf16=reduce_bf16, overlap=True)
    buckets = [bucket.names for bucket in replicated._buckets]
    assert [TABLE] in buckets
    assert [name for names in buckets for name in names] == list(reversed(replicated.parameters))
    batch = objective.batch(samples[:3], [1, 2, 3])
    replicated.backward(objective, batch, precision=torch.float32, weight=1.0, last=True)
    sizes = [sum(replicated.parameters[name].numel() for name in names) for names in buckets]
    assert buckets[-1] == [TABLE] and len(buckets) > 3
    assert events == [*sizes[:-1], "table", sizes[-1]], "other buckets are summed before the table has its gradient"
    gradients = replicated.reduce_gradients()
    replicated.zero_grad()
    single = Replicated(loaded, None, Ranks(), reduce_bf16=False, overlap=True)
    for _ in range(2):
        single.backward(objective, batch, precision=torch.float32, weight=1.0, last=False)
    assert relative_error(gradients, single.reduce_gradients()) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("shard", [1, 2])
def test_gradients_reduced_in_bfloat16_are_close_to_float32(server: ForkServer, tmp_path: Path, shard: int) -> None:
    weights = {}
    for dtype in ("float32", "bfloat16"):
        train: dict[str, Any] = {
            "max_steps": 4,
            "optimizer": LARGE_EPS,
            "grad_reduce_dtype": dtype,
            "data_parallel_shard_degree": shard,
        }
        job = Job(output_dir=str(tmp_path / dtype), kind="updates", task="packed", dropout=0.0, train=train)
        assert server.run(job, 2) == [0, 0]
        weights[dtype] = final_weights(job)
    initial = TASKS["packed"](0.0)[0].named_tensors()
    assert 1e-6 < relative_error(weights["float32"], weights["bfloat16"]) < 0.02
    assert relative_error(weights["float32"], initial) > 0.05
