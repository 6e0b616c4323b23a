"""The training loop, in one process or in several (`distributed`), each on its device.

Each step takes the next `batch_size` sequences of an order that the data seed fixes; of them each process takes its share.
On a schedule of optimizer steps the development split is evaluated (without a trace in training) and a checkpoint saved; the
one with the lowest development NLL and the last ones are kept. A run goes on from any checkpoint to the same bits.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tangolm.config import to_dict
from tangolm.data.loader import Batch, Loader
from tangolm.data.mixture import MixedSplit
from tangolm.data.shards import Split
from tangolm.evaluation.nll import evaluate
from tangolm.models import LanguageModel, build_model
from tangolm.training import checkpoint, distributed, environment, logs, observe
from tangolm.training.checkpoint import State
from tangolm.training.distributed import ALONE, ElsewhereError, Parallel, World, local
from tangolm.training.durable import locked, write_json
from tangolm.training.fit import check_fits
from tangolm.training.init_from import load_initial
from tangolm.training.kept import Kept
from tangolm.training.memory import peak_memory_bytes
from tangolm.training.metrics import MetricsWriter, drop_after, median_tokens_per_second, median_update_seconds
from tangolm.training.optim import build_optimizer, learning_rate
from tangolm.training.progress import Display
from tangolm.training.run import Budget, Run, RunConfig, check_same, claim, open_data
from tangolm.training.signals import Signals
from tangolm.training.update import NonFinite, update

EVALUATION_BATCH = 8


class TrainingError(ValueError):
    """A run that cannot go on as it is; the message says what would do."""


@dataclass(frozen=True)
class Result:
    """How a call of `train` ended.

    Args:
        folder: of the run.
        ended: "finished" all steps, "stopped" after `stop_after`, or "interrupted" by a signal.
        signal: number of that signal.
        step, steps: done, and in all.
        best_step, best_nll: of the lowest development NLL so far.
        last_nll: of the last evaluation in this call.
        median_update_seconds: of the synchronised updates of this call, without warm-up, data and evaluation.
        tokens_per_s: of those updates, the median.
        message: one line for the user: how to go on.
    """

    folder: Path
    ended: Literal["finished", "stopped", "interrupted"]
    signal: int | None
    step: int
    steps: int
    best_step: int | None
    best_nll: float | None
    last_nll: float | None
    median_update_seconds: float | None
    tokens_per_s: float | None
    message: str

    @property
    def exit_code(self) -> int:
        """What a shell expects: 0, or 128 + the signal's number."""
        return 0 if self.signal is None else 128 + self.signal


def train(
    config: RunConfig,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    stop_after: int | None = None,
    progress: bool = True,
) -> Result:
    """Train a model, or go on training it.

    Args:
        config: of the run.
        out: the run's folder. Without `resume` it must not hold a run yet.
        resume: go on from the last whole checkpoint of this run; from the beginning if there is none.
        stop_after: save and stop after so many steps of this call; the schedule stays that of the whole run.
        progress: show what happens, on stderr.

    Returns:
        How it ended. SIGINT and SIGTERM end the step under way, save, and are in the result (main thread only); a second
        one ends at once.

    Raises:
        ValueError: a configuration, data folder or run folder that does not fit; a shard or checkpoint that is damaged.
        TrainingError: a loss, gradient or weight that is not finite; no checkpoint is made of it.
    """
    folder = Path(out)
    with distributed.joined() as world, contextlib.ExitStack() as held:

        def check() -> tuple[environment.Place, str | None]:
            if stop_after is not None and stop_after < 1:
                raise ValueError(f"stop_after must be at least 1 step, got {stop_after}")
            if Run.exists(folder):
                if not resume:
                    raise ValueError(
                        f"out {str(folder)!r} already holds a run; go on with --resume, or name another folder"
                    )
                check_same(config, to_dict(Run(folder).config), f"the run in {str(folder)!r}")
            place = environment.choose(config, world)
            distributed.check_parallel(config.parallel, world, place.device, config.batch_size)
            logs.require(config)
            return place, check_fits(config, place, world)

        def claim_and_create() -> None:
            claim(folder)
            held.enter_context(locked(folder))
            Run.create(folder, config)

        place, too_large = world.agree(check)
        verify = world.local_rank == 0
        splits = world.agree(lambda: (open_data(config, "train", verify), open_data(config, "dev", verify)))
        budget = config.budget(splits[0].rows)
        model = build_model(config.model, config.model_seed, config.impl)
        world.agree(lambda: load_initial(config, model, folder))
        if config.parallel != "fsdp":  # sharding moves a share, of a model that the device may not hold
            model = model.to(place.device)
        try:
            world.on_first(claim_and_create)
            trainer = Trainer(world.agree(lambda: Run(folder)), config, place, model, splits, budget, world)
            trainer.notes += [too_large] if too_large else []
            return trainer.run_steps(trainer.begin(), stop_after, progress)
        except OSError as error:
            raise TrainingError(f"run {folder}: {error}; mend that and go on with --resume") from error


class Trainer:
    """The parts of a run in progress; `train` makes and drives one."""

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        place: environment.Place,
        model: LanguageModel,
        splits: tuple[Split | MixedSplit, Split | MixedSplit],
        budget: Budget,
        world: World = ALONE,
    ) -> None:
        self.run, self.config, self.place, self.model, self.budget = run, config, place, model, budget
        self.world = world
        self.dev = splits[1]
        self.loader = Loader(splits[0], config.batch_size, config.data_seed)
        model.recompute(config.recompute)
        self.parallel = Parallel(model, world, config.parallel, place.device, config.compile)
        self.optimizer = build_optimizer(model, config.optimizer)  # behind sharding, which replaces the parameters
        self.rotates = getattr(config.model, "segments", 1) > 1
        self.kept = Kept(run.checkpoints, config)
        self.notes: list[str] = []
        self.last_nll: float | None = None
        self.rates = observe.Rates(config, place, world)
        self.spikes = observe.Spikes()

    def begin(self) -> State:
        """Restore the last whole checkpoint of this run, or start at step 0; note what had to be passed over."""
        state = State(
            step=0,
            samples=0,
            tokens=0,
            best_step=None,
            best_nll=None,
            run_id=self.config.run_id,
            run=to_dict(self.config),
        )
        found = self.world.on_first(self._newest_whole)
        if found is not None:
            restored = self.world.agree(lambda: checkpoint.restore(found, self.model, self.optimizer, checked=True))
            state = replace(restored, run=to_dict(self.config))
            self.notes.append(f"going on from {found.name}")
        record = environment.describe(self.place, self.model.impl, state.step, self.world, self.config.parallel)
        self.world.on_first(lambda: self._record_start(record, state))
        self.notes.append(f"{record['device']} ({record['device_name']}), {record['precision']}, impl {record['impl']}")
        self.notes.append(self._division())
        return state

    def _newest_whole(self) -> Path | None:
        """The newest whole checkpoint of this run; what is passed over is noted."""
        root = self.run.checkpoints
        checkpoint.clean(root)
        found = checkpoint.checkpoints(root)
        for folder in reversed(found):
            try:
                check_same(self.config, checkpoint.read_state(folder).run, f"checkpoint {folder}")
                state = checkpoint.verify(folder)
            except checkpoint.CheckpointError as error:
                self.notes.append(f"passed over: {error}")
                continue
            self.notes += self.kept.begin(state.step, state.best_step)
            return folder
        if found:
            raise checkpoint.CheckpointError(
                f"no whole checkpoint is left: {self.notes[0].removeprefix('passed over: ')}"
            )
        return None

    def _record_start(self, record: dict[str, Any], state: State) -> None:
        """Leave in the run's folder what this start is, and no record of steps that are going to be taken again."""
        drop_after(self.run.metrics_path, state.step)
        self.spikes = observe.Spikes(observe.recent_losses(self.run.metrics()))
        earlier = self.run.environment()
        history = [*earlier.pop("earlier"), earlier] if earlier else []
        write_json(self.run.folder / "environment.json", {**record, "earlier": history})

    @property
    def micro_batch(self) -> int:
        """Sequences of one pass of a process."""
        return self.world.micro_batch(self.config.batch_size, self.config.micro_batch)

    def _division(self) -> str:
        """How a batch is divided, in words."""
        size, batch = self.world.size, self.config.batch_size
        passes = self.world.passes(batch, self.config.micro_batch)
        text = (
            f"batch of {batch} sequences in {passes} {'pass' if passes == 1 else 'passes'} of up to {self.micro_batch}"
        )
        if size == 1:
            return text
        return f"{text} on each of {size} processes ({self.config.parallel})"

    def run_steps(self, state: State, stop_after: int | None, progress: bool) -> Result:
        """Train from `state` to the end, to `stop_after` steps, or to a signal."""
        steps = self.budget.steps
        stop_at = steps if stop_after is None else min(steps, state.step + stop_after)
        saved = state.step or None
        records: list[dict[str, Any]] = []
        recorded = logs.open_logs(self.config, self.run.folder, state.step) if self.world.first else []
        metrics = MetricsWriter(self.run.metrics_path if self.world.first else None, recorded)
        try:
            with (
                Signals(self.world) as signals,
                Display(steps, state.step, progress and self.world.first) as display,
            ):
                for note in self.notes:
                    display.note(note)
                while state.step < stop_at and signals.agreed() is None:
                    first = state.samples
                    state, record = self.step(state, metrics)
                    metrics.write(record)
                    records.append(record)
                    display.step(record)
                    usual = self.spikes.usual(record["loss"])
                    if usual is not None:
                        spike = observe.spike_record(record, usual, self._rows(first, state.samples), self._last_good())
                        metrics.write(spike)
                        display.spike(spike)
                    if state.step % self.config.evaluation_steps(steps) == 0 or state.step == steps:
                        state, evaluation = self.evaluate(state)
                        metrics.write(evaluation)
                        display.evaluation(evaluation)
                    if (
                        state.step % self.config.checkpoint_steps(steps) == 0
                        or state.best_step == state.step
                        or state.step == steps
                    ):
                        metrics.sync()
                        self.save(state)
                        saved = state.step
                if saved != state.step:
                    metrics.sync()
                    self.save(state)
                return self._result(state, signals.agreed(), records)
        finally:
            metrics.close()
            self._record_peak()

    def _record_peak(self) -> None:
        """The environment says how much memory this start took; of one that was killed, the metrics still do."""
        record = self.run.environment() if self.world.first else None
        if record is not None:
            peak = peak_memory_bytes(self.place.device)
            write_json(self.run.folder / "environment.json", {**record, "peak_memory_bytes": peak})

    def step(self, state: State, metrics: MetricsWriter) -> tuple[State, dict[str, Any]]:
        """One optimizer step; the state behind it and its record."""
        config = self.config
        number = state.step + 1
        count = min(config.batch_size, self.budget.samples - state.samples)
        batch, passes = self._own(state.samples, count)
        lr = learning_rate(config.optimizer, number, self.budget.steps)
        if self.rotates:
            self.model.rotate(number)
        self.place.synchronise()
        started = time.perf_counter()
        try:
            done = update(
                self.parallel,
                self.optimizer,
                batch,
                lr=lr,
                clip=config.optimizer.clip,
                micro_batch=self.micro_batch,
                place=self.place,
                passes=passes,
            )
        except NonFinite as error:
            sample_ids = self._rows(state.samples, state.samples + count)
            metrics.write(observe.diverged_record(number, str(error), sample_ids, self._last_good()))
            rows = observe.rows_named(sample_ids)
            samples = f"samples {state.samples} to {state.samples + count - 1} ({rows})"
            raise self._diverged(number, f"{error} on {samples}") from error
        self.place.synchronise()
        seconds = time.perf_counter() - started
        tokens = count * config.model.context
        state = replace(state, step=number, samples=state.samples + count, tokens=state.tokens + done.tokens)
        return state, {
            "kind": "train",
            "step": number,
            "loss": done.loss,
            "lr": lr,
            "grad_norm": done.grad_norm,
            "tokens": tokens,
            "supervised_tokens": done.tokens,
            "samples": state.samples,
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            **observe.step_fields(self.rates, self.place, count, seconds),
        }

    def _own(self, first: int, count: int) -> tuple[Batch, int]:
        """This process's share of the samples of a step, and the passes that every process makes of its own."""
        share = self.world.share(count)
        passes = self.world.passes(count, self.config.micro_batch)
        if share:
            return self.loader.batch(first + share.start, len(share)), passes
        idle = self.loader.batch(first, 1)
        return replace(idle, labels=torch.full_like(idle.labels, -100)), passes

    def evaluate(self, state: State) -> tuple[State, dict[str, Any]]:
        """Development NLL; the state with the best so far, and the record."""
        if self.rotates:
            self.model.rotate(0)
        started = time.perf_counter()
        with self.place.autocast():
            result = evaluate(
                self.model, self.dev, EVALUATION_BATCH, self.config.evaluation_rows, self.place.device, self.world
            )
        if not math.isfinite(result.nll):
            raise self._diverged(state.step, f"development NLL is {result.nll}")
        best = state.best_nll is None or result.nll < state.best_nll
        if best:
            state = replace(state, best_step=state.step, best_nll=result.nll)
        self.last_nll = result.nll
        return state, {
            "kind": "evaluation",
            "step": state.step,
            "split": "dev",
            "nll": result.nll,
            "nll_sum": result.nll_sum,
            "tokens": result.tokens,
            "accuracy": result.accuracy,
            "best": best,
            "seconds": time.perf_counter() - started,
            **observe.evaluation_fields(self.model, result),
        }

    def save(self, state: State) -> None:
        """Save a checkpoint, then remove those that no longer are among the last or the best."""
        # The loss of the next step would show what is not finite, but by then it would have been saved as good.
        parameters = dict(self.model.named_parameters())
        wrong = torch.stack([(~local(parameter).isfinite()).any().cpu() for parameter in parameters.values()])
        for name, count in zip(parameters, self.world.sum(wrong.long()).tolist(), strict=True):
            if count:
                raise self._diverged(state.step, f"parameter {name} is not finite")
        root = self.run.checkpoints
        last = checkpoint.save(root, self.model, self.optimizer, state, self.config.tokenizer, self.world)
        self.world.on_first(lambda: self.kept.saved(last, state.best_step))

    def _rows(self, first: int, end: int) -> list[int]:
        """The rows of the training split that these samples are."""
        return [self.loader.row_of(sample) for sample in range(first, end)]

    def _last_good(self) -> str | None:
        good = checkpoint.newest(self.run.checkpoints)
        return None if good is None else good.name

    def _diverged(self, step: int, what: str) -> ValueError:
        """What every process meets at the same step, and the first one tells."""
        if not self.world.first:
            return ElsewhereError(what)
        good = checkpoint.newest(self.run.checkpoints)
        last = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
        return TrainingError(
            f"step {step}: {what}; the run stopped, {last}; try a lower optimizer.peak_lr or a longer optimizer.warmup "
            "in another --out"
        )

    def _result(self, state: State, received: int | None, records: list[dict[str, Any]]) -> Result:
        steps = self.budget.steps
        ended: Literal["finished", "stopped", "interrupted"]
        ended = "finished" if state.step == steps else "stopped" if received is None else "interrupted"
        message = f"{ended} at step {state.step} of {steps}"
        if ended != "finished":
            message += f", saved; go on with: tangolm train --resume --out {self.run.folder}"
        return Result(
            folder=self.run.folder,
            ended=ended,
            signal=received if ended == "interrupted" else None,
            step=state.step,
            steps=steps,
            best_step=state.best_step,
            best_nll=state.best_nll,
            last_nll=self.last_nll,
            median_update_seconds=median_update_seconds(records),
            tokens_per_s=median_tokens_per_second(records),
            message=message,
        )
