"""When WordPiece training stops, and when a word becomes [UNK].

Training starts from the characters of the texts and adds one piece with each merge until the vocabulary has the size
that was asked for, or no pair is left. [UNK] is left for words with a character that the vocabulary lacks.
"""

import heedful
from heedful.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer

TEXTS = ["low lower lowest", "new newer newest", "wide wider widest", "slow slower slowest"] * 5
SIZES = (26, 30, 40, 60, 100)


def pieces(tokenizer: Tokenizer, word: str) -> list[str]:
    """The pieces of one word."""
    (ids,) = tokenizer.ids([word])
    return [tokenizer.name(int(number)) for number in ids]


def main() -> dict[int, tuple[int, list[str]]]:
    """Return for each size that is asked for: the size that is reached, and the pieces of "slowest"."""
    found = {}
    for size in SIZES:
        tokenizer = train_tokenizer(TEXTS, TokenizerSettings(algorithm="wordpiece", vocab_size=size))
        found[size] = tokenizer.size, pieces(tokenizer, "slowest")
        assert tokenizer.size <= size
        assert pieces(tokenizer, "slowz") == ["[UNK]"]  # no text has a z
    return found


def published(words: tuple[str, ...] = ("unaffable", "zzxq", "naïve", "☂", "a☂")) -> dict[str, list[str]]:
    """The pieces of some words in the vocabulary of the encoder that ships."""
    tokenizer = heedful.load("heedful-mini-en").tokenizer
    return {word: pieces(tokenizer, word) for word in words}


if __name__ == "__main__":
    for size, (reached, cut) in main().items():
        print(f"asked for {size:3}, reached {reached:3}: {' '.join(cut)}")
    for word, cut in published().items():
        print(f"{word}: {' '.join(cut)}")
