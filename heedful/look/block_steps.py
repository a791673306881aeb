"""One block step by step: what a token's row becomes, with the numbers that the model itself computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from heedful.errors import HeedfulError
from heedful.look.head_masking import unfused
from heedful.look.inspection import Inspection
from heedful.model.config import Learned, Sinusoidal
from heedful.model.embedding import Embedding
from heedful.model.stack import Block, Placed, Stack
from heedful.model.trace import within
from heedful.nn.positions import sinusoid


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """One formula, what it gives for the chosen token, and what it means."""

    name: str
    formula: str
    about: str
    vectors: dict[str, Tensor] = field(default_factory=dict)  # by name, [numbers]
    over: str = ""  # "keys": the numbers belong to the tokens that are looked at


class _BlockRecorded(Exception):  # noqa: N818  # no error: the rest of the model need not run
    pass


@contextmanager
def _watched(stack: Stack, layer: int, seen: dict[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """While it lasts, what goes into the modules of that layer's block and comes out of them is kept."""
    block = stack.blocks[layer * len(stack.blocks) // stack.config.layers]
    assert isinstance(block, Block)
    at: list[int] = [-1]

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        at[0] = next(each.layer for each in given if isinstance(each, Placed))

    def keep(name: str) -> Any:
        def kept(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
            if at[0] == layer:
                seen[name] = given[0].detach(), output.detach()
                if name == "block":
                    raise _BlockRecorded

        return kept

    parts: dict[str, nn.Module] = {
        "out": block.attention.out,
        "mlp norm": block.mlp_norm,  # none where a kernel adds and normalises at once
        "mlp": block.mlp,
        "down": block.mlp.down,
        "block": block,
    }
    if hasattr(block, "cross"):
        parts |= {"cross norm": block.cross_norm, "cross": block.cross, "cross out": block.cross.out}
    with ExitStack() as handles:
        handles.enter_context(unfused(block))
        handles.callback(block.register_forward_pre_hook(note).remove)
        for name, module in parts.items():
            handles.callback(module.register_forward_hook(keep(name)).remove)
        yield


def block_steps(inside: Inspection, part: str, layer: int, head: int, row: int) -> list[Step]:
    """From the embedding to the row that leaves the block, for one token and, in attention, one head."""
    view = inside.view(part)
    if part not in ("encoder", "decoder"):
        raise HeedfulError(f'steps are shown of "encoder" and "decoder", not of "{part}"')
    side = inside.sides[view.rows]
    for what, number, count in (("layers", layer, view.layers), ("heads", head, view.heads), ("rows", row, len(side))):
        within(what, [number], count)
    model = inside.loaded.model
    stack = model.encoder if part == "encoder" else model.decoder
    assert stack is not None
    seen = _seen(inside, part, layer, stack)
    with torch.no_grad():
        return [
            *_embedding(inside, part, row),
            *_attention(inside, part, layer, head, row, seen, stack),
            *_rest(row, seen, stack),
        ]


def _seen(inside: Inspection, part: str, layer: int, stack: Stack) -> dict[str, tuple[Tensor, Tensor]]:
    """What went through the block; that of the last one is remembered, for other tokens and heads of it."""
    if inside.block_record is not None and inside.block_record[0] == (part, layer):
        return inside.block_record[1]
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    training = inside.loaded.training
    inside.loaded.eval()
    try:
        with torch.no_grad(), _watched(stack, layer, seen), suppress(_BlockRecorded):
            inside.loaded.rows(inside.source, inside.target)
    finally:
        inside.loaded.train(training)
    inside.block_record = (part, layer), seen
    return seen


def _embedding(inside: Inspection, part: str, row: int) -> Iterator[Step]:
    model = inside.loaded.model
    both = part == "decoder" and model.encoder is not None
    embedding: Embedding = model.output_embedding if both else model.embedding
    side = inside.sides[inside.view(part).rows]
    config, id = embedding.config, int(side[row]["id"])
    inside.loaded.settle()
    vector = embedding.tokens.weight[id] * config.scale
    about = "The token's own vector, a row of the embedding table; the same wherever the token stands."
    yield Step(name="Embedding", formula="e = E[token]", about=about, vectors={"e": vector})
    added = {"e": vector}
    match config.positions:
        case Learned(offset=offset):
            added["p"] = embedding.positions.weight[row + offset]
        case Sinusoidal(layout=layout, base=base, offset=offset, width=width):
            waves = sinusoid(torch.tensor([row + offset]), width or config.width, layout, base)
            added["p"] = waves[0].to(vector)
    if config.types:
        kind = inside.source.types[row] if not both else 0
        added["s"] = embedding.types.weight[int(kind)]
    names = " + ".join(added)
    if len(added) > 1:
        yield Step(
            name="Position and segment",
            formula=f"x = {'norm(' + names + ')' if config.norm else names}",
            about="Attention does not see order. What tells places apart is added here"
            + (", and so is which text of the pair the token belongs to." if "s" in added else "."),
            vectors={name: value for name, value in added.items() if name != "e"},
        )


def _attention(
    inside: Inspection, part: str, layer: int, head: int, row: int, seen: dict[str, tuple[Tensor, Tensor]], stack: Stack
) -> Iterator[Step]:
    x = inside.hidden_states(part)[layer][row]
    yield Step(
        name=f"Into block {layer}",
        formula="x",
        about="The token's row as it comes from below: for the first block the embedding, then the block before.",
        vectors={"x": x},
    )
    one = inside.attention(part, layer, ("q", "k", "v", "scores", "weights"), heads=[head], rows=[row])
    assert one.q is not None and one.k is not None and one.v is not None
    assert one.scores is not None and one.weights is not None
    read = "norm(x)" if stack.config.norm_at == "pre" else "x"
    scores, weights, values = one.scores[0, 0], one.weights[0, 0], one.v[:, 0]
    yield Step(
        name=f"Query, key and value of head {head}",
        formula=f"q = {read} W_Q    k = {read} W_K    v = {read} W_V",
        about="Three views of the row: what the token looks for, what it can be found by, and what it hands on.",
        vectors={"q": one.q[0, 0], "k": one.k[min(row, len(one.k) - 1), 0], "v": values[min(row, len(values) - 1)]},
    )
    dots = one.k[:, 0] @ one.q[0, 0]
    biased = not torch.allclose((one.scale * dots)[scores > -torch.inf], scores[scores > -torch.inf], atol=1e-5)
    yield Step(
        name="Scores",
        formula=f"score_j = q · k_j × {one.scale:.4g}" + (" + bias_j" if biased else ""),
        about="How well each token's key fits the query. The factor, usually 1/√d, keeps the scores small"
        + ("; the bias comes from the distance." if biased else "."),
        vectors={"q · k": dots, "score": scores},
        over="keys",
    )
    yield Step(
        name="Softmax",
        formula="w_j = exp(score_j) / Σ exp(score)",
        about="The scores become shares of one: the attention weights.",
        vectors={"w": weights},
        over="keys",
    )
    joined, out = seen["out"]
    width = stack.config.head_width
    yield Step(
        name="Weighted sum",
        formula="z = Σ w_j v_j",
        about="The values of all tokens, each by its weight: what this head brings to the token.",
        vectors={"z": joined[row][head * width : (head + 1) * width]},
    )
    yield Step(
        name="Heads joined",
        formula="a = [z_0 … z_h] W_O",
        about=f"All {stack.config.heads} heads side by side, mixed by one matrix.",
        vectors={"[z]": joined[row], "a": out[row]},
    )


def _rest(row: int, seen: dict[str, tuple[Tensor, Tensor]], stack: Stack) -> Iterator[Step]:
    pre = stack.config.norm_at == "pre"
    after = "x = x + a" if pre else "x = norm(x + a)"
    across = "cross out" in seen
    first = ("cross" if across else "mlp") + (" norm" if pre else "")  # what reads the sum next
    summed = seen[first][0][row]
    yield Step(
        name="Residual" if pre else "Residual and norm",
        formula=after,
        about="What attention found is added to what was there; nothing is lost on the way.",
        vectors={"x": summed},
    )
    if across:
        joined, out = seen["cross out"]
        summed = seen["mlp norm" if pre else "mlp"][0][row]
        yield Step(
            name="Attention to the encoder",
            formula="c = [z_0 … z_h] W_O    " + ("x = x + c" if pre else "x = norm(x + c)"),
            about="The same once more, with the keys and values of the text that was read.",
            vectors={"[z]": joined[row], "c": out[row], "x": summed},
        )
    inner, down = seen["down"]
    name = stack.config.activation
    formula = f"m = ({name}(x W_g) × x W_1) W_2" if stack.config.gated else f"m = {name}(x W_1) W_2"
    yield Step(
        name="MLP",
        formula=formula.replace("x W", "norm(x) W") if pre else formula,
        about="Each token alone: a wider row, an activation, and back.",
        vectors={"inner": inner[row], "m": down[row]},
    )
    yield Step(
        name="Residual" if pre else "Residual and norm",
        formula="x = x + m" if pre else "x = norm(x + m)",
        about="What leaves the block and enters the next one.",
        vectors={"x": seen["block"][1][row]},
    )
