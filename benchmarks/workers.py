"""One process per contender, and both ends of the talk between it and the parent.

The parent asks one worker for one timed batch, then the next, round after round, so that all figures of a row come from
the same minutes. Only one worker computes at a time, and what keeps the others out of its way is decided here:

- Thread pools spin for a while after their last work (libgomp's and ONNX Runtime's do). To forbid it, by
  OMP_WAIT_POLICY=passive or allow_spinning=0, would cost the peers a wake-up per call; to let it be would cost the next
  worker a core. So every pool keeps the policy it ships with while its batch runs, and a worker answers only once its
  threads sleep: when the process has used next to no CPU time for a while. Variables that change a pool's policy are
  removed from the workers' environment.
- Every batch begins with untimed calls, which wake the pool and bring code and data back into the caches.
- Every pool has the same number of threads, and only one: libgomp by OMP_NUM_THREADS and torch.set_num_threads, ONNX
  Runtime by intra_op_num_threads with inter_op_num_threads=1. torch.compile compiles inside its worker.
- The garbage collector rests during a batch.
"""

import gc
import os
import subprocess
import sys
import time
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.contenders import CONTENDERS, ROOT
from benchmarks.rows import Row, make_data

POLICIES = ("OMP_", "GOMP_", "KMP_", "MKL_")  # prefixes of the variables that set threads and their waiting
TICK = 0.010  # at least as long as the kernel takes to account the CPU time of a running thread


class WorkerError(RuntimeError):
    """A worker could not do what it was asked; holds its traceback."""


class Worker:
    """The parent's end: a process that holds one contender."""

    def __init__(self, name: str, threads: int, variant: str | None):
        environment = {key: value for key, value in os.environ.items() if not key.startswith(POLICIES)}
        environment |= {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        if variant:
            environment["ATEN_CPU_CAPABILITY"] = variant
        self.name, self.threads, self.environment = name, threads, environment
        self.exact = CONTENDERS[name].exact
        self.start()

    def start(self) -> None:
        """Starts the process; it ends with the connection, whatever becomes of the parent."""
        self.connection, theirs = Pipe()
        command = [sys.executable, "-m", "benchmarks.workers", self.name, str(self.threads), str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=self.environment, pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()

    def ask(self, request: str, *args) -> Any:
        """Sends a request to the other end, waits, and returns its answer; raises WorkerError where it failed."""
        try:
            self.connection.send((request, args))
            answer, trouble = self.connection.recv()
        except (EOFError, OSError) as error:
            code = self.process.wait()
            self.start()  # for the next row
            raise WorkerError(f"{self.name}, {request}: the process ended with {code}") from error
        if trouble:
            raise WorkerError(f"{self.name}, {request}: {trouble}")
        return answer

    def close(self) -> None:
        """Ends the process, also in the middle of its work."""
        self.connection.close()
        self.process.terminate()
        self.process.wait()


class Server:
    """The worker's end: a contender, and the forms of the row it was last given."""

    def __init__(self, name: str, threads: int):
        self.name, self.contender = name, CONTENDERS[name](threads)
        self.forms: dict = {}
        self.counts: dict[str, int] = {}

    def about(self) -> dict[str, str]:
        return self.contender.about()

    def prepare(self, row: Row, shape: tuple[int, ...], nbytes: int) -> dict:
        """Makes the row's calls; returns what each of them computes."""
        self.forms, self.counts = {}, {}
        data = make_data(row, shape)
        self.forms = self.contender.prepare(row, shape, data, nbytes)
        results = {form: self.contender.numpy(row, call()) for form, call in self.forms.items()}
        settle()
        return results

    def time(self, form: str, seconds: float) -> tuple[float, int]:
        """One batch of at least `seconds`: the time of a call, and how many there were."""
        call = self.forms[form]
        if form not in self.counts:
            self.counts[form] = calibrate(call, seconds)
        count = self.counts[form]
        gc.disable()
        batch(call, max(count // 4, 2))  # wakes the threads, fills the caches
        elapsed = batch(call, count)
        gc.enable()
        settle()
        return elapsed / count, count


def batch(call, count: int) -> float:
    """The time that `count` calls take."""
    calls = range(count)
    start = time.perf_counter()
    for _ in calls:
        call()
    return time.perf_counter() - start


def calibrate(call, seconds: float) -> int:
    """How many calls last `seconds`; the first of them warm up."""
    batch(call, 3)
    count = 1
    while (elapsed := batch(call, count)) < seconds:
        count = max(2 * count, int(1.2 * count * seconds / elapsed)) if elapsed > seconds / 100 else 10 * count
    return count


def settle(limit: float = 5.0) -> None:
    """Waits until this process's threads sleep."""
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        used = time.process_time()
        time.sleep(TICK)
        if time.process_time() - used < TICK / 10:
            return
    raise TimeoutError(f"its threads still spin {limit} s after the last call and would disturb the other contenders")


def serve(name: str, threads: int, connection: Connection) -> None:
    """Answers each request with (answer, traceback or None) until the parent hangs up."""
    server = None
    while True:
        try:
            request, args = connection.recv()
        except (EOFError, OSError):
            return
        try:
            server = server or Server(name, threads)
            answer = (getattr(server, request)(*args), None)
        except Exception:  # noqa: BLE001 - whatever failed, the parent is to tell
            answer = (None, traceback.format_exc())
        connection.send(answer)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), Connection(int(sys.argv[3])))
