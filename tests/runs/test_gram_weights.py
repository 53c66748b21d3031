"""A Gram file keeps the importance weights of its continuations, and the statistics take them."""

from dataclasses import replace

import numpy as np
import pytest
from scripts import RESULTS, from_grams, read

from Gradient_evaluation.runs.machine import gram_store


def weighted(grams, out, log_weights):
    """The Grams of a run again, with these log weights (a function of the record)."""
    out.mkdir(parents=True)
    for path in grams.glob("*.json"):
        (out / path.name).write_bytes(path.read_bytes())
    for record in gram_store.load_all(grams):
        replace(record, log_weights=log_weights(record)).save(out)
    return out


def test_a_record_gives_its_weights_to_each_block(undisturbed, tmp_path):
    values = np.random.default_rng(0).normal(size=24)
    folder = weighted(undisturbed / "grams", tmp_path / "grams", lambda record: values - 800)
    record = next(gram_store.load_all(folder))
    assert np.array_equal(record.log_weights, values - 800)
    found = np.concatenate([block[3] for block in record.blocks])
    assert found == pytest.approx(np.exp(values - values.max()))
    assert record.mean_reward == pytest.approx(np.average(record.rewards, weights=np.exp(values)))
    plain = next(gram_store.load_all(undisturbed / "grams"))
    assert plain.log_weights is None and all(len(block) == 3 for block in plain.blocks)


def test_equal_weights_change_no_number_and_others_do(undisturbed, tmp_path):
    generator = np.random.default_rng(1)
    found = {}
    for name, log_weights in (
        ("none", lambda record: None),
        ("equal", lambda record: np.zeros(len(record.rewards))),
        ("uneven", lambda record: generator.normal(size=len(record.rewards))),
    ):
        grams = weighted(undisturbed / "grams", tmp_path / name / "grams", log_weights)
        more = ("--K_list", 4, 8, "--estimators", "all")
        assert from_grams(grams, tmp_path / name / "out", *more)[0] == 0
        found[name] = {
            key: value for key, value in read(tmp_path / name / "out" / RESULTS).items() if key not in ("config", "seconds")
        }
    assert found["equal"] == found["none"]
    assert found["uneven"]["conditional_on_x"]["grpo"] != found["none"]["conditional_on_x"]["grpo"]
    assert "importance weights" in found["uneven"]["reasons"]["estimators.std_verl.trace_cov"]
