"""Every example in the docstrings of stats/ is run."""

import doctest
import importlib
import pkgutil

import Gradient_evaluation.stats


def test_the_examples_in_docstrings_are_right():
    names = [module.name for module in pkgutil.iter_modules(Gradient_evaluation.stats.__path__)]
    found = {name: doctest.testmod(importlib.import_module(f"Gradient_evaluation.stats.{name}")) for name in names}
    assert [name for name, each in found.items() if each.failed] == []
    assert {name for name, each in found.items() if each.attempted} >= {"advantages", "best_size", "blocks", "missing"}
