"""`StaticClassifier`: a classifier over the mean of token vectors, computed with NumPy only.

It does not import torch, so the first answer of a static student or a bag-of-words model takes little longer than
reading its files. `Engine` returns the same answers; it is used for all other models.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as read_safetensors

from heedful.errors import ModelError
from heedful.tasks.label_answers import Answer, multi_label_answer, single_label_answer, unique_label_names
from heedful.tokenizer.tokenizer import Tokenizer
from heedful.untrusted_files import check_inside, read_bytes, read_json

Vectors = NDArray[np.float32]
FAMILY, ARCHITECTURE, KIND = "heedful-classic", "HeedfulClassicForClasses", "sequence_classification"
# values in config.json of models whose text vector is the plain mean of token vectors; keys may be missing
STATIC_CONFIG: dict[str, dict[str, object]] = {
    "model": {"encoder": None, "decoder": None, "decoder_embedding": None},
    "embedding": {
        "positions": None,
        "types": 0,
        "scale": 1.0,
        "norm": None,
        "query": False,
        "always_project": False,
    },
    "reader": {"kind": "bag", "how": "mean", "over": None},
    "head": {"kind": KIND, "bias": True, "score_activation": None},
}
PROBLEM_TYPES = ("single_label_classification", "multi_label_classification")
NOTES, WEIGHTS = "heedful.json", "model.safetensors"
TABLE, WEIGHT, BIAS = "embedding.tokens.weight", "head.out.weight", "head.out.bias"
MAX_BYTES = 1 << 30  # maximum bytes of the weights file


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StaticClassifier:
    """A table of token vectors, and a linear classifier over their mean.

    Attributes:
        source: The folder that was opened.
        tokenizer: Tokenizer of the model.
        table: Token vectors, [vocabulary, width].
        weight: Weights of the classifier, [labels, width]; [1, width] in a binary model, for its second label.
        bias: Biases of the classifier, [labels], or [1] in a binary model.
        labels: Names of the labels.
        multi_label: Whether a text can have several labels.
        thresholds: Minimum probability of a predicted label, by label, if `multi_label`.
    """

    source: str
    tokenizer: Tokenizer
    table: Vectors
    weight: Vectors
    bias: Vectors
    labels: tuple[str, ...]
    multi_label: bool
    thresholds: Mapping[str, float]

    @classmethod
    def open(cls, name: str | Path) -> StaticClassifier | None:
        """Open the model in a model folder or a run folder.

        Returns:
            The classifier; None if the folder holds another model or damaged files. `Engine` opens the former, and
            says what is wrong with the latter.
        """
        folder = Path(name)
        if not (folder / "config.json").exists():
            folder = folder / "model"
        if not (folder / "config.json").is_file():
            return None
        config, notes = _read_object(folder, "config.json"), _read_object(folder, NOTES)
        if config is None or notes is None or not _is_static(config):
            return None
        head = config["head"]
        labels, thresholds = head.get("labels"), notes.get("thresholds", {})
        if "stage_thresholds" in notes:  # the folder holds a cascade
            return None
        tensors = _read_weights(folder)
        if tensors is None or not _are_texts(labels) or not _are_numbers(thresholds):
            return None
        tokenizer = Tokenizer.load(folder)
        multi_label = head["problem_type"] == PROBLEM_TYPES[1]
        is_binary = config["model"]["reader"].get("binary") == "sigmoid" and not multi_label
        outputs = 1 if is_binary else len(labels)  # a binary model has only the logit of its second label
        width = tensors[TABLE].shape[-1]
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        expected_shapes = {TABLE: (tokenizer.size, width), WEIGHT: (outputs, width), BIAS: (outputs,)}
        if notes.get("tokenizer") not in (None, tokenizer.fingerprint) or shapes != expected_shapes:
            return None
        return cls(
            source=str(name),
            tokenizer=tokenizer,
            table=tensors[TABLE],
            weight=tensors[WEIGHT],
            bias=tensors[BIAS],
            labels=tuple(labels),
            multi_label=multi_label,
            thresholds=thresholds,
        )

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return self.table.size + self.weight.size + self.bias.size

    @property
    def facts(self) -> dict[str, object]:
        """Source, family, head and number of parameters, for the summary that the command line prints."""
        return {"read": self.source, "family": FAMILY, "head": f"{KIND} head", "parameters": self.parameters}

    def reads(self, texts: Sequence[Any] | None) -> bool:
        """Whether no text is longer than the maximum length of the model; `Engine` splits longer ones.

        Args:
            texts: The texts. None: they are not known yet, and may be of any length.
        """
        limit = self.tokenizer.max_length
        if limit is None or texts is None:
            return limit is None
        return all(len(encoding.ids) <= limit for encoding in self.tokenizer.encode_batch(texts))

    def __call__(self, texts: Iterable[Any], *, top_k: int = 5) -> list[Answer]:
        """Return the answer to each text that the model `reads`, as `Engine` does; `top_k` is ignored."""
        return [self._answer(self._logits(encoding.ids)) for encoding in self.tokenizer.encode_batch(list(texts))]

    def _logits(self, ids: Sequence[int]) -> Vectors:
        """Return the logits of a text, [labels]; the first label of a binary model has the logit 0."""
        width = self.table.shape[1]
        vector = self.table[list(ids)].mean(0) if ids else np.zeros(width, np.float32)
        logits: Vectors = self.weight @ vector + self.bias
        return np.concatenate([np.zeros_like(logits), logits]) if len(logits) < len(self.labels) else logits

    def _answer(self, logits: Vectors) -> Answer:
        """Return the answer for logits: by a sigmoid for each label if `multi_label`, else by a softmax."""
        names = unique_label_names(self.labels)
        if self.multi_label:
            probabilities = 1 / (1 + np.exp(-logits))
            answer = multi_label_answer(dict(zip(names, probabilities.tolist(), strict=True)), self.thresholds)
        else:
            exponentials = np.exp(logits - logits.max())
            probabilities = exponentials / exponentials.sum()
            answer = single_label_answer(dict(zip(names, probabilities.tolist(), strict=True)))
        return answer | {"windows": 1}


def _read_object(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the JSON object in a file, {} if the file is missing, or None if it is damaged."""
    try:
        value = read_json(folder, name)
    except FileNotFoundError:
        return {}
    except (OSError, ModelError):
        return None
    return value if isinstance(value, dict) else None


def _is_static(config: Mapping[str, Any]) -> bool:
    """Return whether config.json describes a classifier over the mean of token vectors."""
    model, head = config.get("model"), config.get("head")
    if config.get("model_type") != FAMILY or config.get("architectures") != [ARCHITECTURE]:
        return False
    if not isinstance(model, dict) or not isinstance(head, dict) or head.get("problem_type") not in PROBLEM_TYPES:
        return False
    sections = {"model": model, "embedding": model.get("embedding"), "reader": model.get("reader"), "head": head}
    for name, section in sections.items():
        if not isinstance(section, dict):
            return False
        if any(section.get(key, value) != value for key, value in STATIC_CONFIG[name].items()):
            return False
    return True


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _are_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(type(number) in (int, float) for number in value.values())


def _read_weights(folder: Path) -> dict[str, Vectors] | None:
    """Return the tensors TABLE, WEIGHT and BIAS by name; None unless the file holds just these, in finite float32."""
    if not os.path.isfile(folder / WEIGHTS):
        return None
    try:
        check_inside(folder, WEIGHTS)
        tensors: dict[str, Vectors] = read_safetensors(read_bytes(folder, WEIGHTS, max_bytes=MAX_BYTES))
    except (OSError, ModelError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    if tensors.keys() != {TABLE, WEIGHT, BIAS}:
        return None
    are_usable = all(tensor.dtype == np.float32 and np.isfinite(tensor).all() for tensor in tensors.values())
    return tensors if are_usable else None
