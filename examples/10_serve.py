"""The engine and the server: the answer to a text does not depend on its batch, and HTTP gives the same answer.

Idea: a trained model in use; masked words are predicted from both sides.
Code: `heedful.Engine` (heedful/infer/engine.py), packed batches without padding; heedful/serve/run.py.
Expect: "[MASK]" is filled with the same words and probabilities alone and in a batch, to rounding, and the server
answers what the engine answers. The server needs `pip install 'heedful[serve]'`.
"""

import json
import tempfile
from urllib.request import Request, urlopen

import heedful

TEXT = "the capital of france is [MASK] ."
OTHERS = ("she opened the [MASK] and went in .", "a [MASK] is a small animal .")


def filled(answer: dict[str, list]) -> list[tuple[str, float]]:
    """Return the words and probabilities for the only mask of a text."""
    return [(token["text"], token["probability"]) for token in answer["masks"][0]["candidates"]]


def over_http(text: str) -> dict[str, list]:
    """Start the server in a thread, send one request, stop the server."""
    from heedful.serve.run import background

    with tempfile.TemporaryDirectory() as folder:
        # a folder is served with one head: this one fills masks, that of heedful-mini-en itself gives sentence vectors
        heedful.save(heedful.load("heedful-mini-en", head="masked_lm"), f"{folder}/filler")
        with background({"filler": f"{folder}/filler"}) as server:
            body = json.dumps({"inputs": text, "top_k": 3}).encode()
            request = Request(server.url + "/fill-mask", body, {"content-type": "application/json"})
            with urlopen(request, timeout=30) as answer:
                return json.load(answer)


def main() -> dict[str, object]:
    """Return the filled masks of one text alone, in a batch, and from the server."""
    engine = heedful.Engine("heedful-mini-en", head="masked_lm")
    (alone,) = engine([TEXT], top_k=3)
    among = engine([*OTHERS, TEXT], top_k=3)[-1]
    fillings = {"alone": filled(alone), "among others": filled(among), "served": filled(over_http(TEXT))}
    return fillings | {"explained": engine.explain()}


if __name__ == "__main__":
    results = main()
    print(TEXT)
    for way in ("alone", "among others", "served"):
        print(f"{way:14}" + ", ".join(f"{word} {probability:.6f}" for word, probability in results[way]))
    print(f"\n{results['explained']}")
