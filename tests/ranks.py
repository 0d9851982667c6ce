"""Run a function on several connected gloo processes. The processes are started once and used again.

Each call makes a fresh process group of the first ``num_ranks`` processes, so that nothing is left from the
call before. A call that does not end in time is a failure (and its processes are replaced), never a hang.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_GRACE = 5.0  # seconds that the other ranks get once one has failed


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()


class _RankPool:
    def __init__(self) -> None:
        self.workers: list[_Worker] = []

    def run(
        self, function: Callable[..., Any], num_ranks: int, args: tuple[Any, ...], timeout: float
    ) -> list[Any]:
        while len(self.workers) < num_ranks:
            self.workers.append(_Worker())
        with tempfile.TemporaryDirectory() as folder:
            for rank, worker in enumerate(self.workers[:num_ranks]):
                worker.pipe.send((function, rank, num_ranks, os.path.join(folder, "store"), args))
            results = self._collect(num_ranks, timeout)
        failures = {rank: text for rank, (good, text) in results.items() if not good}
        if failures or len(results) < num_ranks:
            self.close()
            missing = sorted(set(range(num_ranks)) - set(results))
            text = "\n".join(f"--- rank {rank}\n{text}" for rank, text in failures.items())
            raise AssertionError(
                f"{function.__name__} on {num_ranks} ranks: no answer from ranks {missing}\n{text}"
            )
        return [results[rank][1] for rank in range(num_ranks)]

    def _collect(self, num_ranks: int, timeout: float) -> dict[int, tuple[bool, Any]]:
        pipes: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(self.workers[:num_ranks])}
        results: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while pipes and time.monotonic() < deadline:
            for pipe in wait(list(pipes), timeout=max(0.0, deadline - time.monotonic())):
                rank = pipes.pop(pipe)
                try:
                    results[rank] = pipe.recv()  # pyright: ignore[reportAttributeAccessIssue]
                except EOFError:
                    results[rank] = (False, "the process died")
                if not results[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return results

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self.workers = []


_pool = _RankPool()
atexit.register(_pool.close)


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call ``function(*args)`` on ``num_ranks`` processes of one gloo group and return their results by rank.

    ``function``, ``args`` and results must be picklable (a module-level function of a test file is).
    Raises: ``AssertionError`` with the tracebacks of all ranks that failed, or naming those that did not
    answer.
    """
    return _pool.run(function, num_ranks, args, timeout)


def close_ranks() -> None:
    """Stop all processes."""
    _pool.close()


def _forget_accelerate() -> None:
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from easy_context.comm.mesh import reset_default_mesh

    torch.set_num_threads(1)
    while True:
        try:
            function, rank, num_ranks, store, args = pipe.recv()
        except EOFError:
            return
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
        # As a launcher sets them; nobody listens there, the store above connects the ranks.
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", LOCAL_WORLD_SIZE=str(num_ranks))
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
            torch.manual_seed(0)
            answer = (True, function(*args))
            # Without a barrier a rank may close its sockets while another still reads from them.
            dist.barrier()
        except BaseException:  # noqa: BLE001 (everything has to reach the test process)
            answer = (False, traceback.format_exc())
        reset_default_mesh()
        _forget_accelerate()
        pipe.send(answer)
        if not answer[0]:
            return
        dist.destroy_process_group()
