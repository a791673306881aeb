"""Advice to start from another encoder than the bundled one, for texts in other languages and for long texts."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

import heedful
from heedful.bundled import BUNDLED_ENCODER
from heedful.data import read
from heedful.runs.finetune import training_time
from heedful.runs.finetune.build import build_task
from heedful.runs.finetune.dry_run import dry_run
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
OTHER_LANGUAGES = {
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


def encoded_split(*, windowed: int = 0, truncated: int = 0) -> EncodedSplit:
    """Return the counts of ten encoded examples, some of which are longer than the encoder's limit."""
    return EncodedSplit(
        samples=[],
        examples=10,
        tokens=0,
        windowed=windowed,
        truncated=truncated,
        truncated_tokens=0,
        skipped=0,
        example_indices=[],
        remarks={},  # type: ignore[arg-type]
    )


def test_there_is_no_advice_for_english_texts(tokenizer: Tokenizer) -> None:
    intents = read(Path(str(files("heedful") / "assets" / "intents")))
    for texts in (ENGLISH, [example.text for example in intents.examples("train")], [], [""], ["12 - 5 = 7"]):
        assert encoder_advice(texts, tokenizer, encoded_split(), 512) == []


@pytest.mark.parametrize("language", OTHER_LANGUAGES)
def test_advice_for_another_language_has_a_reason_and_an_option(language: str, tokenizer: Tokenizer) -> None:
    (advice,) = encoder_advice([OTHER_LANGUAGES[language]], tokenizer, encoded_split(), 512)
    assert "do not look English" in advice
    assert "--model" in advice
    assert BUNDLED_ENCODER in advice
    reason = "letters are not Latin" if language in ("Russian", "Chinese", "Hindi") else "tokens per word"
    assert reason in advice


def test_there_is_no_advice_for_a_few_foreign_texts_among_english_ones(tokenizer: Tokenizer) -> None:
    texts = [*ENGLISH * 3, OTHER_LANGUAGES["French"], OTHER_LANGUAGES["Russian"]]
    assert not encoder_advice(texts, tokenizer, encoded_split(), 512)


def test_advice_for_long_texts_says_how_they_are_read(tokenizer: Tokenizer) -> None:
    assert not encoder_advice(ENGLISH, tokenizer, encoded_split(windowed=5), 512), "not more than half of them"
    (with_windows,) = encoder_advice(ENGLISH, tokenizer, encoded_split(windowed=6), 512)
    assert with_windows.startswith("6 of 10 training examples are longer than the 512 tokens")
    assert "--model" in with_windows
    assert "read in windows" in with_windows
    (with_truncation,) = encoder_advice(ENGLISH, tokenizer, encoded_split(truncated=6), 512)
    assert "are cut" in with_truncation
    assert not encoder_advice(ENGLISH, tokenizer, encoded_split(truncated=6), None), "the user has limited the length"


def write_german_rows(path: Path, repetitions: int = 1) -> Path:
    """Write six German texts with two labels, each with a sentence that is repeated."""
    rows = []
    for number in range(6):
        answer = "ja" if number % 2 else "nein"
        text = f"{OTHER_LANGUAGES['German']} " * repetitions + f"{answer} {number}"
        rows.append({"text": text, "label": "ab"[number % 2]})
    return write_csv(path, rows)


def test_a_run_from_the_bundled_encoder_gives_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_time, "TIMED_STEPS", 1)
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {"latency": {}, "throughput": 1})
    data, assignments = write_german_rows(tmp_path / "rows.csv"), ("train.max_steps=1", "data.dev_fraction=0")
    results = finetune("classify", data, tmp_path / "run", assignments=assignments).results
    (advice,) = [note for note in results["notes"] if "--model" in note]
    assert "do not look English" in advice
    assert "do not look English" in (tmp_path / "run" / "model" / "README.md").read_text()
    assert advice in dry_run("classify", data, tmp_path / "dry", assignments=assignments).notes
    other_encoder = make_model_dir(tmp_path / "other", "bare")
    settings = {"data.dev_fraction": 0, "train.epochs": 1}
    results = finetune_tiny("classify", data, tmp_path / "named", settings, model=other_encoder).results
    assert not any("--model" in note for note in results["notes"])


@pytest.mark.parametrize(
    ("assignments", "num_advices"),
    [([], 2), (["max_length=64"], 1)],
    ids=["language and length", "language only"],
)
def test_there_is_no_advice_on_length_if_the_user_has_limited_it(
    assignments: list[str], num_advices: int, tmp_path: Path
) -> None:
    data = write_german_rows(tmp_path / "rows.csv", 30)
    plan = plan_finetune("classify", data, assignments=["data.dev_fraction=0", *assignments])
    task, _ = build_task(plan.settings, plan.source, plan.stats, heedful.load(BUNDLED_ENCODER))
    encoded = task.encode_split(plan.source.examples("train"))
    notes = reading_notes(plan.settings, plan.source, plan.stats, task, encoded)
    assert sum("--model" in note for note in notes) == num_advices
