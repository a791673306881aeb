"""Text to text with published encoder-decoders, from the command line: what is trained and written, others read."""

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


def marian(folder: Path) -> None:
    vocabulary = save_files(folder)
    pad = {"pad_token_id": vocabulary["<pad>"], "decoder_start_token_id": vocabulary["<pad>"], "eos_token_id": 0}
    save_tiny(folder, "marian", "MarianMTModel", vocab_size=len(vocabulary), **pad)


def mbart(tokenizer_class: str, vocabulary: int, start: int | None) -> Step:
    def write(folder: Path) -> None:
        sizes = {"vocab_size": vocabulary, "decoder_start_token_id": start}
        save_with_sentencepiece("mbart", "MBartForConditionalGeneration", **XLM, **sizes)(folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))

    return write


bart = save_with_byte_pairs(
    "bart", "BartForConditionalGeneration", "BartTokenizer", ANGLE_BRACKET_TOKENS, decoder_start_token_id=2
)
LANGUAGES = ["--src_lang", "en_XX", "--tgt_lang", "ro_RO"]
MODELS: dict[str, tuple[Step, str, list[str]]] = {  # how it is written, its tokenizer in transformers, options
    "bart": (bart, "AutoTokenizer", []),
    "marian": (marian, "MarianTokenizer", []),
    "mbart": (mbart("MBartTokenizer", 91, None), "AutoTokenizer", LANGUAGES),
    "mbart-50": (mbart("MBart50Tokenizer", 118, 2), "AutoTokenizer", LANGUAGES),
}


@pytest.mark.parametrize(
    "name", ["bart", "mbart", *(pytest.param(n, marks=pytest.mark.slow) for n in ("marian", "mbart-50"))]
)
def test_a_fine_tuned_model_writes_here_what_it_writes_in_transformers(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write, tokenizer_class, options = MODELS[name]
    write(tmp_path / "model")
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("source", "target"), *ROWS])
    task = "summarization" if name == "bart" else "translation"
    command = ["finetune", task, tmp_path / "pairs.csv", "--model", tmp_path / "model", "-o", tmp_path / "run"]
    command += ["--max-steps", "5", "--batch-size", "12", "--lr", "3e-3", "--max_new_tokens", "12", *options]

    def run(*words: object) -> str:
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        captured = capsys.readouterr()
        assert not stop.value.code, captured.err
        return captured.out

    run(*command)
    before, after = (heedful.load(tmp_path / folder).named_tensors() for folder in ("model", "run"))
    assert not torch.equal(before["decoder.blocks.0.cross.q.weight"], after["decoder.blocks.0.cross.q.weight"])
    answer = json.loads(run("predict", tmp_path / "run", ROWS[0][0], "--max-new-tokens", "12", "--json"))
    with warnings.catch_warnings(action="ignore"):  # of Marian's tokenizer
        tokenizer = getattr(transformers, tokenizer_class).from_pretrained(tmp_path / "run/model")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run/model")
    with torch.no_grad():
        (ids,) = theirs.generate(**tokenizer(ROWS[0][0], return_tensors="pt"), max_new_tokens=12).tolist()
    start = tokenizer.convert_tokens_to_ids("ro_RO") if name == "mbart" else theirs.config.decoder_start_token_id
    assert ids[0] == start and answer["tokens"] == 12 - answer["complete"]
    assert answer["text"].strip() == tokenizer.decode(ids, skip_special_tokens=True).strip()
