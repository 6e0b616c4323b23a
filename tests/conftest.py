"""Tests run on one thread each: tiny tensors gain nothing from more, and `make test` runs one process a core."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
