"""Work shared out among processes, its results in the order of the tasks whatever the number of processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

BUDGET = 2**26  # bytes of the tasks that are handed out and whose results are not yet taken


@contextmanager
def runner(
    work: Callable[[Task], Result], workers: int, what: str, size: Callable[[Task], int] = lambda task: 0
) -> Iterator[Callable[[Iterable[Task]], Generator[tuple[Task, Result]]]]:
    """A function from tasks to (task, result), in the order of the tasks; with one worker the work is done here.

    Tasks are read only a little ahead of the results taken: 4 a worker, and `BUDGET` bytes together.

    Args:
        work: a function of a module, or a partial of one; new interpreters import it.
        what: what is being done, for the error.
        size: bytes of a task.

    Raises:
        ValueError: a worker process died. What `work` raises comes out as it is.
    """
    if workers == 1:
        yield lambda tasks: ((task, work(task)) for task in tasks)
        return
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads (torch) can hang
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        yield lambda tasks: _in_order(pool, work, tasks, 4 * workers, size)
    except BrokenProcessPool as error:
        raise ValueError(f"a worker process died while {what}; try again, or with workers=1") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: Executor, work: Callable[[Task], Result], tasks: Iterable[Task], ahead: int, size: Callable[[Task], int]
) -> Generator[tuple[Task, Result]]:
    running: deque[tuple[Task, int, Future[Result]]] = deque()
    held = 0

    def oldest() -> tuple[Task, Result]:
        nonlocal held
        task, bytes_, future = running.popleft()
        held -= bytes_
        return task, future.result()

    try:
        for task in tasks:
            bytes_ = size(task)
            while running and (len(running) >= ahead or held + bytes_ > BUDGET):
                yield oldest()
            running.append((task, bytes_, pool.submit(work, task)))
            held += bytes_
        while running:
            yield oldest()
    finally:  # who takes no more results needs none of the others
        for _, _, future in running:
            future.cancel()


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    """End with the parent, even one that was killed and could say nothing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
