"""The engine and the service: one answer whatever is asked beside it, and the same over HTTP.

Idea: a trained model in use, quickly (D2 "BERT in low-latency production settings"); masks filled by reading both sides
(D0 "Masked Language Model").
Code: `heedful.Engine` (heedful/infer/engine.py), packed batches without padding; heedful/serve/run.py.
Expect: "[MASK]" is filled with the same words and probabilities alone and among others, to rounding, and the service
says what the engine says. The service needs `pip install 'heedful[serve]'`.
"""

import json
from urllib.request import Request, urlopen

import heedful

TEXT = "the capital of france is [MASK] ."
OTHERS = ("she opened the [MASK] and went in .", "a [MASK] is a small animal .")


def filled(answer: dict[str, list]) -> list[tuple[str, float]]:
    """Words and their probabilities, of the one mask."""
    return [(each["text"], each["probability"]) for each in answer["masks"][0]["tokens"]]


def over_http(text: str) -> dict[str, list]:
    """Start the service in a thread, ask it once, end it."""
    from heedful.serve.run import background

    with background({"encoder": "heedful-mini-en"}) as server:
        body = json.dumps({"inputs": text, "top_k": 3}).encode()
        with urlopen(
            Request(server.url + "/fill-mask", body, {"content-type": "application/json"}), timeout=30
        ) as answer:
            return json.load(answer)


def main() -> dict[str, object]:
    """Return the filled masks of one text alone, in a batch, and from the server."""
    engine = heedful.Engine("heedful-mini-en", head="masked_lm")
    (alone,) = engine([TEXT], top_k=3)
    among = engine([*OTHERS, TEXT], top_k=3)[-1]
    found = {"alone": filled(alone), "among others": filled(among), "served": filled(over_http(TEXT))}
    return found | {"explained": engine.explain()}


if __name__ == "__main__":
    found = main()
    print(TEXT)
    for way in ("alone", "among others", "served"):
        print(f"{way:14}" + ", ".join(f"{word} {probability:.6f}" for word, probability in found[way]))
    print(f"\n{found['explained']}")
