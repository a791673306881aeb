"""Advice of a run where the encoder that ships is not the best start: other languages, long documents."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

import heedful
from heedful.bundled import BUNDLED_ENCODER
from heedful.data import read
from heedful.runs.finetune import dry_run as dry
from heedful.runs.finetune import training_time as expected
from heedful.runs.finetune.build import build_task
from heedful.runs.finetune.encoder_advice import encoder_advice, reading_notes
from heedful.runs.finetune.plan import plan_finetune
from heedful.runs.finetune.run import finetune
from heedful.tasks.task import EncodedSplit
from heedful.tokenizer import Tokenizer
from tests.support.generated_data import finetune_tiny, write_csv
from tests.support.model_folders import make_model_dir

ENGLISH = [
    "I would like to return the book that I borrowed last week, but the library is closed.",
    "The film was far too long, and its actors did not seem to believe in it :-(",
    "Shares of the maker of turbines fell 3.4 % to $ 12.10 in late trading, Reuters said.",
    "omg cant believe u did that",
]
OTHERS = {
    "German": "Ich möchte das Buch zurückgeben, das ich letzte Woche ausgeliehen habe, aber die Bücherei ist zu.",
    "French": "Je voudrais rendre le livre que j'ai emprunté la semaine dernière, mais la bibliothèque est fermée.",
    "Spanish": "Quisiera devolver el libro que pedí prestado la semana pasada, pero la biblioteca está cerrada.",
    "Italian": "Vorrei restituire il libro che ho preso in prestito la settimana scorsa, ma la biblioteca è chiusa.",
    "Dutch": "Ik wil graag het boek terugbrengen dat ik vorige week heb geleend, maar de bibliotheek is gesloten.",
    "Polish": "Chciałbym oddać książkę, którą pożyczyłem w zeszłym tygodniu, ale biblioteka jest zamknięta.",
    "Indonesian": "Saya ingin mengembalikan buku yang saya pinjam minggu lalu, tetapi perpustakaan tutup.",
    "Russian": "Я хотел бы вернуть книгу, которую взял на прошлой неделе, но библиотека закрыта.",
    "Chinese": "我想归还上周借的书，但是图书馆关门了。",
    "Hindi": "मैं पिछले सप्ताह उधार ली गई किताब लौटाना चाहता हूँ, लेकिन पुस्तकालय बंद है।",
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    loaded = heedful.load(BUNDLED_ENCODER).tokenizer
    assert loaded is not None
    return loaded


def learned(examples: int = 10, *, windowed: int = 0, cut: int = 0) -> EncodedSplit:
    return EncodedSplit(
        samples=[], examples=examples, tokens=0, windowed=windowed, truncated=cut, truncated_tokens=0, skipped=0,
        example_indices=[],
        remarks={},  # type: ignore[arg-type]
    )  # fmt: skip


def test_english_needs_no_other_encoder(tokenizer: Tokenizer) -> None:
    intents = read(Path(str(files("heedful") / "assets" / "intents")))
    for texts in (ENGLISH, [each.text for each in intents.examples("train")], [], [""], ["12 - 5 = 7"]):
        assert encoder_advice(texts, tokenizer, learned(), 512) == []


@pytest.mark.parametrize("language", OTHERS)
def test_other_languages_are_told_with_what_to_do(language: str, tokenizer: Tokenizer) -> None:
    (sentence,) = encoder_advice([OTHERS[language]], tokenizer, learned(), 512)
    assert "do not look English" in sentence and "--model" in sentence and BUNDLED_ENCODER in sentence
    why = "letters are not Latin" if language in ("Russian", "Chinese", "Hindi") else "tokens per word"
    assert why in sentence


def test_a_few_foreign_texts_among_english_ones_are_no_reason(tokenizer: Tokenizer) -> None:
    assert not encoder_advice([*ENGLISH * 3, OTHERS["French"], OTHERS["Russian"]], tokenizer, learned(), 512)


def test_long_documents_are_told_with_what_to_do(tokenizer: Tokenizer) -> None:
    assert not encoder_advice(ENGLISH, tokenizer, learned(windowed=5), 512)
    (sentence,) = encoder_advice(ENGLISH, tokenizer, learned(windowed=6), 512)
    assert sentence.startswith("6 of 10 training examples are longer than the 512 tokens") and "--model" in sentence
    assert "read in windows" in sentence
    assert "are cut" in encoder_advice(ENGLISH, tokenizer, learned(cut=6), 512)[0]
    assert not encoder_advice(ENGLISH, tokenizer, learned(cut=6), None), "it was told to read fewer"


def german(path: Path, times: int = 1) -> Path:
    """Six texts of two labels."""
    rows = [
        {"text": f"{OTHERS['German']} " * times + f"{'ja' if n % 2 else 'nein'} {n}", "label": "ab"[n % 2]}
        for n in range(6)
    ]
    return write_csv(path, rows)


def test_a_run_from_the_encoder_that_ships_advises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "TIMED_STEPS", 1)
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {"latency": {}, "throughput": 1})
    labelled, short = german(tmp_path / "rows.csv"), ("train.max_steps=1", "data.dev_fraction=0")
    done = finetune("classify", labelled, tmp_path / "run", assignments=short)
    (advice,) = [note for note in done.results["notes"] if "--model" in note]
    assert "do not look English" in advice
    assert "do not look English" in (tmp_path / "run" / "model" / "README.md").read_text()
    assert advice in dry.dry_run("classify", labelled, tmp_path / "dry", assignments=short).notes
    other = make_model_dir(tmp_path / "other", "bare")
    done = finetune_tiny(
        "classify", labelled, tmp_path / "named", {"data.dev_fraction": 0, "train.epochs": 1}, model=other
    )
    assert not [note for note in done.results["notes"] if "--model" in note]


@pytest.mark.parametrize(("longest", "count"), [("", 2), ("max_length=64", 1)])
def test_a_length_of_the_users_own_is_not_blamed_on_the_encoder(longest: str, count: int, tmp_path: Path) -> None:
    plan = plan_finetune(
        "classify", german(tmp_path / "rows.csv", 30), assignments=("data.dev_fraction=0", *filter(None, [longest]))
    )
    task, _ = build_task(plan.settings, plan.source, plan.stats, heedful.load(BUNDLED_ENCODER))
    notes = reading_notes(
        plan.settings, plan.source, plan.stats, task, task.encode_split(plan.source.examples("train"))
    )
    assert sum("--model" in sentence for sentence in notes) == count
