"""The layer for modules of one's own."""

from __future__ import annotations

import pytest
import torch

import tangolm
from tests.models.tiny import assert_equal


@pytest.fixture
def layer() -> tangolm.TangoLayer:
    torch.manual_seed(0)
    return tangolm.TangoLayer(64, 48)


def test_pieces_equal_the_whole(layer: tangolm.TangoLayer) -> None:
    h = torch.randn(2, 9, 64)
    with torch.no_grad():
        cache = layer.new_cache(2)
        pieces = [layer(piece, cache=cache) for piece in h.split([4, 1, 4], dim=1)]
        assert_equal(torch.cat(pieces, 1), layer(h))


def test_padding_and_documents(layer: tangolm.TangoLayer) -> None:
    h = torch.randn(1, 9, 64)
    with torch.no_grad():
        first, second = layer(h[:, :4]), layer(h[:, 4:])
        packed = layer(h, document_ids=torch.tensor([[0] * 4 + [1] * 5]))
        assert_equal(packed, torch.cat([first, second], 1))
        padded = layer(h, attention_mask=torch.tensor([[0] * 4 + [1] * 5]))
        assert_equal(padded[:, 4:], second)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1, 3, 63), r"must be \[B, T, 64\]"), ((3, 64), r"must be \[B, T, 64\]"), ((1, 0, 64), "at least one")],
)
def test_shapes_that_do_not_fit(layer: tangolm.TangoLayer, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(shape))


def test_a_cache_that_does_not_fit(layer: tangolm.TangoLayer) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match="cache is for 3 rows"):
        layer(torch.zeros(2, 1, 64), cache=layer.new_cache(3))
    with torch.no_grad(), pytest.raises(ValueError, match="of another model"):
        layer(torch.zeros(3, 1, 64), cache=tangolm.TangoLayer(64, 96).new_cache(3))
    with pytest.raises(ValueError, match="batch_size"):
        layer.new_cache(0)
    with pytest.raises(ValueError, match="initial_temperature must be above 0 and finite"):
        tangolm.TangoLayer(64, 48, initial_temperature=float("inf"))
