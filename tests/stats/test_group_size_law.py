"""The group-size law against exact sums: constants, minibatch MSE, minimum, intervals, sketches, and its manners."""

import json
from itertools import product
from math import comb

import numpy as np
import pytest
from abstract_policy import Policy, coin, exact_pair_moments, group_size_law_of, leave_one_out, plain_case
from hypothesis import given, settings
from hypothesis import strategies as st

from Gradient_evaluation.runs.results.report import budget_table, group_size_report
from Gradient_evaluation.stats.blocks import pair_moments
from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.group_size.best_size import best_group_size, best_integer, mse_times_budget, near_best
from Gradient_evaluation.stats.group_size.sketch_pairs import (
    Sketches,
    SketchPart,
    pair_averages,
    pair_mean,
    pair_mean_covariance,
    pair_products,
    prompt_averaged_cosines,
    sketch_covariance,
)
from Gradient_evaluation.stats.silent_groups import RewardCounts, reward_counts

SHAPE = (12, 12)  # a gradient of the tests is one matrix of this shape, flattened
EXACT = dict(rel=1e-10, abs=1e-12)


def make_family(seed=0, n_prompts=5, n_outcomes=4, dim=6, common=1.0) -> list[Policy]:
    """Prompts asked with equal chance: scores of mean 0 that the prompts share in part, binary rewards."""
    generator = np.random.default_rng(seed)
    shared = generator.normal(size=(n_outcomes, dim))
    family = []
    for _ in range(n_prompts):
        probs = generator.dirichlet(np.full(n_outcomes, 3.0))
        scores = common * shared + generator.normal(size=(n_outcomes, dim))
        rewards = (np.arange(n_outcomes) < generator.integers(1, n_outcomes)).astype(float)
        family.append(Policy(probs, scores - probs @ scores, rewards, np.ones(n_outcomes, dtype=int)))
    return family


def exact_constants(family) -> tuple[float, float, float]:
    thetas = np.stack([policy.theta for policy in family])
    moments = [exact_pair_moments(policy) for policy in family]
    zeta1, zeta2 = (np.array([getattr(m, name) for m in moments]) for name in ("zeta1", "zeta2"))
    c1 = ((thetas - thetas.mean(0)) ** 2).sum(1).mean()
    return float(c1), float(4 * zeta1.mean()), float((2 * zeta2 - 4 * zeta1).mean())


def draw_groups(family, n, size, generator):
    """n prompts drawn from the family with ``size`` continuations each → which (n,), scores (n, size, d), rewards."""
    which = generator.integers(len(family), size=n)
    edges = np.cumsum([policy.probs for policy in family], axis=1)[which, None, :-1]
    index = (generator.random((n, size, 1)) > edges).sum(-1)
    scores, rewards = (np.stack([getattr(policy, name) for policy in family]) for name in ("scores", "rewards"))
    return which, scores[which[:, None], index], rewards[which[:, None], index]


def sample_prompts(family, n, block, generator):
    """n prompts drawn from the family, one block each → theta_sq, zeta1, zeta2, GRPO gradients (n, d), rewards counted (n,)."""
    which, scores, rewards = draw_groups(family, n, block, generator)
    moments = pair_moments(scores @ scores.swapaxes(1, 2), rewards)
    gradients = leave_one_out(scores, rewards, None)
    outcomes = [reward_counts(each, np.ones(block)) for each in rewards]
    return moments.theta_sq, moments.zeta1, moments.zeta2, gradients, outcomes


def sketch(gradients, k, seed):
    """Sketches (n, k*k) of gradients (n, 144), as docs/method.md has them, and their layout."""
    generator = np.random.default_rng(seed)
    rows, columns = (generator.choice([-1.0, 1.0], size=(side, k)) / np.sqrt(k) for side in SHAPE)
    made = np.einsum("nij,ia,jb->nab", gradients.reshape(-1, *SHAPE), rows, columns, optimize=True)
    return made.reshape(len(gradients), -1).astype(np.float32), [SketchPart(k, k, True, True)]


# --- the formula itself, by brute force ---


@pytest.mark.parametrize("n_groups, group_size", [(1, 2), (1, 4), (2, 2), (2, 3), (3, 2)])
def test_enumeration_of_every_minibatch_has_the_predicted_mse(n_groups, group_size):
    """All prompts of all groups and all their continuations: nothing but the definition of the minibatch gradient."""
    family = make_family(seed=3, n_prompts=2, n_outcomes=3, dim=4)
    atoms, chances = [], []
    for policy in family:
        index, chance = policy.tuples(group_size)
        atoms.append(leave_one_out(policy.scores[index], policy.rewards[index], None))
        chances.append(chance / len(family))
    atoms, chances = np.concatenate(atoms), np.concatenate(chances)
    choice = np.array(list(product(range(len(atoms)), repeat=n_groups)))
    gradients, chance = atoms[choice].mean(1), chances[choice].prod(1)
    target = np.mean([policy.theta for policy in family], axis=0)
    mse = chance @ ((gradients - target) ** 2).sum(1)
    predicted = mse_times_budget(*exact_constants(family), group_size) / (n_groups * group_size)
    assert mse == pytest.approx(predicted, **EXACT)


@pytest.mark.parametrize("seed", range(4))
def test_enumerated_groups_follow_the_law_at_every_size(seed):
    family = make_family(seed=seed, n_outcomes=3, dim=4)
    c1, c2, c3 = exact_constants(family)
    thetas = np.stack([policy.theta for policy in family])
    between = ((thetas - thetas.mean(0)) ** 2).sum(1).mean()
    sizes = range(2, 9)
    exact = [size * (between + np.mean([p.moments(leave_one_out, size)[1] for p in family])) for size in sizes]
    assert exact == pytest.approx([mse_times_budget(c1, c2, c3, size) for size in sizes], **EXACT)
    best = best_group_size(c1, c3)
    assert 2 < best < 8
    assert sizes[int(np.argmin(exact))] == best_integer(c1, c2, c3) in (np.floor(best), np.ceil(best))


def test_simulated_minibatches_have_the_predicted_mse():
    family, budget, repeats = make_family(seed=1), 64, 6000
    constants = exact_constants(family)
    target = np.mean([policy.theta for policy in family], axis=0)
    generator, found, errors, sizes = np.random.default_rng(0), [], [], (2, 4, 8, 16, 32, 64)
    for size in sizes:
        _, scores, rewards = draw_groups(family, repeats * budget // size, size, generator)
        groups = leave_one_out(scores, rewards, None)
        minibatches = groups.reshape(repeats, budget // size, -1).mean(1)
        squares = ((minibatches - target) ** 2).sum(1)
        found.append(squares.mean())
        errors.append(squares.std() / np.sqrt(repeats))
    predicted = mse_times_budget(*constants, np.array(sizes)) / budget
    assert np.abs(np.array(found) - predicted).max() < 4 * max(errors)
    assert (np.abs(np.array(found) - predicted) < 4 * np.array(errors)).all()
    assert np.argmin(found) == np.argmin(predicted)


# --- the constants from sampled blocks ---


@pytest.mark.parametrize("sketched", [False, True], ids=["whole_gradients", "sketches"])
def test_constants_from_sampled_blocks_are_the_exact_sums(sketched):
    family = make_family(seed=2, dim=144)
    truth = dict(zip(("c1", "c2", "c3"), exact_constants(family)))
    generator, found = np.random.default_rng(0), []
    for seed in range(60):
        *moments, gradients, values = sample_prompts(family, 12, 8, generator)
        layout = None
        if sketched:
            gradients, layout = sketch(gradients, 4, seed)
        result = group_size_law_of((*moments, gradients, values), 20, layout=layout)
        found.append([result[name] for name in truth])
    error = np.std(found, axis=0, ddof=1) / np.sqrt(len(found))
    difference = np.mean(found, axis=0) - list(truth.values())
    assert (np.abs(difference) < 4 * error).all() and (error < 0.1 * np.array(list(truth.values()))).all()


def test_many_prompts_give_the_law_of_the_exact_constants():
    family = make_family(seed=2)
    c1, c2, c3 = exact_constants(family)
    result = group_size_law_of(sample_prompts(family, 1500, 16, np.random.default_rng(0)), 300)
    target = np.mean([policy.theta for policy in family], axis=0)
    size = result["gradient_noise_scale_G"]
    truth = {
        "c1": c1,
        "c2": c2,
        "c3": c3,
        "G_star": 1 + np.sqrt(c3 / c1),
        "mean_theta_norm_sq": target @ target,
        "gradient_noise_scale": (c1 + c2 / size + c3 / (size * (size - 1))) / (target @ target),
    }
    for name, value in truth.items():
        low, high = result[f"{name}_ci95"]
        slack = (high - low) / 2  # four standard errors in all: 95% would fail one run in twenty
        assert low - slack < value < high + slack, name
        assert high - low < 0.5 * value, name
    assert result["G_star_paper_bound"] == pytest.approx(result["G_star"] - 1)
    curve = result["curve"]
    assert curve["G"] == list(range(2, 513))
    assert curve["mse_times_N"] == pytest.approx([result["c1"] * g + result["c2"] + result["c3"] / (g - 1) for g in curve["G"]])
    assert np.sum([curve["terms"][name] for name in ("c1", "c2", "c3")], axis=0) == pytest.approx(curve["mse_times_N"])
    for value, (low, high) in zip(curve["mse_times_N"], curve["ci95"]):
        assert low < value < high
    assert result["best_integer"] == curve["G"][int(np.argmin(curve["mse_times_N"]))]


# --- pairs of prompts: no pair with itself, intervals that hold ---


def noisy_gradients(n, noise, mean, generator, dim=20):
    between = generator.normal(size=(n, dim)) * 0.3 * np.linspace(1, 0.1, dim)
    return mean * np.eye(dim)[0] + between + noise * generator.normal(size=(n, dim))


def test_the_pair_mean_does_not_hold_a_prompts_own_noise():
    generator = np.random.default_rng(0)
    found = [pair_mean(pair_products(noisy_gradients(6, 2.0, 0.5, generator))) for _ in range(4000)]
    error = np.std(found) / np.sqrt(len(found))
    assert abs(np.mean(found) - 0.25) < 4 * error and error < 0.1  # own pairs would add 80 / 6


def test_the_variance_of_the_pair_mean_is_unbiased():
    generator = np.random.default_rng(1)
    products = [pair_products(noisy_gradients(12, 0.4, 1.0, generator)) for _ in range(1500)]
    spread = np.var([pair_mean(table) for table in products])
    assert np.mean([pair_mean_covariance([table])[0, 0] for table in products]) == pytest.approx(spread, rel=0.15)


def test_a_resample_pairs_no_prompt_with_its_own_copy():
    """Pairs of copies would lift every resample by ||s||^2 / n, here more than fifteen times the spread."""
    gradients = noisy_gradients(25, 0.0, 0.0, np.random.default_rng(0), dim=2000)
    gradients += 3 * np.random.default_rng(1).normal(size=gradients.shape)
    products = pair_products(gradients)
    resampled = pair_averages([], [products], PromptBootstrap(25, 500, 0)).resampled
    assert abs(resampled.mean() - pair_mean(products)) < 0.1 * resampled.std()
    assert (gradients**2).sum(1).mean() / 25 > 15 * resampled.std()


@pytest.mark.parametrize("noise, mean", [(0.0, 1.0), (1.0, 0.0), (1.0, 0.3), (3.0, 0.3)])
def test_intervals_of_the_pair_mean_hold_the_truth(noise, mean):
    generator, bootstrap, widths = np.random.default_rng(2), PromptBootstrap(30, 300, 0), []
    held, values = 0, []
    for _ in range(300):
        averages = pair_averages([], [pair_products(noisy_gradients(30, noise, mean, generator))], bootstrap)
        value, draws = averages.draws(lambda mean: mean)
        low, high = bootstrap.interval(draws, value)
        held += low <= mean**2 <= high
        widths.append(high - low)
        values.append(value)
    assert held / 300 > 0.9
    assert np.mean(widths) < 1.35 * 3.92 * np.std(values)  # noise counted as in a resample: 1.7 times too wide


def test_a_pair_mean_and_a_plain_mean_are_resampled_together():
    """c1 of prompts with equal gradients and equal norms is 0 in every resample: the two parts cancel."""
    gradients = np.random.default_rng(0).normal(size=(12, 5))
    table = np.full((12, 12), 2.0)
    np.fill_diagonal(table, 0.0)
    plain = (gradients**2).sum(1)
    halves = (plain[:, None] + plain) / 2 * (1 - np.eye(12))
    averages = pair_averages([plain], [table, halves], PromptBootstrap(12, 50, 0))
    assert averages.linear(np.array([[0.0, 1.0, 0.0]]))[1] == pytest.approx(2.0)
    value, draws = averages.linear(np.array([[1.0, 0.0, 0.0]]))
    again, halved = averages.linear(np.array([[0.0, 0.0, 1.0]]))  # the mean of (a_x + a_y)/2 over pairs is that of a
    assert again == pytest.approx(value) and np.corrcoef(draws[:, 0], halved[:, 0])[0, 1] > 0.99


def test_intervals_hold_over_prompts_and_sketches():
    """With a coarse sketch (k = 6); leaving its error out, the interval of ||mean theta||^2 fails far too often."""
    family = make_family(seed=4, n_prompts=12, dim=144, common=0.7)
    c1, c2, c3 = exact_constants(family)
    target = np.mean([policy.theta for policy in family], axis=0)
    truth = {"c1": c1, "c2": c2, "c3": c3, "G_star": 1 + np.sqrt(c3 / c1), "mean_theta_norm_sq": target @ target}
    held, without, generator, repeats = {name: [] for name in truth}, 0, np.random.default_rng(5), 120
    for seed in range(repeats):
        *moments, gradients, _ = sample_prompts(family, 60, 24, generator)
        sketches, layout = sketch(gradients, 6, seed)
        result = group_size_law_of((*moments, sketches), 200, seed, layout)
        for name, value in truth.items():
            if result[name] is not None:
                low, high = result[f"{name}_ci95"]
                held[name].append(low <= value <= (np.inf if high is None else high))
        bare = group_size_law_of((*moments, sketches), 200, seed)["mean_theta_norm_sq_ci95"]
        without += bare[0] <= target @ target <= bare[1]
    assert min(map(len, held.values())) > 0.9 * repeats
    assert {name: np.mean(each) > 0.86 for name, each in held.items()} == dict.fromkeys(truth, True), held
    assert without / repeats < 0.75, without


# --- the sketch's error ---


@pytest.mark.parametrize("rank", [1, 4])
def test_one_sketch_gives_the_spread_over_sketches(rank):
    generator = np.random.default_rng(0)
    common = generator.normal(size=(SHAPE[0], rank)) @ generator.normal(size=(rank, SHAPE[1]))
    gradients = common.ravel() + 0.5 * generator.normal(size=(10, 144))
    found, claimed = [], []
    for seed in range(600):
        sketches, layout = sketch(gradients, 6, seed)
        found.append(pair_mean(pair_products(sketches)))
        claimed.append(sketch_covariance([(sketches, sketches)], layout, None)[0, 0])
    exact = pair_mean(pair_products(gradients))
    assert abs(np.mean(found) - exact) < 4 * np.std(found) / np.sqrt(600)
    assert np.mean(claimed) == pytest.approx(np.var(found), rel=0.2)
    assert np.std(found) < 2 * np.sqrt(1 / 6 + 1 / 36) * exact * 1.1  # the bound taken without a layout


def test_the_interval_holds_where_the_sketch_alone_decides():
    """The interval of the norm of the mean, of prompts without a difference."""
    generator, held = np.random.default_rng(0), 0
    common = generator.normal(size=(SHAPE[0], 4)) @ generator.normal(size=(4, SHAPE[1]))
    gradients = np.tile(common.ravel(), (6, 1))  # prompts without a difference: nothing for the bootstrap to see
    for seed in range(200):
        sketches, layout = sketch(gradients, 12, seed)
        result = group_size_law_of((*plain_case(n=6)[:3], sketches), 200, seed, layout)
        low, high = result["mean_theta_norm_sq_ci95"]
        assert 0 < low < result["mean_theta_norm_sq"] < high
        held += low <= common.ravel() @ common.ravel() <= high
    assert held / 200 > 0.87


@pytest.mark.parametrize("random_rows, random_columns", [(True, False), (False, True), (False, False)])
def test_a_side_that_was_kept_whole_has_no_sketch_error(random_rows, random_columns):
    generator = np.random.default_rng(0)
    gradients = generator.normal(size=(8, *SHAPE)) + generator.normal(size=SHAPE)
    found, claimed = [], []
    for _ in range(4000):
        left, right = (generator.choice([-1.0, 1.0], size=(12, 5)) / np.sqrt(5) for _ in range(2))
        made = np.einsum("ia,nij->naj", left, gradients) if random_rows else gradients
        made = made @ right if random_columns else made
        layout = [SketchPart(*made.shape[1:], random_rows, random_columns)]
        made = made.reshape(8, -1)
        found.append(pair_mean(pair_products(made)))
        claimed.append(sketch_covariance([(made, made)], layout, None)[0, 0])
    assert np.mean(claimed) == pytest.approx(np.var(found), rel=0.25, abs=1e-18)


def test_the_sketch_error_of_c1_is_small_and_shrinks():
    """Far smaller than that of the norm of the mean; a larger sketch has a smaller error."""
    family = make_family(seed=4, dim=144, common=0.3)
    *moments, gradients, _ = sample_prompts(family, 60, 12, np.random.default_rng(0))
    spread = {}
    for k in (3, 6, 12):
        results = [group_size_law_of((*moments, sketch(gradients, k, seed)[0]), 2) for seed in range(40)]
        spread[k] = [
            np.std([result[name] for result in results]) / np.mean([result[name] for result in results])
            for name in ("c1", "mean_theta_norm_sq")
        ]
    assert all(c1 < 0.4 * norm for c1, norm in spread.values())
    assert spread[12][0] < spread[6][0] < spread[3][0]


def test_sketch_and_layout_that_do_not_fit_are_refused():
    gradients = np.ones((5, 8))
    with pytest.raises(ValueError, match="8 entries, its layout 9"):
        sketch_covariance([(gradients, gradients)], [SketchPart(3, 3, True, True)], 3)
    with pytest.raises(ValueError, match="at least 2"):
        sketch_covariance([(gradients, gradients)], [SketchPart(1, 8, True, False)], 1)


# --- the minimum and the range, against plain search ---


constants = st.floats(1e-3, 1e3)


@settings(max_examples=200, deadline=None)
@given(c1=constants, c2=constants, c3=st.floats(1e-9, 1e4))
def test_the_best_integer_and_range_are_those_of_a_search(c1, c2, c3):
    sizes = np.arange(2, 20000)
    curve = mse_times_budget(c1, c2, c3, sizes)
    least = curve.min()
    best = int(best_integer(c1, c2, c3))
    assert mse_times_budget(c1, c2, c3, best) == pytest.approx(least, rel=1e-12, abs=1e-12)
    low, high = near_best(c1, c2, c3)
    inside = sizes[curve <= 1.1 * least * (1 + 1e-12)]
    assert low == pytest.approx(inside[0], abs=1) and mse_times_budget(c1, c2, c3, low) <= 1.1 * least * (1 + 1e-6)
    if high < sizes[-1]:
        assert high == pytest.approx(inside[-1], abs=1)
        assert mse_times_budget(c1, c2, c3, high) <= 1.1 * least * (1 + 1e-6)


def test_powers_of_two_are_those_in_the_range():
    result = group_size_law_of(sample_prompts(make_family(seed=2), 400, 16, np.random.default_rng(0)))
    low, high = result["within_10_percent"]
    assert result["powers_of_two"] == [power for power in (2, 4, 8, 16, 32, 64, 128, 256, 512) if low <= power <= high]
    (low_low, low_high), (high_low, high_high) = result["within_10_percent_ci95"]
    assert low_low <= low <= low_high and high_low <= high <= high_high


# --- cases without an answer ---


ANSWERS = ("G_star", "G_star_ci95", "best_integer", "within_10_percent", "powers_of_two", "G_star_at_least")


def test_rewards_that_never_differ_have_no_best_group_size():
    """As of blocks whose rewards are all equal: every moment of GRPO is exactly 0."""
    rewards, grams = np.full((6, 8), 0.1), np.random.default_rng(0).normal(size=(6, 8, 20))
    moments = pair_moments(grams @ grams.swapaxes(1, 2), rewards)
    result = group_size_law_of((moments.theta_sq, moments.zeta1, moments.zeta2, np.zeros((6, 4))))
    intervals = [f"{name}_ci95" for name in ("c1", "c2", "c3", "mean_theta_sq", "mean_theta_norm_sq")]
    for name in (*ANSWERS, *intervals, "almost_best", "more_prompts", "gradient_noise_scale"):
        assert result[name] is None and result["reasons"][name].startswith("no reward ever differed"), name
    assert result["relative_mse"]["value"] is None and "no reward ever differed" in result["reasons"]["relative_mse"]
    assert "no best group size: no reward ever differed" in group_size_report(result, budget=64)
    json.dumps(result, allow_nan=False)


def test_rewards_that_differ_are_not_said_to_be_equal():
    result = group_size_law_of((np.r_[0.0, 1.0, -1.0, 0, 0], np.zeros(5), np.r_[0.0, -1.0, 2.0, 0, 0], np.zeros((5, 4))))
    assert result["G_star"] is None and "no reward ever differed" not in result["reasons"]["G_star"]


@pytest.mark.parametrize("c1, c3", [(1.0, -0.5), (0.0, -3.0), (-2.0, -0.1)])
def test_a_c3_not_above_zero_is_noise(c1, c3):
    """c3 >= 0 for every policy, so such an estimate says that more is needed, and not that G = 2 is best."""
    assert np.isnan(best_group_size(c1, c3)) and np.isnan(best_integer(c1, 1.0, c3))
    result = group_size_law_of(plain_case(c1=c1, c3=c3), 100)
    for name in (*ANSWERS, "almost_best"):
        assert result[name] is None and "c3" in result["reasons"][name] and "noise" in result["reasons"][name], name
    assert result["relative_mse"]["value"] is None and "noise" in result["reasons"]["relative_mse"]
    text = group_size_report(result, budget=64)
    assert "no best group size: c3" in text and text.count("so this is noise") == 1 and "within 10%" not in text
    json.dumps(result, allow_nan=False)


def test_the_less_c1_is_known_the_less_is_said_of_g_star():
    """The same estimates of c1 and c3; only the spread of theta_sq over prompts, hence the error of c1, differs."""
    theta_sq, *rest = plain_case(c3=400.0)
    ends = []
    for spread in (0.1, 0.8, 2.5, 6.0):
        result = group_size_law_of((1 + (theta_sq - theta_sq.mean()) * spread / theta_sq.std(), *rest), 400)
        ends.append((result["G_star_at_least"], result["G_star_ci95"], result["G_star_may_be_larger"]))
    bounds, intervals, larger = zip(*ends)
    assert bounds[0] > bounds[1] > bounds[2] > bounds[3] > 2
    assert intervals[0][1] < intervals[1][1] and intervals[2][1] is None and intervals[3] is None
    assert larger == (False, False, True, None)


def test_no_group_size_below_two_is_ever_proposed():
    result = group_size_law_of(plain_case(c1=4.0, c3=1.0), 100)
    assert result["G_star"] == 2.0 and result["c3"] > 0


def test_a_c1_that_may_be_zero_asks_for_more_prompts():
    result = group_size_law_of(plain_case(c1=0.05, spread=0.5), 300)
    assert result["c1_ci95"][0] <= 0 < result["c1_ci95"][1]
    for name in ("G_star", "G_star_ci95", "within_10_percent", "powers_of_two", "gradient_noise_scale"):
        assert result[name] is None and "cannot be told from 0" in result["reasons"][name]
    assert result["more_prompts"] > 0 and str(result["more_prompts"]) in result["reasons"]["G_star"]
    assert result["curve"]["mse_times_N"] is not None and result["curve"]["ci95"] is not None
    json.dumps(result, allow_nan=False)


def test_where_the_sketch_hides_c1_it_asks_for_a_larger_one():
    theta_sq, zeta1, zeta2, _, values = plain_case(spread=0.001, c1=0.001)
    theta_sq = theta_sq + 3.0
    gradients = 1.0 + 1e-4 * np.random.default_rng(0).normal(size=(40, 3))
    result = group_size_law_of((theta_sq, zeta1, zeta2, gradients, values), 100, dim=4)
    assert result["more_prompts"] is None and "--sketch_dim" in result["reasons"]["G_star"]
    assert result["sketch_standard_error"] == pytest.approx(2 * np.sqrt(1 / 4 + 1 / 16) * result["mean_theta_norm_sq"])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_prompts_are_reasons_not_errors(n):
    result = group_size_law_of(plain_case(n=n, mean=1.0))
    nulls = [name for name, value in result.items() if value is None]
    assert {"c1_ci95", "G_star", "G_star_ci95", "within_10_percent", "gradient_noise_scale"} <= set(nulls)
    assert set(nulls) <= set(result["reasons"])
    assert (result["c1"] is None) == (n == 1) and result["c2"] is not None
    assert ("needs at least two" if n == 1 else "fewer than 4") in result["reasons"]["G_star"]
    assert n > 1 or "needs at least two" in result["reasons"]["c1"] and "interval" in result["reasons"]["c2_ci95"]
    json.dumps(result, allow_nan=False)
    assert "no best group size" in group_size_report(result, budget=64)


def test_records_without_sketches_say_so():
    *moments, _, values = plain_case()
    result = group_size_law_of((*moments, None, values))
    assert result["c1"] is None and "--sketch_dim" in result["reasons"]["c1"] and result["c3_ci95"] is not None
    assert "--sketch_dim" in group_size_report(result) and all(
        name in result["reasons"] for name, value in result.items() if value is None
    )
    json.dumps(result, allow_nan=False)


def test_the_noise_scale_has_its_formula_or_is_null():
    result = group_size_law_of(plain_case(mean=0.0), 100)
    assert result["G_star"] is not None and result["gradient_noise_scale"] is None
    assert "includes 0" in result["reasons"]["gradient_noise_scale"]
    result = group_size_law_of(plain_case(mean=1.0), 100)
    size = result["gradient_noise_scale_G"]
    mse = result["c1"] + result["c2"] / size + result["c3"] / (size * (size - 1))
    assert result["gradient_noise_scale"] == pytest.approx(mse / result["mean_theta_norm_sq"])
    assert size == result["best_integer"] > 2
    assert result["gradient_noise_scale_ci95"][0] < result["gradient_noise_scale"] < result["gradient_noise_scale_ci95"][1]


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda case: [case[0] * np.nan, *case[1:]], "the moments of the prompts have a value that is not finite"),
        (lambda case: [*case[:3], case[3] * np.inf, case[4]], "the sketches of the prompts have a value that is not finite"),
    ],
)
def test_values_that_are_not_finite_are_refused(spoil, message):
    with pytest.raises(ValueError, match=message):
        group_size_law_of(spoil(plain_case()))


# --- silent groups, budgets, words ---


def test_the_silent_share_is_the_mean_over_prompts():
    """4 continuations: all equal; 3 of one reward; all different."""
    outcomes = [RewardCounts(np.arange(len(c)) - 0.5, np.array(c), np.ones(len(c))) for c in ([4], [3, 1], [1, 1, 1, 1])]
    silent = group_size_law_of((*plain_case(n=3)[:3], None, outcomes), 20)["silent_share"]
    assert silent["share"][:2] == pytest.approx([(1 + 3 / 6 + 0) / 3, 1 / 3])
    assert silent["continuations"] == 4 and silent["share"][2:] == [None] * 7 == silent["ci95"][2:]


def test_an_unknown_silent_share_is_null_with_its_reason():
    *case, outcomes = plain_case()
    result = group_size_law_of((*case, [coin(16)] * len(outcomes)), 20)
    assert "16 continuations" in result["reasons"]["silent_share.share"]
    assert [row["silent_share"] is None for row in budget_table(result, 32)] == [False] * 4 + [True]
    assert "silent" in group_size_report(result, 32)


def test_the_budget_table_counts_what_is_really_used():
    result = group_size_law_of(plain_case())
    rows = budget_table(result, 100)
    assert [row["G"] for row in rows] == [2, 4, 8, 16, 32, 64] and [row["B"] for row in rows] == [50, 25, 12, 6, 3, 1]
    for row in rows:
        expected = (result["c1"] + result["c2"] / row["G"] + result["c3"] / row["G"] / (row["G"] - 1)) / row["B"]
        assert row["mse"] == pytest.approx(expected) and row["continuations"] == row["G"] * row["B"] <= 100
        assert row["mse_ci95"][0] < row["mse"] < row["mse_ci95"][1]
        assert row["silent_share"] == pytest.approx(2 * comb(256, row["G"]) / comb(512, row["G"]))
    assert [row["G"] for row in budget_table(result, 10**6)] == [g for g in 2 ** np.arange(1, 10)]
    with pytest.raises(ValueError, match="at least|must hold"):
        budget_table(result, 1)


def test_the_report_states_constants_and_best_size():
    result = group_size_law_of(plain_case(mean=1.0), 100)
    text = group_size_report(json.loads(json.dumps(result)), budget=32)
    for piece in (f"c1 = {result['c1']:.4g}", f"G* = {result['G_star']:.3g}", "within 10%", "sqrt(c3/c1)", "noise scale"):
        assert piece in text
    assert text.splitlines()[-1].startswith("This is a prediction") and "at 32 continuations" in text


def test_one_seed_gives_one_law():
    case = plain_case()
    assert group_size_law_of(case, seed=3) == group_size_law_of(case, seed=3) != group_size_law_of(case, seed=4)


# --- cosines of prompt-averaged means ---


def test_cosines_are_those_of_the_means_over_prompts():
    """An estimator at 60 degrees from theta on average, in noise that makes every single prompt's cosine near 0."""
    generator = np.random.default_rng(0)
    theta_mean, other = np.eye(30)[0], np.array([0.5, np.sqrt(0.75)] + [0.0] * 28)

    def around(mean):
        return mean + 0.4 * generator.normal(size=(300, 30))

    sketches = np.stack([around(3 * theta_mean), around(other), around(0 * other)], axis=1)
    found = prompt_averaged_cosines(
        sketches, ["same", "sixty", "none"], Sketches(around(theta_mean)), PromptBootstrap(300, 200)
    )
    for name, truth in (("same", 1.0), ("sixty", 0.5)):
        low, high = found[name]["ci95"]
        assert low < truth < high and high - low < 0.15 and found[name]["cosine"] == pytest.approx(truth, abs=0.05)
    assert found["none"]["cosine"] is None and "||mean none||^2" in found["none"]["reason"]


def test_the_sketch_error_cancels_where_two_estimators_agree():
    gradients = np.random.default_rng(0).normal(size=(40, 144)) * 0.1 + 1.0
    sketches, layout = sketch(gradients, 8, seed=0)
    found = prompt_averaged_cosines(sketches[:, None], ["grpo"], Sketches(sketches, layout), PromptBootstrap(40, 200))["grpo"]
    assert found["cosine"] == pytest.approx(1.0) and found["ci95"] == pytest.approx([1.0, 1.0], abs=1e-6)


@pytest.mark.parametrize("n", [1, 3])
def test_cosines_of_few_prompts_are_null_with_the_reason(n):
    found = prompt_averaged_cosines(np.ones((n, 1, 4)), ["a"], Sketches(np.ones((n, 4))), PromptBootstrap(n, 20))["a"]
    assert found["cosine"] is None and found["reason"]


@pytest.mark.parametrize("unit", [1e-30, 1e30])
@pytest.mark.filterwarnings("error")
def test_the_unit_of_the_rewards_changes_no_answer(unit):
    theta_sq, zeta1, zeta2, gradients, outcomes = plain_case(n=12, c1=0.3, spread=1.0)
    plain = group_size_law_of((theta_sq, zeta1, zeta2, gradients, outcomes))
    square = unit**2
    law = group_size_law_of((theta_sq * square, zeta1 * square, zeta2 * square, gradients * unit, outcomes))
    assert plain["more_prompts"] is not None and law["more_prompts"] == plain["more_prompts"]
    assert law["relative_mse"]["value"] == pytest.approx(plain["relative_mse"]["value"], rel=1e-9)
    assert law["c1"] == pytest.approx(plain["c1"] * square, rel=1e-9)
