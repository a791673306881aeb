"""Classic models in runs: made on the spot, over vectors from a file, over another model; they go on bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import heedful
from heedful.bundled import BUNDLED_ENCODER
from heedful.checkpoint import load
from heedful.checkpoint.new_head import with_head
from heedful.errors import HeedfulError
from heedful.model.classic import sentence_bounds
from heedful.model.classic_config import BagPooling, ClassicConfig, HierarchicalPooling
from heedful.packed import Packed
from heedful.runs.finetune import classic as classic_making
from heedful.runs.finetune import run as module
from heedful.runs.finetune.classic import classic_model, skipgram_samples, with_sentence_ends
from heedful.runs.finetune.init_settings import ClassicInit, WordSettings
from heedful.serve.attention import attention_response
from heedful.tokenizer import TokenizerSettings, train_tokenizer
from heedful.tokenizer.words import word_tokenizer
from heedful.train.fit import Reporter
from heedful.train.trainer import Step, Trainer
from tests.support.generated_data import classification_rows, finetune_tiny, write_splits
from tests.support.model_folders import make_model_dir

CLASSIC = {"init.kind": "classic", "init.reader.kind": "attention", "init.words.width": 8}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No timing; one thread, so that equal runs are equal."""
    times = {"latency": {"16": {"p50": 1.0, "p99": 1.0}}, "throughput": 1}
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: times)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_run_on_words_is_complete_and_goes_on(tmp_path: Path) -> None:
    files = write_splits("single", tmp_path / "data")
    done = finetune_tiny("classify", files, tmp_path / "run", CLASSIC)
    assert done.results["base"] == "a classic model" and done.results["splits"].keys() == {"dev", "test"}
    loaded = load(tmp_path / "run")
    model = loaded.config.model
    assert isinstance(model, ClassicConfig) and model.reader.kind == "attention" and model.embedding.width == 8
    card = (tmp_path / "run/model/README.md").read_text("utf-8")
    assert "Its architecture is Heedful's own" in card
    for line in (tmp_path / "run/predictions-test.jsonl").read_text("utf-8").splitlines():
        (again,) = heedful.Engine(loaded)([json.loads(line)["input"]])
        assert again["probabilities"] == pytest.approx(json.loads(line)["answer"]["probabilities"], abs=1e-6)
    with pytest.raises(HeedfulError, match="no layers of self-attention"):
        attention_response(heedful.Engine(loaded), "the cat sat", None, None, 1000)

    class Stop(Reporter):
        """Asks for a stop after the second step."""

        def step(self, step: Step, trainer: Trainer) -> None:
            trainer.stop_requested = step.number == 2

    assert finetune_tiny("classify", files, tmp_path / "other", CLASSIC, reporter=Stop()).status == "interrupted"
    assert finetune_tiny("classify", files, tmp_path / "other", CLASSIC).status == "completed"
    one, other = (tmp_path / name / "model/model.safetensors" for name in ("run", "other"))
    assert one.read_bytes() == other.read_bytes()


def test_vectors_come_from_a_file_or_from_skip_gram(tmp_path: Path) -> None:
    texts = [row["text"] for row in classification_rows(24)]
    (tmp_path / "vectors.txt").write_text("cat 1 2\nzebra 3 4\nlove 5 6\nyak 7 8\n")
    messages: list[str] = []
    start = ClassicInit(
        reader=HierarchicalPooling(ends=(2,)),
        words=WordSettings(vectors=str(tmp_path / "vectors.txt"), vocab_size=60, frozen=True),
    )
    new_model = classic_model(start, texts, 0, messages.append)
    assert new_model.tokenizer is not None and not new_model.model.embedding.tokens.weight.requires_grad
    for word, row in (("cat", [1, 2]), ("zebra", [3, 4]), ("love", [5, 6]), ("yak", [7, 8])):
        number = new_model.tokenizer.id(word)
        assert number is not None and new_model.model.embedding.tokens.weight[number].tolist() == row
    assert "1 of 26 words of the texts have a vector from the file, the others random ones; 3 more words" in "".join(
        messages
    )

    by_steps = ClassicInit(reader=start.reader, words=WordSettings(width=8), skipgram_steps=3)
    learned = classic_model(by_steps, texts, 0, messages.append)
    assert "vectors learned by skip-gram" in messages[-1]
    again = classic_model(by_steps, texts, 0, messages.append)
    assert all(torch.equal(each, again.named_tensors()[name]) for name, each in learned.named_tensors().items())

    with pytest.raises(HeedfulError, match=r"no token ends a sentence: the vocabulary has none of \. ! \?"):
        classic_model(ClassicInit(reader=HierarchicalPooling()), texts, 0, messages.append)
    (tmp_path / "vectors.txt").write_text("zebra 3 4\n")
    with pytest.raises(HeedfulError, match=r"has a vector for none of the \d+ words of the training texts"):
        classic_model(start, texts, 0, messages.append)


def test_words_of_a_file_are_read_as_texts_are(tmp_path: Path) -> None:
    """Trap: a file in another spelling than the texts', lower-cased and without accents, has vectors for none."""
    (tmp_path / "vectors.txt").write_text(
        "für 1 1\nDie 2 2\ndie 3 3\nKatze 4 4\nNew_York 5 5\nU.S. 6 6\nRöße 7 7\n", "utf-8"
    )
    words = WordSettings(vectors=str(tmp_path / "vectors.txt"))
    messages: list[str] = []
    new_model = classic_model(
        ClassicInit(reader=BagPooling(), words=words), ["für die Katze", "schön"], 0, messages.append
    )
    assert new_model.tokenizer is not None
    table, (ids, _) = (
        new_model.model.embedding.tokens.weight.detach(),
        new_model.tokenizer.ids(["für die Katze", "rosse Röße"]),
    )
    assert table[torch.from_numpy(ids)].tolist() == [[1, 1], [3, 3], [4, 4]], (
        "the spelling of the texts goes before others"
    )
    assert messages[-1].startswith("3 of 4 words of the texts have a vector from the file")
    assert {new_model.tokenizer.name(number) for number in range(new_model.tokenizer.size)} >= {"roße", "katze"}
    assert new_model.tokenizer.size == 6, "nothing that no text can reach"

    cased = replace(words, lower_case=False)
    new_model = classic_model(ClassicInit(reader=BagPooling(), words=cased), ["für die Katze"], 0, messages.append)
    assert messages[-1].startswith("3 of 3 words")


def test_words_are_those_of_all_texts_and_subwords_those_of_some() -> None:
    messages: list[str] = []
    start = ClassicInit(reader=BagPooling())
    model = classic_model(start, ["one two"], 0, messages.append, all_texts=iter(["one two", "three"]))
    assert model.tokenizer is not None and model.tokenizer.id("three") is not None


def test_the_vector_of_words_that_are_not_known_is_zero() -> None:
    """Trap: the vector of unknown words, which no training text had, stayed as it was drawn, and decided answers."""
    for words in (WordSettings(), WordSettings(tokens="subwords", vocab_size=60)):
        start = ClassicInit(reader=BagPooling(), words=words)
        new_model = classic_model(start, ["one two three"] * 9, 0, lambda text: None)
        assert new_model.tokenizer is not None and (unknown := new_model.tokenizer.special.unknown) is not None
        assert not new_model.model.embedding.tokens.weight[unknown].any()
    new_model = classic_model(ClassicInit(reader=BagPooling()), ["one two"], 0, lambda text: None)
    known, zebra, empty = heedful.Engine(with_head(new_model, "sequence_classification", labels=("a", "b")))(
        ["one", "zebra yak", ""]
    )
    assert zebra["probabilities"] == empty["probabilities"] != known["probabilities"]


def test_each_seed_has_weights_of_its_own(tmp_path: Path) -> None:
    files = write_splits("single", tmp_path / "data")
    more = CLASSIC | {"init.reader.over.kind": "recurrent", "init.reader.over.width": 4, "train.epochs": 1}
    finetune_tiny("classify", files, tmp_path / "two", more | {"seeds": 2, "train.seed": 1})
    finetune_tiny("classify", files, tmp_path / "alone", more | {"train.seed": 2})
    both = [load(tmp_path / "two" / name).named_tensors() for name in ("start", "start-2")]
    assert not any(torch.equal(each, both[1][name]) for name, each in both[0].items() if "bias" not in name)
    second, alone = (tmp_path / name / "model/model.safetensors" for name in ("two/seed-2", "alone"))
    assert second.read_bytes() == alone.read_bytes()


@pytest.mark.parametrize(
    ("task", "start", "message"),
    [
        (
            "embed",
            {"kind": "structured"},
            'init.reader.kind is "structured".* embed needs the hidden state of each token',
        ),
        (
            "tag",
            {"kind": "bag", "how": "sum"},
            "init.reader has more settings than over: tag needs the hidden state of each token",
        ),
        ("qa", {"kind": "bag"}, "classic models have no head for qa"),
        ("regress", {"kind": "bag", "binary": "sigmoid"}, 'binary is "sigmoid", which is only for one label'),
    ],
)
def test_what_a_task_would_not_read_is_refused(tmp_path: Path, task: str, start: dict[str, str], message: str) -> None:
    files = write_splits(task, tmp_path / "data")
    with pytest.raises(HeedfulError, match=message):
        finetune_tiny(
            task,
            files,
            tmp_path / "run",
            {"init.kind": "classic"} | {f"init.reader.{name}": value for name, value in start.items()},
        )


def test_one_score_for_three_labels_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """Trap: it was found out after the words had been learned by skip-gram."""
    (tmp_path / "data.csv").write_text("text,label\n" + "".join(f"a cat {n},{n % 3}\n" for n in range(30)))
    wishes = ["init.kind=classic", "init.reader.binary=sigmoid"]
    with pytest.raises(HeedfulError, match=r'init\.reader\.binary is "sigmoid", which is for two labels, .* are 3:'):
        module.plan_finetune("classify", tmp_path / "data.csv", assignments=wishes)


def test_what_ends_a_text_is_no_sentence_of_its_own() -> None:
    texts = ["one two three. four five!", "six seven."] * 9
    start = ClassicInit(reader=HierarchicalPooling(), words=WordSettings(tokens="subwords", vocab_size=60))
    new_model = classic_model(start, texts, 0, lambda text: None)
    assert new_model.tokenizer is not None and isinstance(new_model.config.model, ClassicConfig)
    assert isinstance(reader := new_model.config.model.reader, HierarchicalPooling)
    batch = Packed.of([ids.tolist() for ids in new_model.tokenizer.ids(texts[:2])])
    assert sentence_bounds(batch, reader.ends)[1] == (0, 2, 3)


def test_what_ends_a_sentence_is_a_token() -> None:
    words = word_tokenizer(["one", "."])
    assert with_sentence_ends(HierarchicalPooling(ends=(0, 2)), words) == HierarchicalPooling(ends=(0, 2))
    for wrong in (-1, 3):
        with pytest.raises(HeedfulError, match=rf"init\.reader\.ends has {wrong}, which is no token: ids .* 0 to 2;"):
            with_sentence_ends(HierarchicalPooling(ends=(2, wrong)), words)


def test_a_sentence_ends_however_the_vocabulary_spells_it() -> None:
    """Byte-level, SentencePiece and word vocabularies; marks that are one token, and with a quote behind them."""
    texts = ['It is good . Bad ! He said "go." And … then ?! Stop... 2 of 3', "你好。 再见！"] * 9
    for kind in ("bpe", "unigram", "wordpiece"):
        tokenizer = train_tokenizer(texts, TokenizerSettings(algorithm=kind, vocab_size=330 if kind == "bpe" else 80))
        reader = with_sentence_ends(HierarchicalPooling(), tokenizer)
        assert isinstance(reader, HierarchicalPooling)
        end_tokens = {tokenizer.decode([id]).strip() for id in reader.ends if id != tokenizer.special.eos_or_sep}
        assert {".", "!"} <= end_tokens and all(set(each) <= set('.!?…。！"') for each in end_tokens), (
            kind,
            end_tokens,
        )
        for text in ("good . bad", "good! bad", "good. bad"):
            batch = Packed.of([ids.tolist() for ids in tokenizer.ids([text])])
            assert len(sentence_bounds(batch, reader.ends)[0]) == 3, (kind, text)


def test_skip_gram_reads_a_long_text_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classic_making, "MAX_SKIPGRAM_TOKENS", 4)
    words = word_tokenizer(["a", "b", "c"])
    samples = skipgram_samples(words, ["a b c a b c a b c", "a b", "c"])
    ids = dict(zip("abc", words.ids(["a b c"])[0].tolist(), strict=True))
    assert [each.tokens.tolist() for each in samples] == [[ids[w] for w in each] for each in ("abca", "bcab", "ab")]


def test_an_empty_text_is_embedded_as_zeros(tmp_path: Path) -> None:
    """In learning, in measuring and in answering, beside others."""
    rows = "".join(f"a cat {n},one cat {n}\n" for n in range(12)) + ",foo\n"
    (tmp_path / "data").mkdir()
    for split in ("train", "dev"):
        (tmp_path / "data" / f"{split}.csv").write_text("a,b\n" + rows)
    done = finetune_tiny("embed", tmp_path / "data", tmp_path / "run", CLASSIC | {"init.reader.kind": "bag"})
    assert done.results["splits"]["dev"]["numbers"]["count"] == 13
    full, empty = heedful.Engine(tmp_path / "run")(["a cat", ""])
    assert any(full["vector"]) and not any(empty["vector"])


def test_over_another_model_words_are_in_context(tmp_path: Path) -> None:
    encoder, files = make_model_dir(tmp_path / "encoder", "bare"), write_splits("single", tmp_path / "data")
    more = {"init.kind": "classic", "init.reader.kind": "structured", "init.reader.hops": 2, "init.reader.inner": 5}
    more |= {"init.reader.over.kind": "recurrent", "init.reader.over.width": 4, "train.epochs": 1}
    done = finetune_tiny("classify", files, tmp_path / "run", more, model=encoder)
    assert str(encoder) in done.results["base"]
    new_model, inner = load(tmp_path / "run"), load(encoder)
    kept = [name for name in inner.named_tensors() if name.startswith(("embedding.", "encoder."))]
    assert kept and all(torch.equal(new_model.named_tensors()[name], inner.named_tensors()[name]) for name in kept)
    assert new_model.max_length == inner.max_length


def test_wrong_wishes(tmp_path: Path) -> None:
    files = write_splits("single", tmp_path / "data")
    for settings, message in (
        ({"init.words.width": 8}, 'init.words is for init.kind = "classic"'),
        (CLASSIC | {"init.reader.kind": "bags"}, 'init.reader.kind is "bags", expected one of "bag", "attention"'),
        (CLASSIC | {"init.words.dropout": 1}, "dropout is 1"),
    ):
        with pytest.raises(HeedfulError, match=message):
            finetune_tiny("classify", files, tmp_path / "run", settings)
    for settings, message in (
        (CLASSIC, "init.words would change nothing: hidden states of"),
        (
            {"init.kind": "classic", "init.skipgram_steps": 3},
            "init.skipgram_steps would change nothing: hidden states of",
        ),
    ):
        with pytest.raises(HeedfulError, match=message):
            finetune_tiny("classify", files, tmp_path / "run", settings, model=BUNDLED_ENCODER)
