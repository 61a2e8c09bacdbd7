"""Every metric on the authors' recorded activations gives the authors' numbers, per layer and overall."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fairseq_icl.metrics import Similarity, attention_outputs, get_metric
from fairseq_icl.metrics.predictions import prediction_sets
from fairseq_icl.metrics.training_attention import TrainingAttention, TrainingTokens
from fairseq_icl.observing.observation import Observation
from fairseq_icl.results.collector import Collector
from tests.golden.folder import Golden

TOLERANCE = 1e-5
OVERALL = -1  # layer of a mean over all layers, in the table of a case
SIMILARITIES = {
    "dai_all/SimAOU": "sim_aou_norm",
    "dai_all/ZSL SimAM": "sim_am_before",
    "dai_all/SimAM": "sim_am_after",
    "deutch_SimAOU_normalised": "sim_aou_norm",
    "deutch_SimAOU_unnormalised": "sim_aou",
    "deutch_SimAM_delta": "sim_am_delta",
    "deutch_SimAM_delta_softmax": "sim_am_delta_softmax",
}
F2T = {"SimAOU": "sim_aou_norm_f2t", "ZSL SimAM": "sim_am_before_f2t", "SimAM": "sim_am_after_f2t"}
RANDOM = {
    "dai_all/Random SimAOU": True,
    "deutch_RandomSimAOU_normalised": True,
    "deutch_RandomSimAOU_unnormalised": False,
}
RPA = {"rpa_set": "rpa", "rpa_same_label": "rpa_same_label", "rpa_correct": "rpa_correct"}
RPA |= {"rpa_incorrect": "rpa_incorrect"}
TRAINING = {
    "example-level recall_topk": "recall_examples",
    "example-level kendall": "kendall_examples",
    "token-level recall_topk": "recall_tokens",
    "token-level kendall": "kendall_tokens",
}


class Case:
    """The records of one task, permutation and method, and the numbers that belong to them."""

    def __init__(self, root: Path, task: str, p: str, method: str) -> None:
        self.root, self.task = root, task
        self.numbers: dict[str, Any] = json.loads((root / "metrics" / f"{task}_p{p}_{method}.json").read_text())
        self.zsl = observation(root / "records" / f"{task}_zs.npz")
        self.icl = observation(root / "records" / f"{task}_p{p}_icl.npz")
        self.ft = observation(root / "records" / f"{task}_p{p}_ftzs_{method}.npz")
        self.settings = {"zsl": self.zsl, "icl": self.icl, "ft": self.ft}
        self.training_file = root / "ft" / f"{task}_p{p}_{method}.npz"

    def expected(self, path: str) -> Any:
        """The entry under "a/b", None if it is missing."""
        entry: Any = self.numbers
        for key in path.split("/"):
            entry = entry.get(key) if isinstance(entry, dict) else None
        return entry

    def compute(self, name: str) -> Tensor:
        metric = get_metric(name)
        outcome = metric.compute(*(self.settings[setting] for setting in metric.conditions))
        return outcome.value if isinstance(outcome, Similarity) else outcome

    @cache  # noqa: B019 -- a handful of cases, alive until the end of the run anyway
    def table(self):
        collector = Collector()
        for part in torch.arange(len(self.zsl)).flip(0).split(5):  # any order, any batch size
            collector.add(part, *(setting.take(part) for setting in self.settings.values()))
        means = collector.table().query("example.isna()").fillna({"layer": OVERALL})
        return means.set_index(["metric", "layer"])["value"]

    def training_tokens(self, top_examples: int, top_tokens: int) -> TrainingTokens:
        """Demonstrations follow each other in the context, each closed by EOS, as in PROTOCOL 2.3."""
        with np.load(self.training_file) as stored:
            queries, lengths = torch.from_numpy(stored["attn_q"]), stored["attn_q_lens"].tolist()
        ends = np.cumsum(lengths)  # BOS of the context, then each demonstration without BOS but with EOS
        spans = [(int(end) - length + 1, int(end)) for end, length in zip(ends, lengths, strict=True)]
        recorded = dict(enumerate(queries.split(lengths, dim=1)))
        tokens = TrainingTokens.align(recorded, range(len(lengths)), spans)
        return replace(tokens, top_examples=top_examples, top_tokens=top_tokens)


def observation(path: Path) -> Observation:
    """A records file as an observation."""
    with np.load(path) as stored:
        get = {name: torch.from_numpy(stored[name]) for name in stored.files}
    return Observation(
        row=torch.arange(len(get["gold"])),
        gold=get["gold"],
        option_logprobs=get["option_scores"],
        prediction=get["pred"],
        attention_output=get["self_attn_out"],
        attention_row=get["attn_map"],
        query_length=get["query_len"],
        query_vector=get.get("attn_q", torch.zeros_like(get["self_attn_out"])),  # only FT files have it
        context_row=get.get("attn_map_ctx"),
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    root = metafunc.config.getoption("--golden-dir")
    found = [re.fullmatch(r"(.+)_p(\d+)_(.+)\.json", path.name) for path in sorted((root / "metrics").glob("*.json"))]
    cases = [match.groups() for match in found if match]
    metafunc.parametrize("case", cases, ids=["-".join(case) for case in cases], indirect=True, scope="session")


@pytest.fixture(scope="session")
def case(request: pytest.FixtureRequest, golden: Golden) -> Case:
    return Case(golden.root, *request.param)


def assert_layers_equal(values: Tensor, expected: dict[str, Any], label: str) -> None:
    per_layer = values.mean(0)
    np.testing.assert_allclose(per_layer, expected["per_layer"], rtol=0, atol=TOLERANCE, err_msg=label)
    assert float(per_layer.mean()) == pytest.approx(expected["overall"], abs=TOLERANCE), label


def test_similarities_equal_the_authors(case: Case) -> None:
    for path, name in SIMILARITIES.items():
        expected = case.expected(path)
        if expected is not None:
            assert_layers_equal(case.compute(name), expected, path)


def sim_aou_of_update(zsl: Observation, icl: Observation, update: Tensor, normalize: bool) -> Tensor:
    """cos(h_icl - h_zsl, update) for updates (n, L, d) in place of those that are drawn."""
    (cosines,) = attention_outputs.beside_drawn(zsl, icl, torch.arange(len(zsl)), lambda n, *_: update[n].double())
    return cosines[normalize].value


def test_the_authors_random_baseline_on_their_draws(case: Case) -> None:
    update = torch.from_numpy(np.load(case.root / "metrics" / f"random_updates_{case.task}.npy"))
    for path, normalize in RANDOM.items():
        expected = case.expected(path)
        if expected is not None:
            values = sim_aou_of_update(case.zsl, case.icl, update, normalize)
            assert_layers_equal(values, expected, path)
    expected = case.expected("dai_f2t/Random SimAOU")
    if expected is not None:  # drawn anew for the subset, from the same seed: the first rows of the same array
        subset = prediction_sets(**case.settings)["both_f2t"].nonzero().flatten()
        zsl, icl = case.zsl.take(subset), case.icl.take(subset)
        values = sim_aou_of_update(zsl, icl, update[: len(subset)], normalize=True)
        assert_layers_equal(values, expected, "dai_f2t/Random SimAOU")


def test_prediction_sets_have_the_authors_sizes(case: Case) -> None:
    sizes = {name: int(members.sum()) for name, members in prediction_sets(**case.settings).items()}
    counts = dict(case.numbers["counts"])
    accuracies = counts.pop("acc")
    assert counts.pop("n") == len(case.zsl)
    assert {name: sizes[name] for name in counts} == counts
    for ours, theirs in {"zsl": "zs", "icl": "icl", "ft": "ftzs"}.items():
        assert case.table()[f"accuracy_{ours}", OVERALL] == accuracies[theirs]


def test_rec2ftp_and_rpa_equal_the_authors_and_undefined_ones_have_no_row(case: Case) -> None:
    expected = [(name, case.expected(f"derived/{theirs}"), 1) for theirs, name in RPA.items()]
    expected.append(("rec2ftp", case.expected("dai_all/Recall2FTP"), 100))
    expected.append(("rpa_same_label", case.expected("JaccardIndexPercent_fae75c1"), 100))
    for name, value, scale in expected:
        if f"undefined_{name}" in case.table().index:
            assert name not in case.table().index
            assert not value or np.isnan(value), name  # no number, or a 0 in place of 0 / 0
        elif value is not None:
            assert case.table()[name, OVERALL] == pytest.approx(value / scale, abs=1e-12), name


def test_the_table_has_the_authors_means_in_any_order_of_batches(case: Case) -> None:
    for path, name in SIMILARITIES.items():
        expected = case.expected(path)
        if expected is not None:
            assert_rows_equal(case, name, expected)


def test_means_over_the_f2t_subset_equal_the_authors(case: Case) -> None:
    expected = case.numbers.get("dai_f2t")
    if expected is None:
        assert case.numbers["counts"]["both_f2t"] == 0
        assert not any(name.endswith("_f2t") and name.startswith("sim") for name, _ in case.table().index)
        return
    for theirs, name in F2T.items():
        if theirs in expected:
            assert_rows_equal(case, name, expected[theirs])


def test_attention_to_training_tokens_equals_the_authors(case: Case) -> None:
    for key, expected in case.numbers.items():
        sizes = re.fullmatch(r"training_example_attn_top(\d+)_top(\d+)", key)
        if not sizes:
            continue
        training = case.training_tokens(int(sizes[1]), int(sizes[2]))
        attention = TrainingAttention.of(torch.arange(len(case.zsl)), case.icl, case.ft, training)
        if "total_tokens" in expected:
            assert len(training.demonstration) == expected["total_tokens"]
        for theirs, name in TRAINING.items():
            values = get_metric(name).compute(attention)
            values = values.value if isinstance(values, Similarity) else values
            if theirs in expected:
                assert_layers_equal(values, expected[theirs], f"{key} {theirs}")
            else:  # the authors fail where fewer than k tokens exist; we use all there are
                assert "error" in expected
                assert torch.isfinite(values).all()


def assert_rows_equal(case: Case, name: str, expected: dict[str, Any]) -> None:
    rows = case.table()[name]
    assert rows[OVERALL] == pytest.approx(expected["overall"], abs=TOLERANCE), name
    layers = [rows[layer] for layer in range(len(expected["per_layer"]))]
    np.testing.assert_allclose(layers, expected["per_layer"], rtol=0, atol=TOLERANCE, err_msg=name)
