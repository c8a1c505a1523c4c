"""The other side of the pool: a server that has imported torch and forks ready ranks, and the ranks themselves.

Run as ``python -m tests.support.worker FD PARENT_PID MODULE...`` by :class:`tests.support.forkserver.ForkServer`.
The server runs no thread and no operation of torch, so that its forks start clean; a fork takes some 20 ms where a
fresh process takes seconds of imports. Server and ranks die with the process that started them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TextIO

from tests.support.leaks import Snapshot
from tests.support.processes import RUN_VARIABLE
from tests.support.tasks import Cleaned, CleanUp, Outcome, RankContext, Task
from tests.support.tied import enter_host, tie_to_parent


def serve(control: socket.socket) -> None:
    """Fork a rank, or tell how one ended, for each request; until the other end is closed."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 65536, 1)
        if not message:
            os._exit(0)
        request = pickle.loads(message)
        answer: int | None
        if request["verb"] == "fork":
            answer = _fork(control, descriptors[0], request)
        else:
            answer = _status(request["pid"], request["timeout_s"])
        control.send(pickle.dumps(answer))


def _fork(control: socket.socket, descriptor: int, request: dict[str, Any]) -> int:
    server_pid = os.getpid()
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    try:
        control.close()
        tie_to_parent(server_pid)
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ[RUN_VARIABLE] = request["run"]
        os.environ.update(request["environment"])
        if request["netns"] is not None:
            enter_host(request["netns"])
        stacks = open(request["stacks"], "w")  # noqa: SIM115 - open for life, the handler writes to it
        work(Connection(descriptor), stacks)
    except BaseException:
        os.write(2, traceback.format_exc().encode())  # whatever has become of sys.stderr
        os._exit(70)
    os._exit(0)


def _status(pid: int, timeout_s: float) -> int | None:
    """Exit code of a rank (negative: the signal that killed it); ``None`` if it still lives after ``timeout_s``."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            reaped, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if reaped:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.002)


def _show_stacks_on_signal(stacks: TextIO) -> None:
    """Anew for each task: a Lightning Trainer, when it ends, sets every signal's handler to what Python knew of it."""
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)


def work(connection: Connection, stacks: TextIO) -> None:
    """A rank's life: answer tasks until the other end is closed."""
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            os._exit(0)
        if isinstance(message, Task):
            _show_stacks_on_signal(stacks)
            before = Snapshot.take()
            cwd, environment = os.getcwd(), dict(os.environ)
            connection.send_bytes(pickle.dumps(_perform(message)))
            _flush()
        elif isinstance(message, CleanUp):
            leaks = _leave_groups()
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(cwd)
            leaks += before.leaks(grace_s=2.0)
            connection.send_bytes(pickle.dumps(Cleaned(leaks)))


def _perform(task: Task) -> Outcome:
    try:
        os.environ.update(task.environment)
        with _fresh_torch_state(task.seed):
            function = task.function.resolve()
            args, kwargs = pickle.loads(task.arguments)
            seat = task.seat
            context = RankContext(
                rank=seat.rank,
                world_size=seat.world_size,
                host=seat.host,
                local_rank=seat.local_rank,
                local_world_size=seat.local_world_size,
                node_rank=seat.node_rank,
                placement=task.placement,
                tmp_path=task.tmp_path,
                deadline_s=task.deadline_s,
            )
            if task.group_timeout_s is not None:
                _join_default_group(task, task.group_timeout_s)
            return Outcome(value=pickle.dumps(function(context, *args, **kwargs)))
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> Outcome:
    summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    details = "".join(traceback.format_exception(error))
    pickled = None
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # some exceptions pickle but do not come back
    return Outcome(summary=summary, traceback=details, exception=pickled)


def _join_default_group(task: Task, timeout_s: float) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(task.tmp_path / ".rendezvous"), task.seat.world_size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=task.seat.rank,
        world_size=task.seat.world_size,
        timeout=timedelta(seconds=timeout_s),
    )


@contextlib.contextmanager
def _fresh_torch_state(seed: int) -> Iterator[None]:
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)


def _leave_groups() -> list[str]:
    import torch.distributed as dist

    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        return [f"process groups could not be destroyed: {error!r}"]
    finally:
        gc.collect()
    return []


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def main(argv: list[str]) -> None:
    """Import what is asked, and serve."""
    descriptor, parent_pid, modules = int(argv[1]), int(argv[2]), argv[3:]
    tie_to_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test process's; it ends us
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:  # the function that needs it will say so, in the test
            traceback.print_exc()
    gc.collect()
    gc.freeze()
    if threading.active_count() != 1:
        raise RuntimeError(f"the fork server must have one thread, has {threading.enumerate()}")
    control = socket.socket(fileno=descriptor)
    control.send(pickle.dumps("ready"))
    serve(control)


if __name__ == "__main__":
    main(sys.argv)
