"""Runs that rewrite: with encoder and decoder, or a decoder alone; their folder, their card, the command line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from heedful.checkpoint import load
from heedful.cli import main
from heedful.errors import HeedfulError
from heedful.runs.evaluate import evaluate
from heedful.runs.finetune import finetune
from heedful.tokenizer import TokenizerSettings, train

ROWS = [(f"{who} sees {what} today", f"yesterday {who} saw {what}") for who in ("ada", "ben", "eva", "dan") for what in
        ("a cat", "the dog", "a tree", "birds", "the sea", "him")]  # fmt: skip
SETTINGS = ("train.length.count=3", "train.optimiser.rate=5e-3", "task.most=12")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data.csv, and two tiny models with a tokenizer of the same texts."""
    folder = tmp_path_factory.mktemp("given")
    with (folder / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("source", "target"), *ROWS])
    words = train(
        [text for row in ROWS for text in row], TokenizerSettings(kind="unigram", vocabulary=90, max_length=48)
    )
    ends = {"pad_token_id": words.special.pad, "eos_token_id": words.special.separator}
    sizes: dict[str, Any] = {"vocab_size": words.size, **ends}
    torch.manual_seed(0)
    both = transformers.T5Config(
        **sizes, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=words.special.pad
    )
    alone = transformers.GPT2Config(**sizes, n_positions=48, n_embd=32, n_layer=1, n_head=4, bos_token_id=0)
    for name, model in (
        ("both", transformers.T5ForConditionalGeneration(both)),
        ("alone", transformers.GPT2LMHeadModel(alone)),
        (
            "encoder",
            transformers.BertModel(
                transformers.BertConfig(
                    vocab_size=words.size,
                    hidden_size=32,
                    num_hidden_layers=1,
                    num_attention_heads=4,
                    intermediate_size=48,
                )
            ),
        ),
    ):
        model.save_pretrained(folder / name)
        words.save(folder / name)
    return folder


@pytest.mark.parametrize("name", ["both", "alone"])
def test_a_run(given: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = finetune("rewrite", given / "data.csv", out=tmp_path / "run", model=given / name, assignments=SETTINGS)
    assert done.why == "done" and done.results["main"] == "f1"
    numbers = done.results["splits"]["dev"]["numbers"]
    assert numbers.keys() == {"exact", "f1", "count"} and numbers["count"] > 0
    lines = [json.loads(line) for line in (tmp_path / "run/predictions-dev.jsonl").read_text().splitlines()]
    assert len(lines) == numbers["count"] and {"gold", "said", "right"} <= lines[0].keys()
    assert max(line["answer"]["tokens"] for line in lines) <= 12
    card = (tmp_path / "run/model/README.md").read_text()
    assert ("AutoModelForSeq2SeqLM" in card) == (name == "both") and ("AutoModelForCausalLM" in card) == (
        name == "alone"
    )
    assert "one pass over a text, all tokens at once" in card
    assert load(tmp_path / "run").between == ("" if name == "both" else "\n")
    again = evaluate(tmp_path / "run", given / "data.csv", split="train")
    assert again.numbers["count"] == len(ROWS)

    class_ = transformers.T5ForConditionalGeneration if name == "both" else transformers.GPT2LMHeadModel
    _, report = class_.from_pretrained(tmp_path / "run/model", output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report

    def predict(*more: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main(["predict", str(tmp_path / "run"), "ada sees the cat today", "--most", "5", *more])
        assert not stop.value.code
        return capsys.readouterr().out

    assert len(predict().splitlines()) == 3
    (beams,) = map(json.loads, predict("--beams", "3", "--json").splitlines())
    assert len(beams["others"]) == 2 and beams["tokens"] <= 5
    assert len({predict("--temperature", "2", "--seed", seed) for seed in "123456"}) > 1


def test_what_cannot_run(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HeedfulError, match="no model was given, and to rewrite texts one with a decoder is needed"):
        finetune("rewrite", given / "data.csv", out=tmp_path / "a")
    with pytest.raises(HeedfulError, match="this model has no decoder, so it cannot write: start from one that has"):
        finetune("rewrite", given / "data.csv", out=tmp_path / "b", model=given / "encoder")
    for arguments, told in (
        (["predict", str(given / "both"), "a", "--beams", "2", "--temperature", "1"], "nothing is drawn then"),
        (["predict", str(given / "both"), "a", "--pair", "b"], "--pair is not for this model: its next_token head"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code and told in capsys.readouterr().err
