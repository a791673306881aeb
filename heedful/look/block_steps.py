"""One Transformer block step by step: each formula with the values that the model computed for one token.

The page asks for `block_steps` through `page_api.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from heedful.errors import RequestError
from heedful.look.head_masking import unfused
from heedful.look.inspection import Inspection, eval_mode
from heedful.model.config import Learned, Sinusoidal
from heedful.model.embedding import EmbeddingLayer
from heedful.model.stack import Block, Stack
from heedful.model.trace import check_indices
from heedful.nn.positions import sinusoid

BlockRecord = dict[str, tuple[Tensor, Tensor]]  # input and output of each module of a block


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockStep:
    """One formula, its result for the chosen token, and what it means."""

    name: str
    formula: str
    about: str  # sentence that explains the formula
    vectors: dict[str, Tensor] = field(default_factory=dict)  # one-dimensional, by name in the formula
    over: str = ""  # "keys" if the vectors have an element for each token that is attended to
    of_head: bool = False  # whether the vectors belong to one head


@contextmanager
def _recording(block: Block, record: BlockRecord) -> Iterator[None]:
    """Context in which hooks store inputs and outputs of the modules of a block in `record`."""

    def recorder(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def store(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            record[name] = inputs[0].detach(), output.detach()

        return store

    modules: dict[str, nn.Module] = {
        "out": block.attention.out,
        "mlp norm": block.mlp_norm,  # not called if a kernel fuses the residual addition with the norm
        "mlp": block.mlp,
        "down": block.mlp.down,
        "block": block,
    }
    if hasattr(block, "cross"):
        modules |= {"cross norm": block.cross_norm, "cross": block.cross, "cross out": block.cross.out}
    with ExitStack() as handles:
        for name, module in modules.items():
            handles.callback(module.register_forward_hook(recorder(name)).remove)
        yield


def block_steps(inspection: Inspection, part: str, layer: int, head: int, row: int) -> list[BlockStep]:
    """Return the steps of a block, for one token and one attention head. Block 0 begins with the embedding's steps.

    Args:
        inspection: The model and the text.
        part: "encoder" or "decoder".
        layer: Index of the block, from 0.
        head: Index of the head, from 0.
        row: Position of the token, from 0.

    Raises:
        RequestError: If the part has no blocks.
        HeedfulError: If there is no such layer, head or row.
    """
    view = inspection.view(part)
    if part not in ("encoder", "decoder"):
        raise RequestError(f'steps of "{part}" are not available: use encoder or decoder')
    check_indices("layers", [layer], view.layers)
    check_indices("heads", [head], view.heads)
    check_indices("rows", [row], len(inspection.sides[view.rows]))
    model = inspection.loaded.model
    stack = model.encoder if part == "encoder" else model.decoder
    assert stack is not None
    record = _block_record(inspection, part, layer, stack)
    with torch.no_grad():
        return [
            *(_embedding_steps(inspection, part, row) if layer == 0 else ()),
            *_attention_steps(inspection, part, layer, head, row, record, stack),
            *_mlp_steps(row, record, stack),
        ]


def _block_record(inspection: Inspection, part: str, layer: int, stack: Stack) -> BlockRecord:
    """Run one block and return inputs and outputs of its modules; `inspection.block_record` caches the last result."""
    if inspection.block_record is not None and inspection.block_record[0] == (part, layer):
        return inspection.block_record[1]
    block = stack.blocks[layer * len(stack.blocks) // stack.config.layers]
    assert isinstance(block, Block)
    record: BlockRecord = {}
    with eval_mode(inspection.loaded), _recording(block, record):
        block(*_block_inputs(inspection, part, stack)[layer])
    inspection.block_record = (part, layer), record
    return record


def _block_inputs(inspection: Inspection, part: str, stack: Stack) -> list[tuple[object, ...]]:
    """Run the model once and return the arguments of the block of each layer; the inspection caches them."""
    if part not in inspection.block_inputs:
        inputs: list[tuple[object, ...]] = []

        def store(module: nn.Module, arguments: tuple[object, ...]) -> None:
            inputs.append(arguments)  # a block that several layers share is called once for each of them

        with eval_mode(inspection.loaded), unfused(inspection.loaded.model), ExitStack() as handles:
            for block in stack.blocks:
                handles.callback(block.register_forward_pre_hook(store).remove)
            inspection.loaded.hidden_states(inspection.source, inspection.target)
        inspection.block_inputs[part] = inputs
    return inspection.block_inputs[part]


def _embedding_steps(inspection: Inspection, part: str, row: int) -> Iterator[BlockStep]:
    """Yield the steps from a token to the input of the first block."""
    model = inspection.loaded.model
    is_output = part == "decoder" and model.encoder is not None
    embedding: EmbeddingLayer = model.output_embedding if is_output else model.embedding
    config = embedding.config
    id = inspection.sides[inspection.view(part).rows][row]["id"]
    assert id is not None
    inspection.loaded.flush()
    vector = embedding.tokens.weight[id] * config.scale
    about = "The token's own vector, a row of the embedding table; the same at every position."
    yield BlockStep(name="Embedding", formula="e = E[token]", about=about, vectors={"e": vector})
    added = {"e": vector}
    match config.positions:
        case Learned(offset=offset):
            added["p"] = embedding.positions.weight[row + offset]
        case Sinusoidal(layout=layout, base=base, offset=offset, width=width):
            waves = sinusoid(torch.tensor([row + offset]), width or config.width, layout, base)
            added["p"] = waves[0].to(vector)
    if config.types:
        segment = inspection.source.types[row] if not is_output else 0
        added["s"] = embedding.types.weight[int(segment)]
    if len(added) == 1:
        return
    total = " + ".join(added)
    about = "Attention does not depend on order. The position is added here"
    about += ", and so is the segment, the text of the pair that the token belongs to." if "s" in added else "."
    yield BlockStep(
        name="Position and segment",
        formula=f"x = norm({total})" if config.norm else f"x = {total}",
        about=about,
        vectors={name: value for name, value in added.items() if name != "e"},
    )


def _attention_steps(
    inspection: Inspection, part: str, layer: int, head: int, row: int, record: BlockRecord, stack: Stack
) -> Iterator[BlockStep]:
    """Yield the steps of self-attention, from the input of the block to the projection of the joined heads."""
    yield BlockStep(
        name=f"Into block {layer}",
        formula="x",
        about="The token's hidden state: for the first block the embedding, otherwise the output of the block before.",
        vectors={"x": inspection.hidden_states(part)[layer][row]},
    )
    attention = inspection.attention(part, layer, ("q", "k", "v", "scores", "weights"), heads=[head], rows=[row])
    assert attention.q is not None and attention.k is not None and attention.v is not None
    assert attention.scores is not None and attention.weights is not None
    q, k, v = attention.q[0, 0], attention.k[:, 0], attention.v[:, 0]
    scores, weights = attention.scores[0, 0], attention.weights[0, 0]
    x = "norm(x)" if stack.config.norm_at == "pre" else "x"
    bias = stack.config.attention_bias
    projections = {name: f"{x} W_{name}" + (f" + b_{name}" if bias else "") for name in "QKV"}
    if stack.config.qk_norm:
        projections |= {name: f"norm({projections[name]})" for name in "QK"}
    yield BlockStep(
        name="Query, key and value",
        formula="    ".join(f"{name.lower()} = {formula}" for name, formula in projections.items()),
        of_head=True,
        about="Three projections of the hidden state: what the token attends to, what it is attended to by, and what "
        "it contributes.",
        vectors={"q": q, "k": k[min(row, len(k) - 1)], "v": v[min(row, len(v) - 1)]},
    )
    products = k @ q
    visible = scores > -torch.inf
    is_biased = not torch.allclose((attention.scale * products)[visible], scores[visible], atol=1e-5)
    yield BlockStep(
        name="Scores",
        formula=f"score_j = q · k_j × {attention.scale:.4g}" + (" + bias_j" if is_biased else ""),
        about="How well each token's key matches the query. The factor, usually 1/√d, keeps the scores small"
        + ("; the bias depends on the distance." if is_biased else "."),
        vectors={"q · k": products, "score": scores},
        over="keys",
        of_head=True,
    )
    yield BlockStep(
        name="Softmax",
        formula="w_j = exp(score_j) / Σ exp(score)",
        about="The scores become attention weights, which sum to one.",
        vectors={"w": weights},
        over="keys",
        of_head=True,
    )
    joined, out = record["out"]
    width = stack.config.head_width
    yield BlockStep(
        name="Weighted sum",
        formula="z = Σ w_j v_j",
        about="The values of all tokens, each multiplied by its weight: the output of this head.",
        vectors={"z": joined[row][head * width : (head + 1) * width]},
        of_head=True,
    )
    yield BlockStep(
        name="Heads joined",
        formula=f"a = [z_0 … z_{stack.config.heads - 1}] W_O{' + b_O' if bias else ''}",
        about=f"The outputs of all {stack.config.heads} heads side by side, multiplied by one matrix.",
        vectors={"[z]": joined[row], "a": out[row]},
    )


def _mlp_steps(row: int, record: BlockRecord, stack: Stack) -> Iterator[BlockStep]:
    """Yield the steps after self-attention: residual connections, cross-attention if there is any, and the MLP."""
    is_pre = stack.config.norm_at == "pre"
    has_cross = "cross out" in record
    next_module = ("cross" if has_cross else "mlp") + (" norm" if is_pre else "")  # its input is the residual sum
    summed = record[next_module][0][row]
    yield BlockStep(
        name="Residual" if is_pre else "Residual and norm",
        formula="x = x + a" if is_pre else "x = norm(x + a)",
        about="The output of attention is added to the hidden state (residual connection).",
        vectors={"x": summed},
    )
    if has_cross:
        joined, out = record["cross out"]
        summed = record["mlp norm" if is_pre else "mlp"][0][row]
        yield BlockStep(
            name="Attention to the encoder",
            formula=f"c = [z_0 … z_{stack.config.heads - 1}] W_O{' + b_O' if stack.config.attention_bias else ''}    "
            + ("x = x + c" if is_pre else "x = norm(x + c)"),
            about="Cross-attention: queries of the decoder, keys and values of the encoder's output.",
            vectors={"[z]": joined[row], "c": out[row], "x": summed},
        )
    inner, down = record["down"]
    activation = stack.config.activation
    x = "norm(x)" if is_pre else "x"
    first, second = (" + b_1", " + b_2") if stack.config.mlp_bias else ("", "")
    gate = f"{activation}({x} W_g{' + b_g' if first else ''}) × ({x} W_1{first})"
    yield BlockStep(
        name="MLP",
        formula=f"m = ({gate}) W_2{second}" if stack.config.gated else f"m = {activation}({x} W_1{first}) W_2{second}",
        about="The feed-forward network, for each token alone: to a wider vector, an activation, and back.",
        vectors={"inner": inner[row], "m": down[row]},
    )
    yield BlockStep(
        name="Residual" if is_pre else "Residual and norm",
        formula="x = x + m" if is_pre else "x = norm(x + m)",
        about="The output of the block, which is the input of the next one.",
        vectors={"x": record["block"][1][row]},
    )
