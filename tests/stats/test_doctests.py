"""Every example in the docstrings of stats/ is run."""

import doctest
import importlib
import pkgutil

import Gradient_evaluation.stats


def test_the_examples_in_docstrings_are_right():
    modules = pkgutil.walk_packages(Gradient_evaluation.stats.__path__, "Gradient_evaluation.stats.")
    found = {module.name.rpartition(".")[2]: doctest.testmod(importlib.import_module(module.name)) for module in modules}
    assert [name for name, each in found.items() if each.failed] == []
    assert {name for name, each in found.items() if each.attempted} >= {"advantages", "best_size", "blocks", "missing"}
