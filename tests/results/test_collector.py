"""The collector: order, batches and processes do not matter; what is undefined is counted, never NaN."""

import logging
import pickle
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_icl.metrics import default_names
from fairseq_icl.metrics.training_attention import TrainingTokens
from fairseq_icl.metrics.weight_space import WeightUpdates
from fairseq_icl.observing.observation import Observation
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.results import COLUMNS
from fairseq_icl.results import collector as collector_module
from fairseq_icl.results.collector import Collector, compare
from fairseq_icl.settings import Settings
from tests.metrics.observations import random_observation, triples
from tests.prompts.samples import SENTIMENT, spec_of


def means(table: pd.DataFrame) -> pd.Series:
    """metric -> mean over examples and layers"""
    return table[table["example"].isna() & table["layer"].isna()].set_index("metric")["value"]


def collected(*observations, **options) -> Collector:
    collector = Collector(**options)
    collector.add(range(len(observations[0])), *observations)
    return collector


def training_tokens() -> TrainingTokens:
    return TrainingTokens(torch.randn(3, 6, 8), torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([1, 2, 4, 6, 7, 8]))


@settings(max_examples=20)
@given(triples(), st.data())
def test_the_table_does_not_depend_on_order_batches_or_processes(triple, data):
    size = len(triple[0])
    order = torch.tensor(data.draw(st.permutations(range(size))))
    cut = data.draw(st.integers(0, size))
    processes = Collector(), Collector()
    for collector, part in zip(processes, (order[:cut], order[cut:]), strict=True):
        for batch in part.split(2) if len(part) else ():
            collector.add(batch, *(observation.take(batch) for observation in triple))
    merged = processes[0].merge(pickle.loads(pickle.dumps(processes[1].seen)))
    merged, expected = (
        collector.table().sort_values(["metric", "layer", "example"], ignore_index=True)
        for collector in (merged, collected(*triple))
    )
    pd.testing.assert_frame_equal(merged, expected, check_exact=False, rtol=0, atol=1e-9)


def test_no_bit_of_an_example_depends_on_the_examples_beside_it():
    """Neither on how many there are, nor on how far their longer rows and further options fill up its own."""
    sizes = {"n": 40, "layers": 3, "heads": 2, "tokens": 37, "width": 50, "options": 5}
    triple = []
    for seed in range(3):
        seen = random_observation(seed, **sizes)
        logprobs = seen.option_logprobs.masked_fill(torch.arange(5) > 1 + torch.arange(40)[:, None] % 4, -torch.inf)
        depth = torch.randn(40, 3, 5).masked_fill(logprobs[:, None].isinf(), -torch.inf)
        tops = {"top_tokens": torch.randint(12, (40, 10)), "top_logprobs": -10 * torch.rand(40, 10)}
        gold = {"gold": torch.zeros(40, dtype=torch.long)}
        triple.append(replace(seen, option_logprobs=logprobs, depth_scores=depth, label_prior=None, **tops, **gold))
    training = TrainingTokens(torch.randn(3, 12, 50), torch.arange(12) // 4, torch.arange(12))
    whole = collected(*triple, training=training)
    for size in (1, 3, 17):
        parted = Collector(training=training)
        for examples in torch.randperm(40).split(size):
            parted.add(examples, *(without_filling(seen.take(examples)) for seen in triple))
        for kind in ("metrics", "lengths", "labels", "sets"):
            series = parted.seen[kind]
            assert series.keys() == whole.seen[kind].keys()
            for name, expected in whole.seen[kind].items():
                assert np.array_equal(series[name].values(), expected.values(), equal_nan=True), (
                    f"{name}, {size} at a time"
                )


def without_filling(seen: Observation) -> Observation:
    """Rows no wider than the longest of these examples, options no more than the most of them."""
    options = int(seen.option_logprobs.isfinite().sum(1).max())
    return replace(
        seen,
        attention_row=seen.attention_row[..., -int(seen.query_length.max()) :],
        option_logprobs=seen.option_logprobs[:, :options],
        depth_scores=seen.depth_scores[..., :options],
    )


@settings(max_examples=30)
@given(triples())
def test_no_value_is_undefined_and_intervals_hold_their_mean(triple):
    table = collected(*triple, training=training_tokens()).table()
    assert table["value"].notna().all()
    # Of few examples the bins' errors do not cancel: every resample may have a larger calibration error than the whole.
    bounded = table[~table["metric"].str.startswith("ece_")].dropna(subset=["low"])
    assert (bounded["low"] <= bounded["value"] + 1e-9).all()
    assert (bounded["value"] <= bounded["high"] + 1e-9).all()
    is_ratio = bounded["metric"].str.startswith("length_ratio_")
    is_share = ~is_ratio & ~bounded["metric"].str.startswith("log_likelihood")
    assert (bounded.loc[is_share, "value"].abs() <= 1 + 1e-9).all()
    assert (bounded.loc[is_ratio, "value"] >= 0).all()


def test_means_are_over_examples_then_layers():
    table = collected(*(random_observation(seed) for seed in range(3))).table()
    rows = table[table["metric"] == "sim_aou"]
    single = rows.dropna(subset=["layer", "example"])
    by_layer = rows[rows["example"].isna()].dropna(subset=["layer"]).set_index("layer")["value"]
    pd.testing.assert_series_equal(single.groupby("layer")["value"].mean(), by_layer)
    assert means(table)["sim_aou"] == pytest.approx(by_layer.mean())


def test_a_base_checkpoint_scored_alone_has_the_metrics_of_zsl_and_icl():
    names = set(collected(random_observation(0), random_observation(1)).table()["metric"])
    assert {"accuracy_zsl", "accuracy_icl", "sim_am_before", "sim_aou_random"} <= names
    assert not names & {"accuracy_ft", "rpa", "sim_aou", "sim_am_delta", "prediction_ft"}


def test_zero_updates_are_left_out_and_counted():
    zsl, icl = random_observation(0), random_observation(1)
    found = means(collected(zsl, icl, zsl).table())
    assert "sim_aou" not in found
    assert "length_ratio_sim_aou" not in found
    assert found["zero_updates_sim_aou"] == 6 * 3
    assert found["zero_updates_sim_am_delta"] == 6 * 3 * 2
    assert found["zero_updates_sim_am_before"] == 0


def test_a_quotient_over_no_example_has_no_row_and_is_counted():
    zsl = random_observation(0)
    table = collected(zsl, zsl, zsl).table()
    for name in ("rec2ftp", "rpa", "rpa_same_label", "rpa_correct", "rpa_incorrect"):
        assert name not in set(table["metric"])
        assert means(table)[f"undefined_{name}"] == 1


def test_activations_that_are_not_finite_are_left_out_and_counted():
    zsl, icl, ft = (random_observation(seed) for seed in range(3))
    output = ft.attention_output.clone()
    output[2, 1] = torch.nan
    table = collected(zsl, icl, replace(ft, attention_output=output)).table()
    assert table["value"].notna().all()
    assert means(table)["undefined_sim_aou"] == 1
    rows = table[(table["metric"] == "sim_aou") & table["example"].notna()]
    assert len(rows) == 6 * 3 - 1


def test_a_diverged_finetuning_leaves_only_counts():
    zsl, icl, ft = (random_observation(seed) for seed in range(3))
    ft = replace(ft, attention_output=torch.full_like(ft.attention_output, torch.nan))
    found = means(collected(zsl, icl, ft).table())
    assert "sim_aou" not in found
    assert found["undefined_sim_aou"] == 6 * 3


def test_the_f2t_subset_has_its_own_means():
    zsl, icl, ft = (random_observation(seed) for seed in range(3))
    zsl = replace(zsl, prediction=(zsl.gold + 1) % 3)
    right = torch.tensor([True, True, False, False, False, False])
    icl, ft = (replace(o, prediction=torch.where(right, o.gold, (o.gold + 2) % 3)) for o in (icl, ft))
    found = means(collected(zsl, icl, ft).table())
    first = torch.arange(2)
    alone = means(collected(zsl.take(first), icl.take(first), ft.take(first)).table())
    assert found["both_f2t"] == 2
    assert found["sim_am_delta_f2t"] == pytest.approx(alone["sim_am_delta"])


def test_examples_added_twice_count_once():
    triple = [random_observation(seed) for seed in range(3)]
    collector = collected(*triple)
    collector.add([5, 0], *(observation.take([5, 0]) for observation in triple))
    pd.testing.assert_frame_equal(collector.table(), collected(*triple).table())


def test_attention_to_training_tokens_looks_at_the_first_examples():
    triple = [random_observation(seed) for seed in range(3)]
    collector = collected(*triple, training=training_tokens(), training_examples=4)
    collector.add([7], *(observation.take([0]) for observation in triple))
    table = collector.table()
    assert set(table[table["metric"] == "kendall_tokens"]["example"].dropna()) == {0, 1, 2, 3}
    assert means(table)["top_tokens"] == 6
    assert means(table)["examples"] == 7


def test_alpha_and_weights_are_computed_when_their_input_is_given():
    zsl, icl, ft, other = (random_observation(seed) for seed in range(4))
    weights = WeightUpdates(torch.randn(3, 2, 4, 4), torch.randn(6, 3, 2, 4, 4))
    collector = Collector(["alpha", "sim_weights"])
    collector.add(range(6), zsl, icl, ft, other_ft=other, weights=weights)
    assert {"alpha", "sim_weights"} <= set(collector.table()["metric"])


def test_the_reading_decides_what_the_plain_names_mean():
    triple = [random_observation(seed) for seed in range(3)]
    authors, paper = (means(collected(*triple, settings=Settings.of(name)).table()) for name in ("authors", "paper"))
    assert authors["sim_am_delta"] == paper["sim_am_delta_scores"]
    assert paper["sim_am_delta"] == authors["sim_am_delta_softmax"]
    assert paper["sim_aou_random"] == authors["sim_aou_random_gaussian"]


def test_a_metric_with_the_wrong_number_of_values_is_named():
    zsl, icl = random_observation(0), random_observation(1)
    with pytest.raises(ValueError, match="accuracy_zsl: 6 values for 2 examples"):
        Collector(["accuracy_zsl"]).add([0, 1], zsl, icl)


def prompts_of(**settings: object) -> Prompts:
    """Demonstrations of rows 7 and 8 with 4 and 3 tokens, at places 1 to 4 and 6 to 8 of a context of 12."""
    return Prompts(
        spec=spec_of(SENTIMENT),
        settings=Settings(**settings),
        start=(0,),
        context=(0,) * 12,
        context_rows=(7, 8),
        context_spans=((1, 5), (6, 9)),
        queries=(),
        finetuning=(),
    )


def test_compare_is_the_table_of_all_that_the_observations_allow():
    zsl, icl, ft = (random_observation(seed) for seed in range(3))
    table = compare(prompts_of(seed=4, permutation=2), replace(zsl, init="untrained"), icl, replace(ft, method="lcgd"))
    assert list(table.columns) == list(COLUMNS)
    identity = ["sample", 4, 2, "lcgd", "untrained"]
    assert table[["dataset", "seed", "permutation", "method", "init"]].drop_duplicates().values.tolist() == [identity]
    plain = collected(zsl, icl, ft).table()
    pd.testing.assert_frame_equal(table[["metric", "value"]], plain[["metric", "value"]])
    assert "kendall_tokens" not in set(table["metric"])


def test_compare_without_a_finetuned_model():
    zsl, icl = random_observation(0), random_observation(1)
    table = compare(prompts_of(), zsl, icl)
    assert set(table["method"]) == {"none"}
    assert {"accuracy_icl", "sim_am_before"} <= set(table["metric"])
    assert "sim_aou" not in set(table["metric"])


def test_compare_takes_the_reading_from_the_prompts():
    triple = [random_observation(seed) for seed in range(3)]
    paper = means(compare(prompts_of(attention_similarity="probabilities"), *triple))
    assert paper["sim_am_delta"] == means(compare(prompts_of(), *triple))["sim_am_delta_softmax"]


def test_compare_looks_at_the_training_tokens_that_the_observation_brings():
    zsl, icl, ft = (random_observation(seed) for seed in range(3))
    recorded = {8: torch.randn(3, 1 + 3, 8), 7: torch.randn(3, 1 + 4, 8)}
    found = means(compare(prompts_of(), zsl, icl, replace(ft, training_queries=recorded)))
    assert found["training_tokens"] == 7
    tokens = TrainingTokens(
        torch.cat([recorded[7][:, 1:], recorded[8][:, 1:]], dim=1),
        torch.tensor([0, 0, 0, 0, 1, 1, 1]),
        torch.tensor([1, 2, 3, 4, 6, 7, 8]),
    )
    expected = means(collected(zsl, icl, ft, training=tokens).table())
    for name in ("kendall_tokens", "recall_examples", "kendall_tokens_random"):
        assert found[name] == expected[name]


def test_training_tokens_that_cannot_be_paired_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture):
    zsl, icl, ft = (random_observation(seed) for seed in range(3))
    with caplog.at_level(logging.WARNING):
        table = compare(prompts_of(), zsl, icl, replace(ft, training_queries={7: torch.randn(3, 9, 8)}))
    assert "attention to training tokens is left out: row 7: 8 tokens in training, 4 in the prompt" in caplog.text
    assert not {"kendall_tokens", "training_tokens"} & set(table["metric"])
    assert "sim_aou" in set(table["metric"])


def test_compare_with_chosen_metrics_a_second_model_and_weights():
    zsl, icl, ft, other = (random_observation(seed) for seed in range(4))
    weights = WeightUpdates(torch.randn(3, 2, 4, 4), torch.randn(6, 3, 2, 4, 4))
    metrics = ["alpha", "sim_weights"]
    table = compare(prompts_of(), zsl, icl, ft, other_ft=other, metrics=metrics, weights=weights)
    measured = set(table.dropna(subset=["low"])["metric"])
    assert {name.removesuffix("_f2t").removeprefix("length_ratio_") for name in measured} == set(metrics)


def test_sets_are_compared_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch):
    zsl, icl, ft, other = (random_observation(seed, n=11) for seed in range(4))
    weights = WeightUpdates(torch.randn(3, 2, 4, 4), torch.randn(11, 3, 2, 4, 4))
    recorded = {8: torch.randn(3, 1 + 3, 8), 7: torch.randn(3, 1 + 4, 8)}
    given = prompts_of(), zsl, icl, replace(ft, training_queries=recorded)
    metrics = [*default_names(Settings()), "alpha", "sim_weights"]
    expected = compare(*given, other_ft=other, metrics=metrics, weights=weights)
    for size in (1, 4, 11):
        monkeypatch.setattr(collector_module, "COMPARED", size)
        pd.testing.assert_frame_equal(compare(*given, other_ft=other, metrics=metrics, weights=weights), expected)


def test_a_length_ratio_stands_beside_every_cosine_of_two_measured_vectors():
    zsl, icl, ft = (random_observation(seed) for seed in range(3))
    table = compare(prompts_of(), zsl, icl, ft)
    cosines = {name for name in table["metric"] if name.startswith(("sim_aou", "sim_am")) and "random" not in name}
    ratios = {name.removeprefix("length_ratio_") for name in table["metric"] if name.startswith("length_ratio_")}
    assert ratios == {name for name in cosines if not name.startswith(("zero_", "undefined_"))}
    lengths = [(seen.attention_output - zsl.attention_output).double().norm(dim=-1).sum(0) for seen in (icl, ft)]
    chosen = table[table["metric"] == "length_ratio_sim_aou"]
    assert chosen["example"].isna().all()
    by_layer = chosen[chosen["layer"].notna()].sort_values("layer")
    np.testing.assert_allclose(by_layer["value"], lengths[1] / lengths[0])
    overall = chosen[chosen["layer"].isna()]
    assert overall["value"].item() == pytest.approx(float((lengths[1] / lengths[0]).mean()))
    assert overall["low"].item() < overall["value"].item() < overall["high"].item()
    twice = replace(ft, attention_output=2 * ft.attention_output - zsl.attention_output)  # an update twice as long
    again = compare(prompts_of(), zsl, icl, twice)
    longer = again[(again["metric"] == "length_ratio_sim_aou") & again["layer"].isna()]["value"].item()
    assert longer == pytest.approx(2 * overall["value"].item(), rel=1e-5)


def test_a_length_ratio_of_heads_is_that_of_all_heads_together():
    zsl, icl, ft = (random_observation(seed) for seed in range(3))
    table = compare(prompts_of(), zsl, icl, ft, metrics=["sim_am_after"])
    rows = [seen.attention_row.double().flatten(2).norm(dim=-1).sum(0) for seen in (icl, ft)]
    found = table[(table["metric"] == "length_ratio_sim_am_after") & table["layer"].notna()].sort_values("layer")
    np.testing.assert_allclose(found["value"], rows[1] / rows[0])


def test_a_length_ratio_to_no_change_is_counted_and_one_of_diverged_numbers_leaves_the_others():
    zsl, icl, ft = (random_observation(seed) for seed in range(3))
    table = means(compare(prompts_of(), zsl, zsl, ft, metrics=["sim_aou"]))
    assert "length_ratio_sim_aou" not in table
    assert table["undefined_length_ratio_sim_aou"] == 1
    output = ft.attention_output.clone()
    output[0] = torch.inf
    broken = means(compare(prompts_of(), zsl, icl, replace(ft, attention_output=output), metrics=["sim_aou"]))
    others = [seen.take(torch.arange(1, 6)) for seen in (zsl, icl, ft)]
    without = means(compare(prompts_of(), *others, metrics=["sim_aou"]))
    assert broken["length_ratio_sim_aou"] == pytest.approx(without["length_ratio_sim_aou"])


def test_all_of_n_and_none_of_n_are_no_certainty():
    """Every resample of n successes is n successes: the bootstrap alone gave [1, 1]."""
    seen = random_observation(0)
    right, wrong = replace(seen, prediction=seen.gold), replace(seen, prediction=seen.gold + 1)
    table = collected(wrong, right, right).table()
    overall = table[table["layer"].isna() & table["example"].isna()].set_index("metric")
    low, high = overall.loc["accuracy_icl", ["low", "high"]]
    assert (low, high) == (pytest.approx(6 / (6 + 1.96**2)), 1.0)
    assert tuple(overall.loc["accuracy_zsl", ["low", "high"]]) == (0.0, pytest.approx(1 - low))
    assert overall.loc["rec2ftp", "low"] == pytest.approx(low)
