"""GAU's and FLASH's block token by token, from the equations of arXiv:2202.10447: the judge of every other form."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from tangolm.models.cache import layout_of
from tangolm.models.gated_unit import GatedUnit
from tangolm.models.layers import Application
from tests.models.tiny import build

WIDTH = 64

# Rows of documents and of padding: (document ids, mask) of one row each.
Row = tuple[list[int], list[bool]]


def block_of(family: str, impl: str, **overrides: object) -> GatedUnit:
    """A block in float64 with every parameter away from its initial value."""
    model = build(family, impl, depth=1, gated_width=6, **overrides).double()
    block = model.blocks[0]
    assert isinstance(block, GatedUnit)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0.3, 0.7, generator=generator)
        for linear in (block.gate, block.value, block.shared):
            linear.weight.mul_(0.2)
    return block


def loop(
    block: GatedUnit, h: Tensor, rows: list[Row], attend: Callable[[list[dict[str, Tensor]], int], Tensor]
) -> Tensor:
    """The update of each real token; `attend` gets the tokens of one document in order and the index of a destination."""
    out = torch.zeros_like(h)
    s = block.shared_width
    for b, (documents, mask) in enumerate(rows):
        seen: dict[int, list[dict[str, Tensor]]] = {}
        for t, (document, real) in enumerate(zip(documents, mask, strict=True)):
            if not real:
                continue
            x = h[b, t]
            x = (x - x.mean()) / (x.var(correction=0) + block.norm.eps).sqrt() * block.norm.weight + block.norm.bias
            z = silu(block.shared.weight @ x + block.shared.bias)
            token = {"v": silu(block.value.weight @ x + block.value.bias)}
            for index in range(block.scale.shape[0] // s):
                part = slice(index * s, (index + 1) * s)
                token[str(index)] = z * block.scale[part] + block.offset[part]
            tokens = seen.setdefault(document, [])
            tokens.append(token)
            u = silu(block.gate.weight @ x + block.gate.bias)
            out[b, t] = block.output.weight @ (u * attend(tokens, len(tokens) - 1)) + block.output.bias
    return out


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def applied(block: GatedUnit, h: Tensor, rows: list[Row], config: object) -> Tensor:
    """The block's own update, with documents and mask given only where they say something."""
    documents, mask = (torch.tensor(part) for part in zip(*rows, strict=True))
    layout = layout_of(
        torch.zeros_like(documents),
        None if mask.all() else mask,
        None if (documents == 0).all() else documents,
        None,
        config,
        h.dtype,
    )
    out = block(h, layout, Application(0))
    return out.masked_fill(~mask[..., None], 0.0)  # a padding token's update is the bias of W_o, which nobody reads


def assert_same(block: GatedUnit, rows: list[Row], config: object, attend: Callable) -> None:
    """Outputs and every gradient of the block equal those of the loop."""
    tokens = len(rows[0][0])
    h = torch.randn(len(rows), tokens, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for form in (lambda x: applied(block, x, rows, config), lambda x: loop(block, x, rows, attend)):
        x = h.clone().requires_grad_()
        block.zero_grad()
        y = form(x)
        (y * y.detach().cos()).sum().backward()
        gradients = {name: parameter.grad.clone() for name, parameter in block.named_parameters()}
        results.append({"out": y.detach(), "h": x.grad, **gradients})
    got, expected = results
    for name, value in expected.items():
        scale = max(value.abs().max().item(), 1e-3)
        error = (got[name] - value).abs().max().item() / scale
        assert error < 1e-9, f"{name} differs by {error:.1e} of its largest value"
        assert name == "h" or value.abs().max() > 0, f"{name} is untested: its value or gradient is zero"


def plain(tokens: int, batch: int = 2) -> list[Row]:
    return [([0] * tokens, [True] * tokens)] * batch


def packed(*lengths: int) -> Row:
    documents = [index for index, length in enumerate(lengths) for _ in range(length)]
    return documents, [True] * len(documents)


def padded(tokens: int, pads: list[int]) -> Row:
    return [0] * tokens, [t not in pads for t in range(tokens)]


def random_rows(batch: int, tokens: int, seed: int) -> list[Row]:
    """Rows with documents of any length, numbers left out, and padding anywhere; the first row always has some."""
    chance = random.Random(seed)
    rows = []
    for row in range(batch):
        document, documents = 0, []
        ends, pads = chance.choice([0.02, 0.1, 0.5]), chance.choice([0.0, 0.1, 0.5])
        for _ in range(tokens):
            document += chance.choice([1, 2]) if chance.random() < ends else 0
            documents.append(document)
        rows.append((documents, [chance.random() >= pads and (row, t) != (0, 1) for t in range(tokens)]))
    return rows
