"""SIGINT and SIGTERM as a wish: the trainer ends the step under way, saves, and says how to go on."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import torch

from tangolm.training.distributed import ALONE, World


class Signals:
    """Remembers the first SIGINT or SIGTERM instead of dying of it. Idle off the main thread.

    A second one acts as ever, but not under `torchrun`: that passes on what the terminal has sent to all already.
    """

    def __init__(self, world: World = ALONE) -> None:
        self.received: int | None = None
        self._world = world
        self._patient = "TORCHELASTIC_RUN_ID" in os.environ
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if not self._patient:
            self._restore()

    def agreed(self) -> int | None:
        """The signal that any process has received."""
        seen = [int(self.received == number) for number in (signal.SIGINT, signal.SIGTERM)]
        interrupted, terminated = self._world.sum(torch.tensor(seen)).tolist()
        return signal.SIGINT if interrupted else signal.SIGTERM if terminated else None

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
