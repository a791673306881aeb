"""A bag of words and its limits: "the end is very bad but what a great music".

Idea: a text's vector is the mean of its words' vectors (D3, "Limitations of BOW classifier"): order does not count.
Code: `BagPooling` in heedful/model/classic_config.py, heedful/model/pooling.py; texts of heedful/study/toy/order.py.
Expect: two orders of the same words get one answer, to rounding; 100 % right where no order is needed, 50 % elsewhere,
because each such text has a twin of the same words and the other class. A GRU below the same reader tells them apart.
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

SAID = ("the end is very bad but what a great music", "what a great music but the end is very bad")


def main(steps: int = 150) -> dict[str, dict[str, float]]:
    """Train both for so many steps; what was found of each."""
    data = texts(Sizes(train=2400, dev=0, test=400), seed=1)
    train, test = ([LabelledExample(text=x.text, label=x.label) for x in data[split]] for split in ("train", "test"))
    parts = {each.text: each.part for each in data["test"]}
    tokenizer = word_level_tokenizer([*(each.text for each in train), *SAID])
    found = {}
    for name, reader in {
        "bag of words": BagPooling(),
        "GRU, then the same": BagPooling(over=Recurrent(cell="gru", width=32)),
    }.items():
        model = classic_classifier(tokenizer, LABELS, 1, reader)
        task = classification_task(tokenizer, LABELS, model)
        train_classifier(model, task, task.encode_split(train).samples, steps=steps, seed=1, lr=4e-3)
        one, other = head_outputs(model, SAID)
        found[name] = accuracy_by_part(model, task, test, lambda example: parts[example.text])
        found[name]["apart"] = float((one - other).abs().max())
    return found


if __name__ == "__main__":
    print(f"{'':20}" + "".join(f"{part:>9}" for part in PARTS) + "   scores of two orders differ by")
    for name, each in main().items():
        shown = "".join(f"{100 * each[part]:8.0f}%" for part in PARTS)
        print(f"{name:20}{shown}   {each['apart']:.2g}")
