"""Fine-tuned encoder-decoders of published families generate the same text here and in transformers."""

from __future__ import annotations

import csv
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import heedful
from heedful.cli import main
from tests.support.folder_layouts import Step, save_with_byte_pairs, save_with_sentencepiece
from tests.support.tiny_models import save_tiny
from tests.support.tokenizer_folders import ANGLE_BRACKET_TOKENS
from tests.tokenizer.test_joint_vocabulary import save_files

pytestmark = pytest.mark.usefixtures("quick")

ROWS = [("Ada reads the blue book", "A child reads"), ("Nobody has lost it", "The map"), ("again", "today")] * 4
XLM: dict[str, Any] = {"file": "sentencepiece.bpe.model", "settings": {}, "pad_token_id": 1}


def write_marian(folder: Path) -> None:
    vocabulary = save_files(folder)
    pad = vocabulary["<pad>"]
    token_ids = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0}
    save_tiny(folder, "marian", "MarianMTModel", vocab_size=len(vocabulary), **token_ids)


def mbart_writer(tokenizer_class: str, vocab_size: int, start_token_id: int | None) -> Step:
    """Return a function that writes an mBART model to a folder."""

    def write(folder: Path) -> None:
        config = {"vocab_size": vocab_size, "decoder_start_token_id": start_token_id}
        save_with_sentencepiece("mbart", "MBartForConditionalGeneration", **XLM, **config)(folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))

    return write


write_bart = save_with_byte_pairs(
    "bart", "BartForConditionalGeneration", "BartTokenizer", ANGLE_BRACKET_TOKENS, decoder_start_token_id=2
)
LANGUAGES = ["--src_lang", "en_XX", "--tgt_lang", "ro_RO"]
# function that writes the model to a folder, class of its tokenizer in transformers, options of the command
MODELS: dict[str, tuple[Step, str, list[str]]] = {
    "bart": (write_bart, "AutoTokenizer", []),
    "marian": (write_marian, "MarianTokenizer", []),
    "mbart": (mbart_writer("MBartTokenizer", 91, None), "AutoTokenizer", LANGUAGES),
    "mbart-50": (mbart_writer("MBart50Tokenizer", 118, 2), "AutoTokenizer", LANGUAGES),
}


@pytest.mark.parametrize(
    "name", ["bart", "mbart", *(pytest.param(name, marks=pytest.mark.slow) for name in ("marian", "mbart-50"))]
)
def test_a_fine_tuned_model_writes_here_what_it_writes_in_transformers(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model, tokenizer_class, options = MODELS[name]
    model, data, run = tmp_path / "model", tmp_path / "pairs.csv", tmp_path / "run"
    write_model(model)
    with data.open("w", newline="") as file:
        csv.writer(file).writerows([("source", "target"), *ROWS])

    def run_command(*arguments: object) -> str:
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert not exit_info.value.code, captured.err
        return captured.out

    task = "summarization" if name == "bart" else "translation"
    settings = ["--max-steps", "5", "--batch-size", "12", "--lr", "3e-3", "--max_new_tokens", "12"]
    run_command("finetune", task, data, "--model", model, "-o", run, *settings, *options)
    initial, trained = (
        heedful.load(folder).named_tensors()["decoder.blocks.0.cross.q.weight"] for folder in (model, run)
    )
    assert not torch.equal(initial, trained)
    source, _ = ROWS[0]
    answer = json.loads(run_command("predict", run, source, "--max-new-tokens", "12", "--json"))
    with warnings.catch_warnings(action="ignore"):  # warnings of Marian's tokenizer
        tokenizer = getattr(transformers, tokenizer_class).from_pretrained(run / "model")
    reference = transformers.AutoModelForSeq2SeqLM.from_pretrained(run / "model")
    with torch.no_grad():
        (ids,) = reference.generate(**tokenizer(source, return_tensors="pt"), max_new_tokens=12).tolist()
    start_id = reference.config.decoder_start_token_id
    if name == "mbart":  # begins with the token of the target language
        start_id = tokenizer.convert_tokens_to_ids("ro_RO")
    assert ids[0] == start_id
    assert answer["tokens"] == (11 if answer["complete"] else 12), "without the token that ends the text"
    assert answer["text"].strip() == tokenizer.decode(ids, skip_special_tokens=True).strip()
