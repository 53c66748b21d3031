from __future__ import annotations
from dataclasses import dataclass
import numpy as np
from Gradient_evaluation.stats.group_size import group_size_law
from Gradient_evaluation.stats import summary

STUB = True


@dataclass(frozen=True)
class Quantity:
    kind: str
    names: tuple = ()
    K: int | None = None

    @classmethod
    def parse(cls, text):
        if text == "G_star":
            return cls("G_star")
        parts = text.split(":")
        if parts[0] not in ("trace", "snr", "difference"):
            raise ValueError("give G_star, trace:NAME:K, snr:NAME:K or difference:A:B:K")
        return cls(parts[0], tuple(parts[1:-1]), int(parts[-1]))

    def __str__(self):
        return "G*" if self.kind == "G_star" else f"{self.kind} of {self.names[0]} at K = {self.K}"


def estimate_of(quantity, prompts, theta, bootstrap):
    if quantity.kind == "G_star":
        law = group_size_law(prompts, theta, bootstrap)
        value, interval = law["G_star"], law["G_star_ci95"]
        if value is None:
            return None, None, None, law["reasons"]["G_star"]
        return value, *interval, None
    values = summary.prompt_trace_covs(prompts, quantity.K, quantity.names)[quantity.names[0]]
    e = bootstrap.mean(values)
    return e.value, *(e.interval or (None, None)), e.reason


def half_width(value, low, high):
    return (high - low) / 2 / abs(value)


def is_enough(value, low, high, until):
    return None not in (value, low, high) and high <= value * (1 + until) and low >= value * (1 - until)


def looks(most):
    n, found = 20, []
    while n < most:
        found.append(n)
        n += max(1, -(-n // 10))
    return found


def forecast(value, low, high, n, until):
    return None if None in (value, low, high) else int(np.ceil(n * (half_width(value, low, high) / until) ** 2))
