"""What was measured, as a table, as JSON and as a picture."""

import json
import math
import statistics
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.contenders import BASELINE, OURS, PEERS
from benchmarks.rows import Row

JUDGED_FROM = 1 << 18  # elements: the targets are for the work, below this size a call's cost weighs in
LEGEND = f"""\
x NAME: our speed over NAME's, above 1 we are faster; beside it the target, which is 1 where none stands.
IQR: the distance of the quartiles over the median. alloc: results made by the call, out: written into given buffers.
Targets apply from {JUDGED_FROM} elements on, and to the rows of one call."""


@dataclass
class Line:
    """One row at one size, in one form ("alloc" or "out"), by every contender that has such a call."""

    row: Row
    shape: tuple[int, ...]
    form: str
    threads: int
    nbytes: int  # read and written
    seconds: dict[str, list[float]] = field(default_factory=dict)  # per call, of each batch, by contender
    calls: dict[str, int] = field(default_factory=dict)  # in a batch, by contender
    differing: dict[str, int] = field(default_factory=dict)  # results that are not the reference's bits, by contender

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def median(self, name: str = OURS) -> float:
        """Seconds per call."""
        return statistics.median(self.seconds[name])

    def quartiles(self, name: str = OURS) -> tuple[float, float]:
        """The first and the third; of a single batch, that batch twice."""
        values = self.seconds[name]
        if len(values) < 2:
            return values[0], values[0]
        first, _, third = statistics.quantiles(values, n=4, method="inclusive")
        return first, third

    def ratio(self, name: str) -> float | None:
        """Our speed over that contender's: above 1 we are faster. None where it has no such call."""
        return self.median(name) / self.median() if name in self.seconds else None

    @property
    def ratios(self) -> dict[str, float]:
        return {name: self.ratio(name) for name in PEERS if name in self.seconds}

    def target(self, name: str) -> float:
        """How many times that peer's speed is to be reached; 0 where the cost of a call, not the work, is measured."""
        return self.row.target(name) if self.row.sizes or self.elements >= JUDGED_FROM else 0.0

    @property
    def short(self) -> dict[str, float]:
        """The peers against which the target is missed, with the target."""
        return {name: self.target(name) for name, ratio in self.ratios.items() if ratio < self.target(name)}

    def verdict(self) -> str:
        """Whether the targets are met: "ok" or "short"; "-" where none applies."""
        judged = any(self.target(name) for name in self.ratios)
        return "short" if self.short else "ok" if judged else "-"

    def as_json(self) -> dict:
        contenders = {
            name: {
                "median_s": self.median(name),
                "quartiles_s": self.quartiles(name),
                "batches": len(values),
                "calls_per_batch": self.calls[name],
                "differing": self.differing.get(name),
            }
            for name, values in self.seconds.items()
        }
        return {
            "row": self.row.name,
            "shape": self.shape,
            "elements": self.elements,
            "form": self.form,
            "threads": self.threads,
            "bytes": self.nbytes,
            "contenders": contenders,
            "ratio_to_copy": self.ratio(BASELINE),
            "ratio_to_peers": self.ratios,
            "targets": {name: self.target(name) for name in self.ratios},
            "verdict": self.verdict(),
        }


def size_name(elements: int) -> str:
    """Writes a number of elements as it is read: 4194304 is "4 Mi"."""
    for unit, name in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
        if elements >= unit and elements % unit == 0:
            return f"{elements // unit} {name}"
        if elements >= unit and 100 * elements % unit == 0:
            return f"{elements / unit:.4g} {name}"
    return str(elements)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _against(line: Line, name: str) -> str:
    """The ratio to a peer, beside its target where one was set or is missed: "4.5 < 12"."""
    ratio, target = line.ratio(name), line.target(name)
    if ratio is None or not target or (name not in line.row.targets and name not in line.short):
        return _times(ratio)
    return f"{_times(ratio)} {'<' if name in line.short else '≥'} {target:.3g}"


def _cells(line: Line) -> list[str]:
    first, third = line.quartiles()
    seconds = line.median()
    return [
        line.row.name,
        size_name(line.elements),
        line.form,
        f"{seconds * 1e6:.4g}",
        f"{(third - first) / seconds:.0%}",
        f"{line.elements / seconds / 1e9:.3g}",
        f"{line.nbytes / seconds / 1e9:.3g}",
        _times(line.ratio(BASELINE)),
        *(_against(line, name) for name in PEERS),
        line.verdict(),
    ]


def print_report(lines: list[Line], failures: list[str], console: Console) -> None:
    """A table per number of threads, then what differs from the reference, what falls short and what failed."""
    for threads in dict.fromkeys(line.threads for line in lines):
        table = Table(title=f"{threads} thread{'s' * (threads > 1)}", box=box.SIMPLE_HEAD, title_justify="left")
        table.add_column("row", no_wrap=True)
        for name in ("size", "form", "us", "IQR", "G el/s", "GB/s", f"x {BASELINE}", *(f"x {peer}" for peer in PEERS)):
            table.add_column(name, justify="left" if name == "form" else "right", no_wrap=True)
        table.add_column("")
        for line in lines:
            if line.threads == threads:
                table.add_row(*_cells(line), style="" if line.verdict() in ("ok", "-") else "yellow")
        console.print(table)
    console.print(LEGEND, highlight=False)
    _print_list(console, "Results that are not the reference's bits (a peer with another arithmetic):", [
        f"{line.row.name}, {size_name(line.elements)}, {line.form}, {name}: {count}"
        for line in lines for name, count in line.differing.items() if count
    ])  # fmt: skip
    _print_list(console, "Short of the target:", [
        f"{line.row.name}, {size_name(line.elements)}, {line.form}, {line.threads} threads: "
        + ", ".join(f"{_times(line.ratio(name))} of {target:.3g} x {name}" for name, target in line.short.items())
        for line in lines if line.short
    ])  # fmt: skip
    _print_list(console, "FAILED (no figures):", [_brief(failure) for failure in failures])


def _brief(failure: str) -> str:
    """Without the traceback, which the run has shown and the JSON holds."""
    first, *rest = failure.strip().splitlines()
    return f"{first.removesuffix('Traceback (most recent call last):')}{rest[-1]}" if rest else first


def _print_list(console: Console, title: str, items: list[str]) -> None:
    if items:
        console.print(f"\n{title}", *items, sep="\n  ", markup=False, highlight=False)


def write_json(path: Path, about: dict, lines: list[Line], failures: list[str]) -> None:
    """Everything measured, with what is known of the machine and the run."""
    document = about | {"lines": [line.as_json() for line in lines], "failures": failures}
    path.write_text(json.dumps(document, indent=1) + "\n")


def plot(path: Path, title: str, lines: list[Line]) -> None:
    """Bars: our speed over that of the fastest peer with such a call; a tick marks the target against that peer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [line for line in lines if line.ratios]
    if not lines:
        return
    best = [min(line.ratios, key=line.ratios.get) for line in lines]
    ratios = [line.ratios[name] for line, name in zip(lines, best, strict=True)]
    targets = [line.target(name) for line, name in zip(lines, best, strict=True)]
    labels = [f"{line.row.name}, {size_name(line.elements)}, {line.form}, {line.threads} thr." for line in lines]
    figure, axes = pyplot.subplots(figsize=(11, 1.5 + 0.25 * len(lines)), layout="constrained")
    colours = {"ok": "tab:blue", "short": "tab:orange", "-": "silver"}
    axes.barh(range(len(lines)), ratios, color=[colours[line.verdict()] for line in lines])
    for y, (ratio, target, name) in enumerate(zip(ratios, targets, best, strict=True)):
        axes.text(max(ratio, target), y, f"  {_times(ratio)} x {name}", va="center", fontsize=7)
        if target:
            axes.plot([target, target], [y - 0.4, y + 0.4], color="black", linewidth=1.5)
    axes.set_title("\n".join(textwrap.wrap(title, 110)), fontsize=9)
    axes.set_xlabel("our speed over the fastest peer's (black: target against it; orange: short of some peer's target)")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set_xlim(min(0.5, *ratios) * 0.8, max(2.0, *ratios) * 2)
    axes.set_yticks(range(len(lines)), labels, fontsize=8)
    axes.set_ylim(-0.6, len(lines) - 0.4)
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
