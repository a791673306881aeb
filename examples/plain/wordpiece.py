"""WordPiece: a word is cut into the longest pieces that the vocabulary has, from left to right.

A piece inside a word begins with ##. If some part has no piece, the whole word is [UNK] (Schuster and Nakajima 2012;
Wu et al. 2016). Training merges the most frequent pair of neighbouring pieces, step by step.
"""

from collections import Counter
from itertools import pairwise

import heedful

WORDS = {"low": 5, "lower": 2, "newest": 6, "widest": 3}


def longest_match(word: str, vocabulary: set[str]) -> list[str]:
    """Return the pieces of a word."""
    pieces, start = [], 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = ("##" if start else "") + word[start:end]
            if piece in vocabulary:
                break
        else:
            return ["[UNK]"]
        pieces.append(piece)
        start = end
    return pieces


def train(words: dict[str, int], merges: int) -> list[tuple[str, str]]:
    """Return the first merges: each joins the pair of pieces that is most frequent in the words."""
    pieces = {word: [word[0], *(f"##{letter}" for letter in word[1:])] for word in words}
    merged_pairs = []
    for _ in range(merges):
        counts: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(pieces[word]):
                counts[pair] += count
        first, second = best = max(counts, key=lambda pair: (counts[pair], pair))
        merged_pairs.append(best)
        for word, parts in pieces.items():
            joined: list[str] = []
            for part in parts:
                if joined and (joined[-1], part) == best:
                    joined[-1] = first + second.removeprefix("##")
                else:
                    joined.append(part)
            pieces[word] = joined
    return merged_pairs


def main() -> list[tuple[str, str]]:
    """Compare longest matches with the tokenizer of the bundled encoder, and return the first merges of training."""
    tokenizer = heedful.load("heedful-mini-en").tokenizer
    vocabulary = {tokenizer.name(number) for number in range(tokenizer.size)}
    for word in ("unaffable", "library", "borrowings", "heedfulness", "zzxq"):
        (ids,) = tokenizer.ids([word])
        assert [tokenizer.name(int(number)) for number in ids] == longest_match(word, vocabulary), word
    return train(WORDS, merges=5)


if __name__ == "__main__":
    for first, second in main():
        print(first, "+", second)
