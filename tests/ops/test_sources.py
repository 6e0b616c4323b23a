"""The state: grown by doubling, reordered for beams, refused where it does not fit."""

from __future__ import annotations

import pytest
import torch

from tangolm.ops import Sources


def test_growth_is_amortised_and_ends_where_it_fits() -> None:
    state, sizes = Sources(), set()
    for _ in range(100):
        state.extend(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 8))
        sizes.add(state.bytes)
    assert state.length == 100
    assert len(sizes) <= 9
    assert max(sizes) <= 2 * 100 * 2 * (4 + 8) * 4


def test_what_is_appended_comes_back() -> None:
    key, value = torch.randn(2, 7, 3, 4), torch.randn(2, 7, 3, 5)
    state = Sources()
    state.extend(key[:, :4], value[:, :4])
    keys, values, ids, mask = state.extend(key[:, 4:], value[:, 4:])
    assert torch.equal(keys, key)
    assert torch.equal(values, value)
    assert ids is None
    assert mask is None


def test_documents_and_padding_may_begin_later() -> None:
    state = Sources()
    state.extend(torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1, 1))
    state.extend(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), torch.tensor([[3]]), torch.tensor([[False]]))
    *_, ids, mask = state.extend(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))
    assert ids is not None
    assert mask is not None
    assert ids.tolist() == [[0, 0, 3, 3]]
    assert mask.tolist() == [[True, True, False, True]]


def test_reorder() -> None:
    state = Sources()
    key = torch.arange(3.0)[:, None, None, None].expand(3, 2, 1, 1)
    state.extend(key, key)
    state.reorder(torch.tensor([2, 2, 0]))
    keys, *_ = state.extend(torch.zeros(3, 1, 1, 1), torch.zeros(3, 1, 1, 1))
    assert keys[:, 0, 0, 0].tolist() == [2, 2, 0]


def test_refused() -> None:
    state = Sources()
    one = torch.ones(1, 1, 2, 4)
    with pytest.raises(ValueError, match=r"a cache is for inference.*no_grad"):
        state.extend(one.clone().requires_grad_(), one)
    state.extend(one, one)
    with pytest.raises(ValueError, match=r"state holds keys of .*\(1, 2, 4\), got \(2, 2, 4\)"):
        state.extend(torch.ones(2, 1, 2, 4), torch.ones(2, 1, 2, 4))
