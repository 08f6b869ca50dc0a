"""Measures this package's ops against what users would otherwise pick: `python -m benchmarks`.

Each row's bits are checked first; a wrong bit fails the row and the run. Then every contender, in a process of its own,
is timed in turn, round after round. The results are a table on the terminal, and bench.txt, bench.json and bench.png
in the output directory.
"""

import argparse
import datetime
import math
import os
import platform
import re
import sys
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.contenders import BASELINE, CONTENDERS, OURS, ROOT
from benchmarks.report import Line, plot, print_report, size_name, write_json
from benchmarks.rows import ROWS, Row, make_data, reference, shape_of
from benchmarks.workers import Worker, WorkerError

UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
WIDTH = 190  # of the table where it does not go to a terminal


def parse_size(text: str) -> int:
    """Reads a number of elements: "4Mi" is 4194304."""
    match = re.fullmatch(r"(\d+)\s*(|Ki|Mi|Gi)", text.strip())
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"a size must be a number such as 16, 256Ki or 4Mi, but got {text!r}")
    return int(match[1]) * UNITS[match[2]]


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, with sizes, threads, rows and contenders as lists."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", metavar="REGEX", default="", help="only the rows whose name holds REGEX")
    parser.add_argument("--sizes", metavar="N,N", help="numbers of elements, such as 16,256Ki,4Mi (default: 4Mi)")
    parser.add_argument("--threads", metavar="N,N", help="numbers of threads (default: one per core)")
    parser.add_argument("--peers", metavar="A,B", help=f"only these of {', '.join(list(CONTENDERS)[1:])}")
    parser.add_argument("--variant", choices=("default", "avx2", "avx512"), help="ATEN_CPU_CAPABILITY of every process")
    parser.add_argument("--rounds", type=int, help="timed batches of each call (default: 15)")
    parser.add_argument("--batch", type=float, default=5.0, help="least milliseconds of a batch (default: 5)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench", help="directory (default: out/bench)")
    parser.add_argument("--quick", action="store_true", help="3 rounds, 256Ki elements: does it work, not how fast")
    options = parser.parse_args(arguments)
    try:
        sizes = options.sizes or ("256Ki" if options.quick else "4Mi")
        options.sizes = [parse_size(text) for text in sizes.split(",")]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        options.threads = [int(text) for text in (options.threads or str(cores)).split(",")]
        if min(options.threads) < 1:
            raise ValueError(f"--threads must be at least 1, but got {min(options.threads)}")
        options.rows = [row for row in ROWS if re.search(options.rows, row.name)]
    except (ValueError, re.error, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    options.rounds = options.rounds or (3 if options.quick else 15)
    peers = options.peers.split(",") if options.peers else list(CONTENDERS)
    if unknown := set(peers) - set(CONTENDERS):
        parser.error(f"--peers must be of {', '.join(CONTENDERS)}, but got {', '.join(unknown)}")
    options.contenders = [name for name in CONTENDERS if name == OURS or name in peers]
    if not options.rows:
        parser.error("--rows must match at least one row's name")
    return options


def cpu_model() -> str:
    """The processor's name, as the system has it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def describe(options: argparse.Namespace) -> dict:
    """The machine and the run; the workers add their versions."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "ATEN_CPU_CAPABILITY": options.variant or "unset",
        "rounds": options.rounds,
        "batch_ms": options.batch,
        "quick": options.quick,
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
    }


class ValidationError(Exception):
    """A contender that must give the reference's bits gave others, or none."""


def count_differing(results: list[np.ndarray], expected: list[np.ndarray]) -> int:
    """How many stored values have other bits than the reference."""
    if [a.nbytes for a in results] != [a.nbytes for a in expected]:
        raise ValidationError(f"{[a.nbytes for a in results]} bytes, the reference has {[a.nbytes for a in expected]}")
    count = 0
    for result, value in zip(results, expected, strict=True):
        bits = f"u{value.itemsize}"
        ours, theirs = (np.ascontiguousarray(a).reshape(-1).view(bits) for a in (result, value))
        count += int(np.count_nonzero(ours != theirs))
    return count


def validate(workers: list[Worker], row: Row, shape: tuple[int, ...]) -> dict[str, Line]:
    """Lets every worker prepare the row and compares what they compute; returns the lines to be timed, by form."""
    data = make_data(row, shape)
    expected = reference(row, shape, data)
    nbytes = sum(a.nbytes for a in (*data.values(), *expected))
    lines: dict[str, Line] = {}
    for worker in workers:
        for form, results in worker.ask("prepare", row, shape, nbytes).items():
            if worker.name == OURS:
                lines[form] = Line(row, shape, form, worker.threads, nbytes)
            if form not in lines:
                continue
            lines[form].seconds[worker.name] = []
            if worker.name != BASELINE:
                differing = count_differing(results, expected)
                lines[form].differing[worker.name] = differing
                if differing and worker.exact:
                    raise ValidationError(
                        f"{worker.name}, {form}: results that are not the reference's bits: {differing}"
                    )
    if not lines:
        raise ValidationError(f"{OURS} has no such call")
    return lines


def measure(workers: list[Worker], row: Row, shape: tuple[int, ...], options: argparse.Namespace) -> list[Line]:
    """The lines of one row at one size: validated, then timed in interleaved rounds."""
    lines = validate(workers, row, shape)
    turns = [(worker, line) for worker in workers for line in lines.values() if worker.name in line.seconds]
    for _ in range(options.rounds):
        for worker, line in turns:
            seconds, calls = worker.ask("time", line.form, options.batch / 1e3)
            line.seconds[worker.name].append(seconds)
            line.calls[worker.name] = calls
        turns.reverse()  # no contender always comes after the same one
    return list(lines.values())


def run(options: argparse.Namespace, about: dict) -> tuple[list[Line], list[str]]:
    """Every row at every size with every number of threads; what fails is told and left out."""
    lines, failures = [], []
    for threads in options.threads:
        workers = [Worker(name, threads, options.variant) for name in options.contenders]
        try:
            for worker in workers:
                about["versions"] |= worker.ask("about")
            for row in options.rows:
                for size in row.sizes or options.sizes:
                    shape = shape_of(size)
                    title = f"{row.name}, {size_name(math.prod(shape))}, {threads} threads"
                    print(title, file=sys.stderr, flush=True)
                    try:
                        lines += measure(workers, row, shape, options)
                    except (ValidationError, WorkerError) as error:
                        failures.append(f"{title}: {error}")
                        print(f"FAILED: {failures[-1]}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:  # report what there is
            return lines, [*failures, "interrupted"]
        finally:
            for worker in workers:
                worker.close()
    return lines, failures


def main() -> int:
    """Measures, reports, and returns 1 where a row failed."""
    options = parse_options()
    about = describe(options)
    if about["load_before"] > 0.5:
        print(f"The machine is busy (load {about['load_before']:.1f}): do not trust the figures.", file=sys.stderr)
    lines, failures = run(options, about)
    options.out.mkdir(parents=True, exist_ok=True)
    title = ", ".join([about["cpu"], about["date"][:10], *(f"{k} {v}" for k, v in about["versions"].items())])
    with open(options.out / "bench.txt", "w") as file:
        for console in (Console(), Console(file=file)):
            if not console.is_terminal:
                console.width = WIDTH
            console.print(title, highlight=False)
            print_report(lines, failures, console)
    write_json(options.out / "bench.json", about, lines, failures)
    plot(options.out / "bench.png", title, lines)
    print(f"\n{options.out}: bench.txt, bench.json, bench.png", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
