"""The printed summary: papers' order, intervals, and what was left out."""

import pandas as pd

from fairseq_icl.criterions.icl_similarity import summary


def test_summary_orders_metrics_and_tells_what_was_left_out() -> None:
    rows = [
        ("sim_aou", 0.25, 0.2, 0.3),
        ("length_ratio_sim_aou", 1.5, 1.25, 1.75),
        ("zero_updates_sim_aou", 3, pd.NA, pd.NA),
        ("zero_updates_sim_am_delta", 0, pd.NA, pd.NA),
        ("accuracy_zsl", 0.5, 0.4, 0.6),
        ("undefined_rpa", 1, pd.NA, pd.NA),
        ("examples", 12, pd.NA, pd.NA),
    ]
    overall = pd.DataFrame(rows, columns=["metric", "value", "low", "high"])
    assert summary(overall).splitlines() == [
        "metric         value  95 % interval over examples  length ratio",
        "accuracy_zsl  0.5000             [0.4000, 0.6000]",
        "sim_aou       0.2500             [0.2000, 0.3000]        1.5000",
        "values left out because they are not defined here: rpa 1",
        "cosines left out because an update is not above rounding: sim_aou 3",
        "12 examples",
    ]
