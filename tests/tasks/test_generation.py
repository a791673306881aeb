"""generation_config.json: its settings give the same tokens as in transformers, or an error names the setting."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

import heedful
from heedful.data import Seq2SeqExample
from heedful.errors import HeedfulError
from heedful.model.decode import BeamSearch, Greedy, Sampling
from heedful.packed import Packed
from heedful.tasks.generation import GenerationConfig, folder_generation, start_generation, trained_ends, with_languages
from heedful.tasks.seq2seq import Seq2Seq
from heedful.tokenizer import Tokenizer
from tests.support.sentencepiece_models import train_sentencepiece
from tests.support.tiny_models import ENCODER_DECODER, save_tiny, transformers_in_float64

ARCHITECTURES = {
    "bart": "BartForConditionalGeneration",
    "marian": "MarianMTModel",
    "mbart": "MBartForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "gpt2": "GPT2LMHeadModel",
}
PROMPTS = [[8], [9, 10, 11, 12, 13, 14, 15]]
SETTINGS: list[dict[str, Any]] = [
    {"max_length": 14},
    {"max_new_tokens": 9, "num_beams": 3, "no_repeat_ngram_size": 2, "length_penalty": 2.0, "early_stopping": True},
    {"max_length": 14, "num_beams": 4, "min_length": 9, "forced_bos_token_id": 6, "forced_eos_token_id": 20},
    {"max_length": 13, "num_beams": 2, "bad_words_ids": [[1], [7, 8], [20]], "no_repeat_ngram_size": 1},
    {"max_length": 15, "min_new_tokens": 5, "no_repeat_ngram_size": 3, "length_penalty": -1.0, "num_beams": 3},
    {"max_length": 12, "num_beams": 5, "early_stopping": "never", "forced_eos_token_id": [2, 3]},
]


def tokenizer_of(reference: Any) -> Tokenizer:
    """Return a tokenizer of 99 words; one of them ends texts, as in the model's config."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{id}": id for id in range(99)}, unk_token="w3"))
    return Tokenizer(backend, {"eos_token": f"w{reference.config.eos_token_id}"})


def set_generation(loaded: heedful.ModelBundle, reference: Any, settings: dict[str, Any]) -> None:
    """Give both models these settings, as if generation_config.json had them."""
    loaded.config = replace(loaded.config, generation=settings)
    reference.generation_config = transformers.GenerationConfig.from_dict(settings)


def generate_with_transformers(reference: Any, family: str, prompt: list[int], stop: tuple[int, ...]) -> list[int]:
    """The new ids after the prompt, up to the first id of `stop` or padding (97)."""
    with transformers_in_float64():
        inputs = torch.tensor([prompt])
        (ids,) = reference.generate(inputs, attention_mask=torch.ones_like(inputs), pad_token_id=97).tolist()
    new = ids[1 if family in ENCODER_DECODER else len(prompt) :]
    return list(itertools.takewhile(lambda id: id not in (*stop, 97), new))


def generate(loaded: heedful.ModelBundle, tokenizer: Tokenizer, prompts: list[list[int]]) -> list[list[int]]:
    """The ids of the best text after every prompt."""
    defaults = folder_generation(loaded).defaults
    return [texts[0].tokens for texts in start_generation(loaded, tokenizer, Packed.of(prompts), defaults).run()]


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_generation_settings_of_a_folder_work_as_in_transformers(tmp_path: Path, family: str) -> None:
    reference = save_tiny(tmp_path, family, ARCHITECTURES[family], torch.float64)
    loaded, tokenizer = heedful.load(tmp_path, dtype=torch.float64), tokenizer_of(reference)
    assert loaded.config.generation is not None
    for changes in SETTINGS if family == "bart" else SETTINGS[1:3]:
        settings = {**loaded.config.generation, **changes}
        set_generation(loaded, reference, settings)
        long_text = generate(loaded, tokenizer, PROMPTS)[0]
        second_end = long_text[len(long_text) // 2]  # so that a text ends early
        set_generation(loaded, reference, settings | {"eos_token_id": [reference.config.eos_token_id, second_end]})
        stop = folder_generation(loaded).stop
        expected = [generate_with_transformers(reference, family, prompt, stop) for prompt in PROMPTS]
        assert generate(loaded, tokenizer, PROMPTS) == expected, settings
        assert [generate(loaded, tokenizer, [prompt])[0] for prompt in PROMPTS] == expected, settings


def test_generation_settings_are_read_from_an_old_config_json(tmp_path: Path) -> None:
    """Before transformers 4.26, generation settings were in config.json, with defaults of its class for the others."""
    reference = save_tiny(tmp_path, "bart", ARCHITECTURES["bart"])
    (tmp_path / "generation_config.json").unlink()
    old = {"num_beams": 4, "length_penalty": 2.0, "max_length": 12, "no_repeat_ngram_size": 3, "early_stopping": True}
    config = {key: value for key, value in reference.config.to_dict().items() if key != "forced_eos_token_id"}
    (tmp_path / "config.json").write_text(json.dumps(config | old | {"architectures": [ARCHITECTURES["bart"]]}))
    generation = folder_generation(heedful.load(tmp_path))
    assert generation.defaults.how == BeamSearch(num_beams=4, length_penalty=2.0, early_stopping=True)
    assert (generation.defaults.max_length, generation.constraints.no_repeat_ngram_size) == (12, 3)
    assert (generation.start, generation.stop, generation.constraints.forced_eos_token_id) == (2, (2,), (2,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": 1.2}, r"repetition_penalty is 1\.2; only 1 can be loaded: Heedful does not have"),
        ({"suppress_tokens": [5]}, r"suppress_tokens is \[5\]; only \[\] can be loaded"),
        ({"num_beam_groups": 2}, "num_beam_groups is 2; only 1"),
        ({"do_sample": True, "num_beams": 2}, "do_sample is true and num_beams is 2; beam search does not sample"),
        ({"bad_words_ids": [[99]]}, "99 is no token id of a model with 99 tokens"),
        ({"bad_words_ids": [5]}, "bad_words_ids is .*; expected a list of lists"),
        ({"no_such_setting": 3}, "Heedful does not know the key 'no_such_setting'"),
        ({"max_length": "many"}, "max_length is 'many'; expected a whole number"),
    ],
)
def test_settings_that_are_not_supported_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    save_tiny(tmp_path, "bart", ARCHITECTURES["bart"])
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    loaded = heedful.load(tmp_path)  # loading ignores them, since scores do not depend on them
    with pytest.raises(HeedfulError, match=message):
        folder_generation(loaded)


def test_generation_config_is_saved_as_it_was_read(tmp_path: Path) -> None:
    save_tiny(tmp_path / "original", "bart", ARCHITECTURES["bart"])
    heedful.save(heedful.load(tmp_path / "original"), tmp_path / "saved")
    original, saved = (
        json.loads((tmp_path / name / "generation_config.json").read_text()) for name in ("original", "saved")
    )
    assert saved == original


def test_options_of_a_user_override_those_of_the_folder() -> None:
    beams = BeamSearch(num_beams=4, length_penalty=2.0)
    folder = GenerationConfig(how=beams, beam_search=beams, max_new_tokens=142, max_length=142)
    assert folder.with_choices() == folder
    chosen = folder.with_choices(num_beams=2, num_return_sequences=5, max_new_tokens=9)
    assert chosen.how == BeamSearch(num_beams=2, num_return_sequences=2, length_penalty=2.0)
    assert (chosen.max_new_tokens, chosen.max_length) == (9, None)
    assert folder.with_choices(temperature=0.5, seed=3).how == Sampling(temperature=0.5)
    sampled = GenerationConfig(how=Sampling(top_k=50)).with_choices(temperature=0.5)
    assert sampled.how == Sampling(temperature=0.5, top_k=50)
    assert GenerationConfig().with_choices(num_return_sequences=5).how == Greedy()


def test_a_forced_first_token_is_learned(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "bart", ARCHITECTURES["bart"])
    loaded, tokenizer = heedful.load(tmp_path), tokenizer_of(reference)
    set_generation(loaded, reference, {"forced_bos_token_id": 0})
    task = Seq2Seq(tokenizer=tokenizer, limit=40, ends=trained_ends(loaded, tokenizer))
    example = Seq2SeqExample(text="w7", rewritten="w8")
    inputs = task.tokenizer_inputs(example)
    (sample,) = task.make_samples(example, [[encoding] for encoding in tokenizer.encode_batch(inputs)])
    assert (list(sample.target or ()), list(sample.tokens)) == ([0, 8, 2], [7, 2, 0, 8])


@pytest.mark.parametrize("tokenizer_class", ["MBartTokenizer", "MBart50Tokenizer"])
def test_languages_of_a_model(tmp_path: Path, tokenizer_class: str) -> None:
    """The code of the source language is added to the text. mBART's decoder starts with that of the target language,
    and mBART-50's has to generate it first, as in transformers; both settings are saved, and training follows them.
    """
    folder, code_first = tmp_path / "model", "50" in tokenizer_class
    folder.mkdir()
    (folder / "sentencepiece.bpe.model").write_bytes(train_sentencepiece())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    start = 2 if code_first else None
    reference = save_tiny(
        folder, "mbart", ARCHITECTURES["mbart"], torch.float64, vocab_size=400, decoder_start_token_id=start
    )
    loaded = heedful.load(folder, dtype=torch.float64)
    translator = with_languages(loaded, "de_DE", "fr_XX")
    assert loaded.tokenizer is not None and translator.tokenizer is not None
    german, french = loaded.tokenizer.id("de_DE"), loaded.tokenizer.id("fr_XX")
    assert translator.tokenizer.encode("Ada").ids[0 if code_first else -1] == german
    text = list(translator.tokenizer.encode("Ada reads").ids)
    special_ids = {"forced_bos_token_id" if code_first else "decoder_start_token_id": french}
    with transformers_in_float64():
        inputs = torch.tensor([text])
        (output_ids,) = reference.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=7, **special_ids
        )
    config = GenerationConfig(max_new_tokens=7)
    ((best,),) = start_generation(translator, translator.tokenizer, Packed.of([text]), config).run()
    end = 2
    assert best.tokens == list(itertools.takewhile(lambda id: id != end, output_ids.tolist()[1:]))
    task = Seq2Seq(tokenizer=translator.tokenizer, limit=40, ends=trained_ends(translator, translator.tokenizer))
    (sample,) = task.encode_split([Seq2SeqExample(text="Ada", rewritten="Ada reads")]).samples
    ada_reads = [id for id in text if id not in (german, end)]
    target = list(sample.target or ())
    decoder_input = list(sample.tokens)[-len(target) :]
    if code_first:
        assert target == [french, *ada_reads, end]
        assert decoder_input == [end, french, *ada_reads]
    else:
        assert target == [*ada_reads, end]
        assert decoder_input == [french, *ada_reads]
    heedful.save(translator, tmp_path / "saved")
    saved = heedful.load(tmp_path / "saved", dtype=torch.float64)
    assert saved.tokenizer is not None
    assert saved.tokenizer.encode("Ada").ids == translator.tokenizer.encode("Ada").ids
    assert start_generation(saved, saved.tokenizer, Packed.of([text]), config).run()[0][0].tokens == best.tokens
    with pytest.raises(HeedfulError, match=r"'fr_FR' is no language of this model.*fr_XX"):
        with_languages(loaded, None, "fr_FR")
