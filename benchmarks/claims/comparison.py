"""Check the statements of docs/comparison.md about transformers and sentence-transformers, on tiny models.

    PYTHONPATH=benchmarks python benchmarks/claims/comparison.py [--record]

The script prints each statement, which is the docstring of its check, and the observation; `--record` writes a record.
An AssertionError means that a statement is wrong for the installed versions. Statements about training need accelerate,
which is no dependency: pip install accelerate
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import pickle
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from report import grid, write
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers.utils import logging as hf_logging

ROOT = Path(__file__).parents[2]
FAMILIES = ("bert", "roberta", "distilbert", "albert", "xlnet", "t5", "gpt2", "modernbert")
LAYERS = 2
PARTS = ((5, 6, 7, 8), (9, 10, 11))  # two sequences that are packed into one
Check = Callable[[Path], str]  # checks a statement in a temporary folder and returns the observation


def tiny_bert(folder: Path, model: type[transformers.PreTrainedModel] = transformers.BertModel) -> Path:
    """Write a folder with a small BERT, its tokenizer and random weights."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30,
        max_position_embeddings=32,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=64,
    )
    model(config).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(25))]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def change_of_packing(model: nn.Module, **options: bool) -> float:
    """Return how much packing two sequences by position ids changes the hidden states of either."""
    model.eval()
    packed = torch.tensor([[token for part in PARTS for token in part]])
    positions = torch.tensor([[position for part in PARTS for position in range(len(part))]])
    with torch.no_grad():
        states: Tensor = model(input_ids=packed, position_ids=positions, **options).last_hidden_state[0]
        alone = [model(input_ids=torch.tensor([part])).last_hidden_state[0] for part in PARTS]
    return float((states - torch.cat(alone)).abs().max())


def packing_bert(folder: Path) -> str:
    """BERT mixes sequences that are packed by position ids."""
    changed = change_of_packing(transformers.AutoModel.from_pretrained(tiny_bert(folder)))
    assert changed > 1e-3
    return f"hidden states change by up to {changed:.2g}"


def packing_gpt2(folder: Path) -> str:
    """GPT-2 does not mix sequences that are packed by position ids, where it keeps no cache."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=30, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    changed = change_of_packing(transformers.GPT2Model(config), use_cache=False)
    assert changed < 1e-5
    return f"hidden states change by up to {changed:.2g}"


def attention_weights(folder: Path) -> str:
    """Attention weights come from all layers, and with eager attention only."""
    counts = {}
    for attention in ("eager", "sdpa"):
        model = transformers.AutoModel.from_pretrained(tiny_bert(folder / attention), attn_implementation=attention)
        with torch.no_grad():
            weights = model(input_ids=torch.tensor([PARTS[0]]), output_attentions=True).attentions
        counts[attention] = sum(layer is not None for layer in weights or ())
        assert counts[attention] == 0 or model.config._attn_implementation == "eager"
    assert counts["eager"] == LAYERS
    return f"layers with weights: {counts}"


def unknown_key(folder: Path) -> str:
    """An unknown config key is kept and ignored."""
    path = tiny_bert(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layer": 1}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = transformers.AutoConfig.from_pretrained(folder)
        vectors = SentenceTransformer(str(folder), device="cpu").encode(["w1 w2"])
    assert config.num_hidden_layer == 1 and config.num_hidden_layers == 2 and vectors.shape == (1, 32)
    assert not any("num_hidden_layer" in str(warning.message) for warning in caught)
    return "num_hidden_layer is an attribute, nothing is reported"


def other_tokenizer(folder: Path) -> str:
    """A tokenizer of another model is accepted."""
    tiny_bert(folder / "model", transformers.BertForMaskedLM)
    words = (tiny_bert(folder / "other") / "vocab.txt").read_text().splitlines()
    (folder / "vocab.txt").write_text("\n".join([*words[:5], *reversed(words[5:])]))
    tokenizer = transformers.BertTokenizer(vocab=str(folder / "vocab.txt"))
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder / "model")
    answers = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer)("w1 [MASK]")
    return f"the pipeline answers {answers[0]['token_str']!r} for reversed words"


def pickled_weights(folder: Path) -> str:
    """Pickled weights are read by restricted unpickling."""
    tiny_bert(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    transformers.AutoModel.from_pretrained(folder)

    class Attack:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return (Path.touch, (folder / "ran",))  # type: ignore[return-value]

    torch.save(tensors | {"attack": Attack()}, folder / "pytorch_model.bin")
    try:
        transformers.AutoModel.from_pretrained(folder)
    except (pickle.UnpicklingError, OSError, ValueError) as error:
        refusal = type(error).__name__
    assert not (folder / "ran").exists()
    return f"tensors are read; a call in the file: {refusal}"


def collators(folder: Path) -> str:
    """There are collators for masked tokens, whole words, permutations and causal models, and no others."""
    from transformers.data import data_collator

    names = {name.removeprefix("DataCollator") for name in dir(data_collator) if name.startswith("DataCollatorFor")}
    assert names == {
        "ForLanguageModeling",
        "ForPermutationLanguageModeling",
        "ForMultipleChoice",
        "ForSeq2Seq",
        "ForTokenClassification",
    }
    assert transformers.DataCollatorForLanguageModeling.__dataclass_fields__["whole_word_mask"]
    return ", ".join(sorted(names))


def modelling_files(folder: Path) -> str:
    """The modelling files of eight families are nearly as long as all models, families and mathematics of Heedful."""
    models = Path(transformers.__file__).parent / "models"
    lines = sum(len((models / name / f"modeling_{name}.py").read_text().splitlines()) for name in FAMILIES)
    own = [path for part in ("model", "nn", "families") for path in (ROOT / "heedful" / part).glob("*.py")]
    own_lines = sum(len(path.read_text().splitlines()) for path in (*own, ROOT / "heedful" / "packed.py"))
    assert own_lines < 1.2 * lines
    return f"{lines:,} lines; Heedful's model/, nn/, families/ and packed.py: {own_lines:,}"


class Losses(transformers.TrainerCallback):
    """A callback that records the losses that the Trainer logs."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: object, state: object, control: object, **options: dict[str, float]) -> None:
        """Record a loss."""
        if "loss" in (logs := options.get("logs") or {}):
            self.losses.append(logs["loss"])


class Diverging(nn.Module):
    """A model whose loss is NaN from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        self.calls += 1
        return {"loss": (self.weight * labels.float().mean()).sum() * (math.nan if self.calls > 1 else 1.0)}


def trainer(folder: Path, model: nn.Module, steps: int) -> transformers.Trainer:
    """Return a Trainer on eight samples that saves a checkpoint after each step."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        logging_steps=1,
        save_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    resumable = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"labels": label} for label in range(8)],
    )
    resumable.remove_callback(transformers.PrinterCallback)
    return resumable


def nan_loss(folder: Path) -> str:
    """A loss that is not a number is logged as 0 by default, and the weights are lost."""
    model, seen = Diverging(), Losses()
    run = trainer(folder, model, 3)
    run.add_callback(seen)
    run.train()
    assert not any(map(math.isnan, seen.losses)) and 0.0 in seen.losses and bool(model.weight.isnan().all())
    return f"logged losses {seen.losses}, weights {model.weight.tolist()}"


def damaged_checkpoint(folder: Path) -> str:
    """A damaged newest checkpoint ends a run that resumes, although an older one is whole."""
    trainer(folder, Diverging(), 2).train()
    newest = folder / "checkpoint-2" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-5])
    try:
        trainer(folder, Diverging(), 3).train(resume_from_checkpoint=True)
    except Exception as error:  # any error ends the run
        return f"{type(error).__name__}: {str(error)[:80]}"
    raise AssertionError("the run resumed")


CHECKS: tuple[Check, ...] = (
    packing_bert,
    packing_gpt2,
    attention_weights,
    unknown_key,
    other_tokenizer,
    pickled_weights,
    collators,
    modelling_files,
)
TRAINING: tuple[Check, ...] = (nan_loss, damaged_checkpoint)


def main() -> None:
    """Check all statements, and write the record if it is requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write a record into benchmarks/results")
    arguments = parser.parse_args()
    if arguments.record and not find_spec("accelerate"):
        raise SystemExit("accelerate is missing, so not all statements can be tried: pip install accelerate")
    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.disable(logging.WARNING)
    seen: dict[str, str] = {}
    for check in (*CHECKS, *(TRAINING if find_spec("accelerate") else ())):
        with tempfile.TemporaryDirectory() as folder:
            statement = str(check.__doc__)
            seen[statement] = check(Path(folder))
            print(f"{statement}\n    {seen[statement]}")
    if not find_spec("accelerate"):
        print(f"not tried without accelerate: {' '.join(str(check.__doc__) for check in TRAINING)}")
    if arguments.record:
        about = "What docs/comparison.md says about transformers and sentence-transformers, tried on tiny models."
        versions = ", ".join(f"{name} {version(name)}" for name in ("sentence-transformers", "accelerate"))
        table = grid(["statement", "seen"], [*map(list, seen.items())])
        print(write("claims-peers", f"{about} Beside the versions below: {versions}.", [table], seen))


if __name__ == "__main__":
    main()
