"""The project's yardsticks: how fast should it be?

A yardstick is a ratio of two medians of one run and a limit that the project has set
itself, for a machine that is otherwise quiet. It is printed beside the results as
"pass" or "miss" and never fails a run: only a wrong result does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.registry import BACKWARD, FORWARD, OURS, STEP, STOCK
from benchmarks.runner import MEMORY, Result

Results = dict[tuple[str, str], Result]  # by case and variant
Measure = Callable[[Result, Results], float | None]

# Ratios of microseconds on a toy graph say nothing about a kernel.
FEWEST_EDGES = 100_000

SCALE_15 = ("rmat:15:16", 64)
SCALE_17 = ("rmat:17:16", 128)


@dataclass(frozen=True)
class Yardstick:
    """One limit.

    Attributes:
        label: what the ratio is.
        case: name of the case it applies to.
        measure: the ratio, or None where a part of it is missing.
        limit: the value to reach.
        at_least: larger is better.
        at: (graph, features) it is meant for; None: any with `FEWEST_EDGES`.
    """

    label: str
    case: str
    measure: Measure
    limit: float
    at_least: bool = True
    at: tuple[str, int] | None = None


@dataclass(frozen=True)
class Verdict:
    """A yardstick held against a result."""

    title: str
    label: str
    value: float
    limit: float
    at_least: bool

    @property
    def passed(self) -> bool:
        if self.at_least:
            return self.value >= self.limit
        return self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        word = "pass" if self.passed else "miss"
        return f"{self.label} {self.value:.3g} ({sign} {self.limit:g}): {word}"


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _over(name: str, phase: str) -> Measure:
    """How many times faster than implementation ``name``."""
    return lambda r, _: _ratio(r.median(name, phase), r.median(OURS, phase))


def _over_best_peer(phase: str) -> Measure:
    return lambda r, _: _ratio(r.best_peer(phase), r.median(OURS, phase))


def _of_bound(phase: str) -> Measure:
    """The bound as a share of our time."""
    return lambda r, _: _ratio(r.bounds.get(phase), r.median(OURS, phase))


def _times_bound(phase: str) -> Measure:
    """Our time in multiples of the bound."""
    return lambda r, _: _ratio(r.median(OURS, phase), r.bounds.get(phase))


def _times_case(other: str, phase: str) -> Measure:
    """Our time in multiples of our time in another case of the run."""

    def measure(result: Result, results: Results) -> float | None:
        base = results.get((other, ""))
        if base is None:
            return None
        return _ratio(result.median(OURS, phase), base.median(OURS, phase))

    return measure


def _backward_in_forwards(result: Result, results: Results) -> float | None:
    return _ratio(result.median(OURS, BACKWARD), result.median(OURS, FORWARD))


def _flatness(over_bound: bool) -> Measure:
    """Dearest over cheapest edge of all sizes; told once, with the largest size.

    Args:
        over_bound: count multiples of the bound in place of seconds: a row in memory
            is dearer than one in the cache, whoever reads it.
    """

    def cost(result: Result) -> float | None:
        base = result.bounds.get(STEP) if over_bound else float(result.edges)
        return _ratio(result.median(OURS, STEP), base)

    def measure(result: Result, results: Results) -> float | None:
        family = result.variant.split()[0]
        costs = [
            (other.edges, found)
            for (name, variant), other in results.items()
            if name == result.case and variant.split()[0] == family
            if (found := cost(other)) is not None
        ]
        if len(costs) < 2 or result.edges != max(costs)[0]:
            return None
        return max(found for _, found in costs) / min(found for _, found in costs)

    return measure


def _layers() -> Iterable[Yardstick]:
    stock = {
        "gcn": (22, 14),
        "sage_mean": (25, 8),
        "sage_max": (45, 40),
        "gin": (14, 10),
        "graph_conv": (16, 8),
    }
    for case, (small, large) in stock.items():
        over = _over(STOCK, STEP)
        yield Yardstick("x PyG", case, over, small, at=SCALE_15)
        yield Yardstick("x PyG", case, over, large, at=SCALE_17)
        yield Yardstick("x best peer", case, _over_best_peer(STEP), 2)
        yield Yardstick("x bound", case, _times_bound(STEP), 1.25, at_least=False)


def _kernels() -> Iterable[Yardstick]:
    over_csr = _over("torch_csr", FORWARD)
    yield Yardstick("x torch CSR", "spmm_sum", over_csr, 3, at=SCALE_15)
    yield Yardstick("x torch CSR", "spmm_sum", over_csr, 5, at=SCALE_17)
    yield Yardstick("of the row-read bound", "spmm_sum", _of_bound(FORWARD), 0.9)
    yield Yardstick(
        "backward / forward", "spmm_sum", _backward_in_forwards, 1.2, at_least=False
    )
    for case, limit in (("spmm_weighted", 1.1), ("spmm_max", 1.5), ("spmm_min", 1.5)):
        over_sum = _times_case("spmm_sum", FORWARD)
        yield Yardstick("x spmm_sum", case, over_sum, limit, at_least=False)


def _share_beyond_bound(result: Result, results: Results) -> float | None:
    """The share of our time in percent that the bound does not explain."""
    share = _of_bound(FORWARD)(result, results)
    return None if share is None else 100 * (1 - share)


def _loading() -> Iterable[Yardstick]:
    over_stock = {
        "batch_8": 4,
        "batch_64": 15,
        "batch_256": 25,
        "batch_hetero": 15,
        "packing": 1,
    }
    for case, limit in over_stock.items():
        yield Yardstick("x PyG", case, _over(STOCK, FORWARD), limit)
    over_workers = _over("pyg, 2 workers", FORWARD)
    yield Yardstick("x PyG with 2 workers", "batch_256", over_workers, 10)
    copy = _times_bound(FORWARD)
    yield Yardstick("x a copy of the bytes", "batch_1024", copy, 3, at_least=False)
    share = _share_beyond_bound
    yield Yardstick("% of loading", "gin_epoch", share, 2, at_least=False)


YARDSTICKS = (
    *_layers(),
    *_kernels(),
    *_loading(),
    Yardstick("x PyG", "first_call", _over(STOCK, STEP), 6),
    Yardstick("PyG's memory / ours", "memory", _over(STOCK, MEMORY), 5),
    Yardstick(
        "dearest / cheapest edge", "scaling", _flatness(False), 1.5, at_least=False
    ),
    Yardstick(
        "the same over the bound", "scaling", _flatness(True), 1.5, at_least=False
    ),
)

# Its graph is tiny by intent.
SMALL = Yardstick("x PyG", "small", _over(STOCK, FORWARD), 1)


def judge(results: Iterable[Result]) -> list[Verdict]:
    """Holds every yardstick that applies against the results of a run."""
    by_key = {(r.case, r.variant): r for r in results}
    verdicts = []
    for result in by_key.values():
        for stick in (*YARDSTICKS, SMALL):
            if stick.case != result.case:
                continue
            if stick.at is not None and stick.at != (result.graph, result.features):
                continue
            if stick.at is None and result.edges < FEWEST_EDGES and stick is not SMALL:
                continue
            value = stick.measure(result, by_key)
            if value is not None:
                verdicts.append(
                    Verdict(
                        result.title, stick.label, value, stick.limit, stick.at_least
                    )
                )
    return verdicts
