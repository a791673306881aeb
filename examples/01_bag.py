"""A bag of words and its limits: "the end is very bad but what a great music".

Idea: a text's vector is the mean of the vectors of its words, so the order of the words does not count.
Code: `BagPooling` in heedful/model/classic_config.py, heedful/model/pooling.py; texts of heedful/study/toy/order.py.
Expect: the bag of words gives two orders of the same words the same scores, to rounding. It is right on all texts whose
class does not depend on the order, and on half of the others: each of them has a twin with the same words and the other
class. A GRU below the same pooling tells the twins apart.
"""

from heedful.data import LabelledExample
from heedful.model.classic_config import BagPooling, Recurrent
from heedful.study.build import (
    accuracy_by_part,
    classic_classifier,
    classification_task,
    head_outputs,
    train_classifier,
    word_level_tokenizer,
)
from heedful.study.toy.order import LABELS, PARTS, texts
from heedful.study.toy.split import Sizes

ORDERS = ("the end is very bad but what a great music", "what a great music but the end is very bad")


def main(steps: int = 150) -> dict[str, dict[str, float]]:
    """Train a bag of words and a GRU; return their accuracy by part of the test set, and how far two orders differ."""
    data = texts(Sizes(train=2400, dev=0, test=400), seed=1)
    train, test = ([LabelledExample(text=x.text, label=x.label) for x in data[split]] for split in ("train", "test"))
    part_of_text = {example.text: example.part for example in data["test"]}
    tokenizer = word_level_tokenizer([*(example.text for example in train), *ORDERS])
    results = {}
    for name, reader in {
        "bag of words": BagPooling(),
        "GRU, then the same": BagPooling(over=Recurrent(cell="gru", width=32)),
    }.items():
        model = classic_classifier(tokenizer, LABELS, 1, reader)
        task = classification_task(tokenizer, LABELS, model)
        train_classifier(model, task, task.encode_split(train).samples, steps=steps, seed=1, lr=4e-3)
        first, second = head_outputs(model, ORDERS)
        results[name] = accuracy_by_part(model, task, test, lambda example: part_of_text[example.text])
        results[name]["apart"] = float((first - second).abs().max())
    return results


if __name__ == "__main__":
    print(f"{'':20}" + "".join(f"{part:>9}" for part in PARTS) + "   scores of two orders differ by")
    for name, result in main().items():
        shown = "".join(f"{100 * result[part]:8.0f}%" for part in PARTS)
        print(f"{name:20}{shown}   {result['apart']:.2g}")
