from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing import answers, fitted, table

from windlass.errors import BadInput
from windlass.tasks.route.decide.path import walk
from windlass.tasks.route.decide.predict import PromptPredictor
from windlass.tasks.route.decide.router_file import decode_router, encode_router
from windlass.tasks.route.fit.confident import auc, best_threshold, logistic
from windlass.tasks.route.fit.curve import gap_curve, with_intervals
from windlass.tasks.route.fit.encode import Encoded, encode, read
from windlass.tasks.route.fit.fit import FitOptions, fit
from windlass.tasks.route.fit.floor import Margins, cheapest_that_holds, check_floor
from windlass.tasks.route.fit.folds import clusters_of, make_folds
from windlass.tasks.route.fit.model import fit_predictor
from windlass.tasks.route.fit.ridge import fit_ridge
from windlass.tasks.route.report.report import report_of
from windlass.tasks.route.tables.table import make_table

pytestmark = pytest.mark.pure


# --- folds


@given(st.lists(st.integers(0, 8), min_size=5, max_size=60), st.integers(0, 5))
def test_every_row_is_held_out_once_and_clusters_stay_together(clusters: list[int], seed: int) -> None:
    folds = make_folds(clusters, seed=seed)
    held = np.concatenate([fold.held_out for fold in folds])
    assert sorted(held.tolist()) == list(range(len(clusters)))
    for fold in folds:
        assert not set(fold.train.tolist()) & set(fold.held_out.tolist())
        assert not {clusters[i] for i in fold.train} & {clusters[i] for i in fold.held_out}


def test_equal_prompts_are_one_cluster_whatever_their_blanks() -> None:
    assert len(set(clusters_of(["A  b", "a B", "c"], ["x", "y", "z"], "prompts"))) == 2
    assert clusters_of(["a", "b"], ["x", "x"], "groups") == ["x", "x"]


# --- regression


def test_ridge_is_the_solution_of_its_normal_equations() -> None:
    raw = read([f"red {i % 3} blue{'!' * (i % 5)} green {i % 7}" for i in range(60)])
    is_train = np.arange(60) % 5 > 0
    encoded = encode(raw, is_train)
    target = np.random.default_rng(0).normal(size=(60, 2))
    inputs = _dense(encoded)
    within, bias = inputs[is_train], target[is_train].mean(axis=0)
    penalties = (30.0, 3.0, 10.0)
    for penalty, found in zip(penalties, fit_ridge(encoded, is_train, target, penalties), strict=True):
        exact = np.linalg.solve(within.T @ within + penalty * np.eye(inputs.shape[1]), within.T @ (target[is_train] - bias))
        assert np.allclose(found.predict(encoded), inputs @ exact + bias, atol=0.02)


def _dense(encoded: Encoded) -> np.ndarray:
    """Rows as the regression sees them, one unit of weight at a time."""
    size = encoded.num_words + encoded.shape.shape[1]
    return np.stack([encoded.times(unit) for unit in np.eye(size, dtype=np.float32)], axis=1)


def test_rows_of_length_one_and_their_transposed_product() -> None:
    encoded = encode(read(["red blue", "blue red green", "green", "unique"]), np.array([True, True, True, False]))
    dense = _dense(encoded)
    lengths = np.linalg.norm(dense[:, : encoded.num_words], axis=1)
    assert np.allclose(lengths, [1, 1, 1, 0], atol=1e-5) and encoded.novelty()[3] == 1
    rows = np.arange(4, dtype=np.float32)
    assert np.allclose(encoded.transposed_times(rows), dense.T @ rows, atol=1e-4)


def test_the_difference_of_two_models_is_the_regression_of_the_gain() -> None:
    raw = read(table().prompts)
    every = np.ones(len(raw), dtype=np.bool_)
    encoded = encode(raw, every)
    both = fit_ridge(encoded, every, table().scores, (5.0,))[0].predict(encoded)
    gain = fit_ridge(encoded, every, table().scores[:, [1]] - table().scores[:, [0]], (5.0,))[0].predict(encoded)
    assert np.allclose(both[:, 1] - both[:, 0], gain[:, 0], atol=0.01)


# --- curves


def test_a_perfect_order_a_useless_one_and_no_gap() -> None:
    small, large = np.array([1.0, 1.0, 0.0, 0.0]), np.array([1.0, 1.0, 1.0, 1.0])
    perfect = gap_curve(large - small, small, large)
    assert perfect is not None and perfect.apgr == pytest.approx(0.75) and perfect.cpt50 == pytest.approx(0.25)
    useless = gap_curve(np.zeros(4), small, large)
    assert useless is not None and useless.apgr == pytest.approx(0.5) and useless.cpt80 == pytest.approx(0.8)
    assert gap_curve(np.zeros(4), large, small) is None


@given(st.integers(0, 1000))
def test_ties_do_not_depend_on_the_order_of_rows(seed: int) -> None:
    random = np.random.default_rng(seed)
    small, large, order = (random.integers(0, 2, 40).astype(float) for _ in range(3))
    shuffled = random.permutation(40)
    one, other = gap_curve(order, small, large), gap_curve(order[shuffled], small[shuffled], large[shuffled])
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one.apgr == pytest.approx(other.apgr)


def test_intervals_hold_the_value_and_clusters_widen_them() -> None:
    random = np.random.default_rng(0)
    groups = np.repeat(np.arange(12), 40)
    gain = random.normal(size=12)[groups] * 0.3 + 0.2
    small = (random.random(480) < 0.5).astype(float)
    large = np.clip(small + (random.random(480) < np.clip(gain, 0, 1)), 0, 1)
    order = gain + random.normal(size=480)
    rows = with_intervals(order, small, large, "rows")
    whole = with_intervals(order, small, large, "groups", groups.tolist())
    assert rows is not None and whole is not None and rows.apgr_interval is not None and whole.apgr_interval is not None
    assert rows.apgr_interval[0] < rows.apgr < rows.apgr_interval[1]
    assert whole.apgr_interval[1] - whole.apgr_interval[0] > rows.apgr_interval[1] - rows.apgr_interval[0]


# --- the floor


def _useless(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of a worse and a better model, and chances that say little."""
    random = np.random.default_rng(seed)
    scores = np.stack([(random.random(count) < 0.6), (random.random(count) < 0.8)], axis=1).astype(float)
    return scores, np.clip(scores.mean(axis=0) + random.normal(size=(count, 2)) * 0.05, 0, 1)


def test_the_floor_is_missed_as_rarely_as_promised() -> None:
    """On fresh prompts of as many as it was calibrated on; predictions are poor, so nothing else protects it."""
    missed = 0
    for seed in range(100):
        scores, chances = _useless(600, seed)
        path = walk(chances, 1)
        half = np.arange(600) < 300
        [chosen] = cheapest_that_holds(Margins(path, scores, 1, 0.9), half[None].astype(np.float32), 0.95)
        assert chosen is not None
        taken = path.taken(scores, slice(chosen, chosen + 1))[~half].mean()
        missed += taken < 0.9 * scores[~half, 1].mean()
    assert missed <= 10  # 5 are expected at most; 11 would happen once in 90 such tests


def test_a_floor_of_nothing_takes_the_cheapest_and_a_high_one_the_best() -> None:
    scores, chances = _useless(400, 1)
    path, every = walk(chances, 1), np.ones((1, 400), dtype=np.float32)
    [low] = cheapest_that_holds(Margins(path, scores, 1, 0.3), every, 0.95)
    [high] = cheapest_that_holds(Margins(path, scores, 1, 1.0), every, 0.95)
    assert low is not None and (path.choices[:, low] == 0).all()
    assert high is not None and (path.choices[:, high] == 1).mean() > 0.9
    assert cheapest_that_holds(Margins(path, scores, 1, 1.3), every, 0.95) == [None]


def test_splits_are_counted() -> None:
    scores, chances = _useless(400, 2)
    path = walk(chances, 1)
    found = check_floor(Margins(path, scores, 1, 0.9), 0.95, num_splits=50)
    assert found.num_splits == 50 and found.num_missed <= 6 and 0 <= found.mean_cheap_share <= 1


# --- the whole


def test_a_router_finds_which_model_is_good_at_what() -> None:
    report = report_of(fitted())
    assert report["router"]["share"]["small"] > 0.3
    assert report["router"]["cost"] < 0.8 * report["baselines"]["best_single"]["cost"]
    assert report["floor"]["is_held"] and report["floor"]["asked"] == 0.9
    assert report["apgr"] > 0.7 and report["intervals"]["apgr"][0] < report["apgr"] < report["intervals"]["apgr"][1]
    assert report["baselines"]["oracle"]["score"] >= report["router"]["score"]
    assert report["baselines"]["random"]["score"] < report["router"]["score"]
    assert {"random", "length", "best_single", "oracle"} == report["baselines"].keys()
    assert report["new_groups"]["cross_validation"].endswith("whole groups left out")


def test_one_prompt_is_predicted_as_many_are() -> None:
    raw = read(table().prompts)
    settings = fitted().router
    every = np.ones(len(raw), dtype=np.bool_)
    [predictor] = fit_predictor(raw, every, table().groups, table().scores, (settings.penalty,))
    read_back = PromptPredictor(decode_router(encode_router(settings), "x"))
    many = predictor.predict(np.arange(len(raw)))
    for place in (0, 1, 17, 100):
        found = read_back.predict(table().prompts[place])
        assert np.allclose(found.chances, many[place], atol=0.01) and not found.is_unlike  # weights are kept in 16 bits
    assert read_back.predict("Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich").is_unlike


def test_a_floor_that_nothing_reaches_says_what_would() -> None:
    with pytest.raises(BadInput, match=r"no model and no mix.*--floor 1\.?\d*$"):
        fit(table(), FitOptions(floor=1.6))


@pytest.mark.parametrize("options", [{"floor": 0.0}, {"floor": 3.0}, {"confidence": 1.0}])
def test_senseless_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(BadInput):
        FitOptions(**options)


def test_three_models_have_no_gap_but_a_router() -> None:
    some = answers(120)
    middle = [
        type(one)(prompt=one.prompt, model="middle", score=one.score, group=one.group, cost=4.0)
        for one in some
        if one.model == "small"
    ]
    report = report_of(fit(make_table([*some, *middle]), FitOptions()))
    assert report["apgr"] is None and [model["name"] for model in report["models"]] == ["small", "middle", "large"]
    assert sum(report["router"]["share"].values()) == pytest.approx(1.0)


# --- confidence


@settings(max_examples=5)
@given(st.integers(0, 100))
def test_a_logistic_rule_finds_what_matters(seed: int) -> None:
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(400, 3))
    right = (random.random(400) < 1 / (1 + np.exp(-2 * inputs[:, 0]))).astype(float)
    weights, bias = logistic(inputs, right)
    assert weights[0] > 1 > abs(weights[1]) and abs(bias) < 1
    assert auc(inputs @ weights, right) > 0.7


def test_the_threshold_passes_on_what_the_other_model_does_better() -> None:
    chances, kept = np.array([0.1, 0.2, 0.8, 0.9]), np.array([0.0, 0.0, 1.0, 1.0])
    assert 0.2 < best_threshold(chances, kept, np.full(4, 0.9)) < 0.8
    assert best_threshold(chances, kept, np.zeros(4)) == 0.0
