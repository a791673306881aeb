"""Next-sentence prediction: how pairs are made, and how the input separates the two texts.

Half of the pairs are neighbours, half take their second text from another document. The input is [CLS] A [SEP] B
[SEP], with token type 0 up to the first [SEP] and 1 after it; label 0 means that B follows A (Devlin et al. 2019,
appendix A.2).
"""

import random
from itertools import pairwise

import heedful

DOCUMENTS = [
    ["The mill stood empty.", "Its wheel was broken.", "Nobody came to mend it."],
    ["She lent him a drill.", "He brought it back on Monday.", "The battery was flat."],
]


def pairs(documents: list[list[str]], draw: random.Random) -> list[tuple[str, str, int]]:
    """Make one pair for each sentence that has a successor."""
    result = []
    for number, document in enumerate(documents):
        for first, second in pairwise(document):
            if draw.random() < 0.5:
                result.append((first, second, 0))  # IsNext
            else:
                other_document = draw.choice([n for n in range(len(documents)) if n != number])
                result.append((first, draw.choice(documents[other_document]), 1))  # NotNext
    return result


def main() -> list[tuple[str, str, int]]:
    """Make pairs; compare inputs built by hand with the tokenizer's."""
    tokenizer = heedful.load("heedful-mini-en").tokenizer
    examples = pairs(DOCUMENTS, random.Random(0))
    for first, second, _ in examples:
        a, b = (list(tokenizer.encode(text).ids) for text in (first, second))  # [CLS] ... [SEP]
        encoded = tokenizer.encode((first, second))
        assert list(encoded.ids) == a + b[1:]
        assert list(encoded.types) == [0] * len(a) + [1] * (len(b) - 1)
    return examples


if __name__ == "__main__":
    for first, second, label in main():
        print(label, "|", first, "|", second)
