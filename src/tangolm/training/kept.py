"""Which checkpoints of a run stay: the last `keep_last` whole ones, and the best one.

A checkpoint counts as whole if this process wrote it or hashed it when it began; hashing all of them at each save would
read gigabytes. So a damaged one is never one of the k, and no whole one has to go for it. What is removed is only what its
sealed `trainer.json` says to be of this run: a checkpoint of another run, or one whose owner cannot be read, is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tangolm.config import ConfigError
from tangolm.training import checkpoint
from tangolm.training.run import RunConfig, check_same


class Kept:
    """The checkpoints in a run's folder, for the one process that writes them.

    Args:
        root: the folder of the checkpoints.
        config: of the run.
    """

    def __init__(self, root: Path, config: RunConfig) -> None:
        self.root, self.config = root, config
        self._whole: set[int] = set()

    def begin(self, restored: int, best_step: int | None) -> list[str]:
        """Learn which checkpoints are whole: that of step `restored`, which was verified, and as many older ones as stay.

        Returns:
            Notes for the user: what is damaged or foreign. A lost best checkpoint does not stop the run, but its selection
            may fail at the end.
        """
        self._whole = {restored}
        notes, lost = [], False
        for folder in reversed(checkpoint.checkpoints(self.root)):
            step = checkpoint.step_of(folder)
            wanted = len(self._whole) < self.config.keep_last or step == best_step
            if step >= restored or not wanted:
                continue
            try:
                if self._ours(checkpoint.verify(folder).run):
                    self._whole.add(step)
                else:
                    lost = lost or step == best_step
                    notes.append(f"left alone: checkpoint {folder} is of another run")
            except checkpoint.CheckpointError as error:
                lost = lost or step == best_step
                notes.append(
                    f"the best checkpoint so far is lost: {error}" if step == best_step else f"not kept: {error}"
                )
        if best_step is not None and best_step not in self._whole and not lost:
            folder = self.root / checkpoint.folder_name(best_step)
            notes.append(f"the best checkpoint so far is lost: checkpoint {folder} is not there")
        return notes

    def saved(self, folder: Path, best_step: int | None) -> None:
        """Take in the checkpoint that was just written, and remove what is no longer among the last or the best."""
        self._whole.add(checkpoint.step_of(folder))
        there = {checkpoint.step_of(path) for path in checkpoint.checkpoints(self.root)}
        self._whole &= there  # one that somebody took away is not one of the k
        keep = {*sorted(self._whole)[-self.config.keep_last :], *({best_step} - {None})}
        checkpoint.rotate(self.root, keep, self._ours)
        self._whole &= keep

    def _ours(self, run: Mapping[str, Any]) -> bool:
        try:
            check_same(self.config, run, "checkpoint")
        except ConfigError:
            return False
        return True
