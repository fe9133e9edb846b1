"""Figures, their medians and spread, and the tables that are printed. Pure.

A figure is a list of samples, one per round. A ratio is made within a round, of two samples that were taken one after the
other: what else the machine does then falls out of it as far as it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured thing. `target` is (">=" or "<=", number) where the project set one."""

    name: str
    unit: str
    samples: tuple[float, ...]
    target: tuple[str, float] | None = None

    @property
    def median(self) -> float:
        """The middle sample."""
        return float(median(self.samples))

    @property
    def met(self) -> bool | None:
        """Whether the median meets the target; None: there is none."""
        if self.target is None:
            return None
        sign, number = self.target
        return self.median >= number if sign == ">=" else self.median <= number

    def row(self) -> list[str]:
        """Its line of a table."""
        low, high = min(self.samples), max(self.samples)
        aim = "" if self.target is None else f"{self.target[0]} {shown(self.target[1])}"
        word = {None: "", True: "met", False: "missed"}[self.met]
        return [self.name, shown(self.median), f"{shown(low)} … {shown(high)}", self.unit, aim, word]

    def as_json(self) -> dict[str, Any]:
        """For the results file."""
        return {
            "name": self.name, "unit": self.unit, "median": self.median, "low": min(self.samples),
            "high": max(self.samples), "samples": list(self.samples),
            "target": None if self.target is None else "".join(map(str, self.target)), "met": self.met,
        }  # fmt: skip


@dataclass
class Result:
    """What one measurement found. `notes` are lines in words: what could not be measured, and what a figure means."""

    name: str
    title: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For the results file."""
        figures = [figure.as_json() for figure in self.figures]
        return {"name": self.name, "title": self.title, "figures": figures, "notes": self.notes}


def shown(number: float) -> str:
    """A number with about three digits, as people read it."""
    size = abs(number)
    if size >= 1000:
        return f"{number:,.0f}"
    return f"{number:.0f}" if size >= 100 else f"{number:.1f}" if size >= 10 else f"{number:.2f}"


def ratios(ours: Sequence[float], base: Sequence[float]) -> tuple[float, ...]:
    """Round by round ours ÷ base."""
    return tuple(a / b for a, b in zip(ours, base, strict=True))


def table(result: Result) -> str:
    """The result as aligned text."""
    rows = [["", "median", "spread", "unit", "target", ""], *(figure.row() for figure in result.figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = [f"── {result.title}"]
    for row in rows:
        cells = [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2])]
        cells += [cell.ljust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        lines.append("   ".join(cells).rstrip())
    return "\n".join([*lines, *(f"   {note}" for note in result.notes)])
