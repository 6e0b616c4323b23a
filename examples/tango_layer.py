"""TANGO as a layer in a module of one's own: a classifier of sequences that needs to compare distant tokens.

The task: is the last token among the earlier ones? One looped TANGO layer, applied three times, learns it on a CPU in
seconds. Run it: python examples/tango_layer.py
"""

from __future__ import annotations

import torch
from torch import nn

import tangolm


class Classifier(nn.Module):
    """Embedding, one TANGO layer applied `depth` times, a linear read-out of the last position."""

    def __init__(self, symbols: int, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.depth = depth
        self.embedding = nn.Embedding(symbols, width)
        self.tango = tangolm.TangoLayer(width, gated_width=8 * width, depth=depth)
        self.read_out = nn.Linear(width, 2)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """symbols [B, T] -> scores of "new" and "seen before" [B, 2]."""
        h = self.embedding(symbols)
        for _ in range(self.depth):
            h = h + self.tango(h)
        return self.read_out(h[:, -1])


def batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 12 symbols below 24, and whether the last one has occurred in its row."""
    symbols = torch.randint(0, 24, (size, 12), generator=generator)
    again = torch.rand(size, generator=generator) < 0.5
    earlier = symbols.gather(1, torch.randint(0, 11, (size, 1), generator=generator))[:, 0]
    symbols[:, -1] = torch.where(again, earlier, symbols[:, -1])
    return symbols, (symbols[:, :-1] == symbols[:, -1:]).any(1).long()


def main(steps: int = 300) -> float:
    """Train, then return the accuracy on fresh rows."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Classifier(symbols=24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        symbols, seen = batch(64, generator)
        loss = nn.functional.cross_entropy(model(symbols), seen)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:>4}  loss {loss.item():.3f}")
    with torch.no_grad():
        symbols, seen = batch(2000, generator)
        accuracy = (model(symbols).argmax(-1) == seen).float().mean().item()
    print(
        f"accuracy on 2,000 fresh rows: {accuracy:.1%} (guessing: {max(seen.float().mean(), 1 - seen.float().mean()):.1%})"
    )
    return accuracy


if __name__ == "__main__":
    main()
