"""Training on a GPU: bits, waits of the host, float16, memory, and the attention kernels that families take.

scripts/test tests/gpu/test_training.py        # on a machine with a CUDA device
"""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.errors import HeedfulWarning, RunError
from heedful.model.attention import Attention, CrossAttention
from heedful.model.config import EmbeddingConfig, Learned, MaskedTokens, ModelConfig, StackConfig
from heedful.nn import attend
from heedful.objectives import Batch, Loss, Objective, Sample
from heedful.objectives.base import pack_samples
from heedful.objectives.masked_lm import MaskedLM
from heedful.runs.distil.run import distil
from heedful.train.async_checkpoint import AsyncCheckpointer
from heedful.train.checkpoint import CheckpointManager
from heedful.train.fit import Reporter
from heedful.train.optim import AdamW, Constant
from heedful.train.ranks import Ranks
from heedful.train.trainer import Trainer, TrainSettings
from tests.support.distillation import NO_BASELINE
from tests.support.generated_data import finetune_tiny, write_splits
from tests.support.tiny_models import decoder_input, random_sequences, save_tiny
from tests.support.tiny_runs import copy_state, copy_weights, make_trainer, records, tensors_equal, tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
# PyTorch reads it once in a process, and this module is imported before the first test runs
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def encoder(**train: Any) -> Trainer:
    """A trainer of an encoder with heads of 64, dropout and long sequences, each of one word alone."""
    words = tokenizer()
    embedding = EmbeddingConfig(
        vocabulary=words.size,
        width=256,
        positions=Learned(count=512),
        types=2,
        padding=words.special.pad,
        norm="layer",
        dropout=0.1,
    )
    stack = StackConfig(
        width=256, layers=3, heads=4, head_width=64, inner_width=512, dropout=0.1, attention_dropout=0.1
    )
    config = ModelConfig(embedding=embedding, encoder=stack)
    loaded = create(BundleConfig(family="heedful", model=config, head=MaskedTokens()), words, seed=1)
    draw, samples = random.Random(0), []
    for _ in range(64):
        length = draw.randrange(20, 500)
        samples.append(Sample.of([[draw.randrange(10, words.size)] * length], [[0] * length]))
    settings = TrainSettings(
        **{
            "max_steps": 25,
            "batch_size": 8,
            "max_tokens_per_microbatch": 1500,
            "optimizer": AdamW(lr=1e-3),
            "schedule": Constant(),
            "device": "cuda",
            "precision": "bfloat16",
        }
        | train
    )
    return Trainer(loaded, MaskedLM(tokenizer=words), samples, settings)


# -- bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_made_ahead_give_the_same_weights(workers: int) -> None:
    outcomes = []
    for prefetches in (False, True):
        training = encoder(max_steps=12, deterministic=True, num_workers=workers if prefetches else 0)
        assert training._prefetches
        training._prefetches = prefetches
        outcomes.append((records(list(training)), copy_weights(training)))
    assert outcomes[0][0] == outcomes[1][0] and tensors_equal(outcomes[0][1], outcomes[1][1])


def test_batches_made_ahead_are_pinned() -> None:
    training = encoder()
    training.train_step()
    assert training._loader is not None and training._loader._pending is not None
    batches = training._loader._pending.result()
    assert batches.micro_batches
    for _, batch in batches.micro_batches:
        assert batch.packed.tokens.is_pinned() and batch.targets.is_pinned() and batch.weight_sum is not None
    training.close()


def test_deterministic_runs_from_one_checkpoint_have_the_same_bits() -> None:
    training = encoder(deterministic=True)
    for _ in range(5):
        training.train_step()
    state = copy_state(training)
    training.close()
    outcomes = []
    for _ in range(2):
        again = encoder(deterministic=True)
        again.load_state(*state)
        outcomes.append((records(list(again)), copy_state(again)[0]))
        assert again.step == 25
    assert outcomes[0][0] == outcomes[1][0] and tensors_equal(outcomes[0][1], outcomes[1][1])
    assert not torch.are_deterministic_algorithms_enabled()


FAMILIES = {"bert": "BertForMaskedLM", "modernbert": "ModernBertForMaskedLM", "gpt2": "GPT2LMHeadModel"}
WITHOUT_BIAS = tuple(FAMILIES)
FAMILIES |= {"t5": "T5ForConditionalGeneration", "xlnet": "XLNetLMHeadModel", "deberta-v2": "DebertaV2ForMaskedLM"}


class Squares(Objective):
    """The sum of squares of hidden states: a loss for the body of any family."""

    def __init__(self, loaded: ModelBundle) -> None:
        self.loaded = loaded

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        packed = pack_samples(samples)
        rows = torch.ones(packed.bounds[-1])
        return Batch(packed=packed, targets=rows, weights=rows, decoder_input=decoder_input(self.loaded, packed))

    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        rows = loaded.hidden_states(batch.packed, batch.decoder_input)
        return Loss(rows.float().square().sum(), batch.total_weight)


def of_family(family: str, folder: Path, dropout: float, **train: Any) -> Trainer:
    """A trainer of a tiny model, with this dropout of attention weights."""
    save_tiny(folder, family, FAMILIES[family])
    loaded = heedful.load(folder)
    for part in loaded.modules():
        if isinstance(part, Attention | CrossAttention):
            part.dropout = dropout
    ids, types = random_sequences(family, (7, 23, 39, 12, 30, 18, 25, 3))
    samples = [Sample.of([row], [row_types]) for row, row_types in zip(ids, types, strict=True)]
    settings: dict[str, Any] = {"max_steps": 6, "batch_size": 4, "device": "cuda", "precision": "bfloat16"}
    return Trainer(loaded, Squares(loaded), samples, TrainSettings(**settings | train))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_deterministic_algorithms(family: str, tmp_path: Path) -> None:
    outcomes = []
    for number in range(2):
        training = of_family(family, tmp_path / str(number), 0.1, deterministic=True)
        outcomes.append((records(list(training)), copy_weights(training)))
    assert outcomes[0][0] == outcomes[1][0] and tensors_equal(outcomes[0][1], outcomes[1][1])


# -- kernels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_kernels_of_families(
    family: str, precision: str, dropout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = of_family(family, tmp_path, dropout, precision=precision)
    choose, names = attend.choose_kernel, set()

    def noted(*args: Any, **more: Any) -> Any:
        kernel = choose(*args, **more)
        names.add(kernel.name)
        return kernel

    monkeypatch.setattr(attend, "choose_kernel", noted)
    training.train_step()
    training.close()
    print(f"{family}, {precision}, dropout {dropout}: {', '.join(sorted(names))}")
    assert names and "reference" not in names
    if family in WITHOUT_BIAS and precision != "float32":
        assert names == {"flash"}


# -- waits --------------------------------------------------------------------------------------------------------


def waits_of_a_step(training: Trainer) -> list[str]:
    """The lines at which a step waits for the GPU."""
    for _ in range(3):
        training.train_step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        training.close()
    return [f"{one.filename}:{one.lineno}" for one in caught if "synchronizing CUDA operation" in str(one.message)]


@pytest.mark.parametrize("tokens", [1500, 10**6])
@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float32"])
def test_a_step_waits_for_the_gpu_at_most_twice(tokens: int, precision: str) -> None:
    """For the losses and for the norm of the gradient, however many micro-batches there are."""
    waits = waits_of_a_step(encoder(max_tokens_per_microbatch=tokens, precision=precision))
    assert len(waits) <= 2, waits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_each_family_waits_at_most_twice(family: str, tmp_path: Path) -> None:
    waits = waits_of_a_step(of_family(family, tmp_path, 0.1))
    assert len(waits) <= 2, waits


def test_a_wait_for_the_gpu_ends_with_its_work_or_at_the_deadline() -> None:
    device, cycles = torch.device("cuda", 0), 2_000_000_000  # about a second
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    begun = time.monotonic()
    with pytest.raises(RunError, match="timed out"):
        Ranks(size=2, timeout=timedelta(seconds=0.2)).wait_for_gpu(device)
    assert time.monotonic() - begun < 0.6
    Ranks(size=2).wait_for_gpu(device)
    assert torch.cuda.current_stream(device).query()


@pytest.mark.parametrize("task", ["classify", "tag", "packed"])
def test_a_step_of_each_task_waits_at_most_twice(task: str) -> None:
    waits = waits_of_a_step(make_trainer(task, device="cuda", precision="bfloat16"))
    assert len(waits) <= 2, waits


# -- float16 ------------------------------------------------------------------------------------------------------


def test_float16_learns_with_a_scaled_loss() -> None:
    losses = {}
    for precision in ("float16", "bfloat16"):
        training = encoder(precision=precision, max_steps=60, max_tokens_per_microbatch=10**6)
        steps = list(training)
        losses[precision] = [step.loss for step in steps]
        assert all(tensor.isfinite().all() for tensor in copy_weights(training).values())
        assert training.overflows == sum(not step.updated for step in steps) <= 15
        assert (steps[-1].loss_scale is not None) == (precision == "float16")
    first, last = (sum(losses["float16"][part]) / 5 for part in (slice(5), slice(-5, None)))
    assert last < 0.8 * first, losses
    assert abs(last - sum(losses["bfloat16"][-5:]) / 5) < 0.3 * first, losses


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.fixture
def little_memory() -> Iterator[None]:
    """250 MB for what is allocated in the test, beside what is cached already."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 250 * 2**20) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_static_student_is_made_and_trained_on_the_gpu(tmp_path: Path) -> None:
    data = write_splits("single", tmp_path / "data")
    finetune_tiny("classify", data, tmp_path / "teacher")
    settings = (*NO_BASELINE, "student.width=8", "train.device=cuda")
    result = distil(tmp_path / "teacher", data, tmp_path / "run", student="static", assignments=settings)
    assert result.status == "completed" and result.results["settings"]["train"]["device"] == "cuda"


def test_micro_batches_shrink_when_memory_runs_out(little_memory: None) -> None:
    training = encoder(max_tokens_per_microbatch=10**6, batch_size=64, max_steps=3, shrink_batch_on_oom=True)
    with pytest.warns(HeedfulWarning, match="memory was not enough for a micro-batch of"):
        steps = list(training)
    assert len(steps) == 3 and all(step.updated for step in steps) and training.max_tokens_per_microbatch < 16_000


def test_micro_batches_follow_free_memory(tmp_path: Path) -> None:
    training = encoder(max_tokens_per_microbatch="auto")
    assert 1000 <= training.max_tokens_per_microbatch <= 65_536
    messages: list[str] = []

    class Listener(Reporter):
        def message(self, text: str) -> None:
            messages.append(text)

    done = finetune_tiny("classify", write_splits("single", tmp_path / "data"), tmp_path / "run", reporter=Listener())
    assert done.status == "completed"
    (line,) = [text for text in messages if text.startswith("training on ")]
    assert torch.cuda.get_device_name(0) in line and "in float32, in micro-batches of up to " in line, line


def test_a_checkpoint_in_the_background_holds_the_values_of_its_step(tmp_path: Path) -> None:
    training = encoder()
    for _ in range(3):
        training.train_step()
    expected = {name: tensor.cpu() for name, tensor in copy_state(training)[0].items()}
    saver = AsyncCheckpointer(CheckpointManager(tmp_path / "state"), training, background=True)
    torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]  # the copies and the next updates wait for it
    copies = saver._copy(training.state()[0])
    assert all(tensor.is_pinned() for name, tensor in copies.items() if name.startswith("model/"))
    saver.save(training.step, *training.state())
    for _ in range(3):
        training.train_step()
    saver.wait()
    saved = CheckpointManager(tmp_path / "state").load()
    training.close()
    assert (
        saved is not None
        and saved.step == 3
        and tensors_equal(saved.tensors, expected)
        and tensors_equal(copies, expected)
    )


def test_a_checkpoint_holds_nothing_of_batches_made_ahead() -> None:
    training, plain = encoder(deterministic=True), encoder(deterministic=True)
    plain._prefetches = False
    for one in (training, plain):
        for _ in range(3):
            one.train_step()
    (tensors, values), (expected, expected_values) = copy_state(training), copy_state(plain)
    training.close()
    assert tensors_equal(tensors, expected)
    assert values | {"seconds": 0} == expected_values | {"seconds": 0}
