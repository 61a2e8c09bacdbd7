"""Verdicts on results that were made to satisfy, to violate and to leave open every claim, and on the authors' runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fairseq_icl.replication.report.claims import (
    FAILS,
    HOLDS,
    NO_DATA,
    OPEN,
    Verdict,
    authors_verdicts,
    claims,
    decide,
    judge,
    student,
    verdicts,
)
from fairseq_icl.replication.report.evidence import Sample
from fairseq_icl.replication.report.published import published_figures
from fairseq_icl.replication.report.text import effect_text, plain_verdicts, verdict_sheet
from tests.replication import claims_world as world

NAMES = [claim["name"] for claim in claims()]
ABOVE = {"name": "x", "says": "x", "source": "dai2023", "left": {"metric": "m"}, "asks": {"above": 0}, "where": "every"}


def judged(folder, level, **options) -> dict[str, Verdict]:
    return {found.claim["name"]: found for found in verdicts(world.make(folder, level, **options), "1.3b")}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Verdict]]:
    folder = tmp_path_factory.mktemp("claims")
    return {
        HOLDS: judged(folder / "satisfied", world.SATISFIED),
        FAILS: judged(folder / "violated", world.VIOLATED),
        OPEN: judged(folder / "open", world.LEFT_OPEN, spread=0.1),
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("status", [HOLDS, FAILS, OPEN])
def test_a_claim_is_told_by_results_made_to(outcomes, name: str, status: str):
    verdict = outcomes[status][name]
    assert verdict.status == status, verdict.reason
    assert verdict.reason
    assert len(verdict.places) == {"lcgd_sim_aou_layers": 21, "lcgd_sim_am_delta_layers": 17}.get(name, 2)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_open_says_what_would_decide_it(outcomes, name: str):
    reason = outcomes[OPEN][name].reason
    assert "seeds" in reason or "examples" in reason or "too close to call" in reason


def test_one_seed_decides_nothing_and_says_what_it_shows(tmp_path):
    for name, verdict in judged(tmp_path, world.SATISFIED, seeds=(1,)).items():
        assert verdict.status == OPEN, name
        assert "at least 3" in verdict.reason
        assert "holds" in verdict.reason


def test_claims_are_well_formed():
    assert len(set(NAMES)) == len(NAMES) >= 12
    for claim in claims():
        assert claim["source"] in published_figures()["papers"]
        assert claim["where"] in ("every", "most", "average")
        assert len(claim["asks"]) == 1
        assert set(claim["asks"]) <= {"above", "below", "between"}
        known = {"name", "source", "says", "note", "left", "right", "over", "asks", "where", "by", "datasets", "layers"}
        assert set(claim) <= known | {"printed"}


class Made:
    """Evidence of one dataset, out of an array (seeds, examples)."""

    datasets = ("made",)

    def __init__(self, **values: np.ndarray) -> None:
        self.values = values

    def sample(self, term: dict, dataset: str) -> Sample | None:
        values = self.values.get(term["metric"])
        if values is None:
            return None
        seeds = tuple((seed, 0) for seed in range(len(values)))
        return Sample(seeds, np.arange(values.shape[1]), values[..., None])


def test_what_seeds_and_examples_add_to_both_sides_cancels():
    generator = np.random.default_rng(1)
    common = 3 * generator.standard_normal((3, 1)) + 5 * generator.standard_normal((1, 50))
    claim = ABOVE | {"right": {"metric": "n"}}
    paired = judge(claim, Made(m=common + 0.1, n=common))
    alone = judge(ABOVE, Made(m=common + 0.1))
    assert (paired.status, alone.status) == (HOLDS, OPEN)
    assert paired.average.interval() == pytest.approx((0.1, 0.1))


def test_a_quotient_is_taken_over_the_examples_it_is_defined_on():
    values = np.full((3, 40), np.nan)
    values[:, :10] = 1.0
    values[:, 10:15] = 0.0
    verdict = judge(ABOVE, Made(m=values))
    assert verdict.average.value == pytest.approx(2 / 3)
    low, high = verdict.average.interval()
    assert 0.35 < low < 0.55
    assert 0.8 < high < 0.95


def test_a_seed_whose_quotient_has_no_value_says_nothing():
    claim = ABOVE | {"right": {"metric": "n"}, "over": {"metric": "o"}}
    ones, over = np.ones((3, 20)), np.ones((3, 20))
    over[0] = 0.0
    verdict = judge(claim, Made(m=ones, n=0.5 * ones, o=over))
    assert (verdict.status, verdict.places[0][0].seeds, verdict.average.value) == (HOLDS, 2, 0.5)
    assert judge(claim, Made(m=ones, n=ones, o=0 * ones)).status == NO_DATA


def test_false_alarms_are_as_rare_as_the_level_says():
    """No effect, three seeds: a one-sided 2.5 % is allowed on either side."""
    generator, outcomes = np.random.default_rng(2), []
    for _ in range(300):
        values = 0.1 * generator.standard_normal((3, 1)) + generator.standard_normal((1, 30))
        outcomes.append(judge(ABOVE, Made(m=values + 0.1 * generator.standard_normal((3, 30)))).status)
    wrong = len(outcomes) - outcomes.count(OPEN)
    assert wrong <= 0.08 * len(outcomes), outcomes
    assert student(2) == 4.303


def test_more_examples_are_asked_for_where_examples_are_what_varies():
    generator = np.random.default_rng(3)
    values = np.repeat(0.05 + generator.standard_normal((1, 100)), 3, axis=0)
    verdict = judge(ABOVE, Made(m=values - values.mean() + 0.1))
    assert verdict.status == OPEN
    assert "examples" in verdict.reason
    assert "seeds" not in verdict.reason


def test_most_and_average_need_less_than_every(outcomes):
    effects = [effect for effect, _ in outcomes[HOLDS]["sim_aou_above_random"].places]
    mixed = [*effects, replace(effects[0], value=-0.2)]
    found = {where: decide(ABOVE | {"where": where}, mixed).status for where in ("every", "most", "average")}
    assert found == {"every": FAILS, "most": HOLDS, "average": HOLDS}


def test_layers_are_asked_of_models_of_that_depth_only():
    claim = next(claim for claim in claims() if claim["name"] == "lcgd_sim_aou_layers")
    values = np.ones((3, 5))
    assert judge(claim, Made(sim_aou_norm=values)).status == NO_DATA


def test_the_authors_own_runs_are_held_to_the_same_claims():
    """As docs/verdicts.md has them."""
    found = {verdict.claim["name"]: verdict for verdict in authors_verdicts()}
    assert found["sim_aou_above_random"].status == HOLDS
    assert found["sim_aou_above_random"].average.value == pytest.approx(0.183, abs=0.001)
    assert found["lcgd_sim_am_delta_layers"].status == FAILS
    assert found["lcgd_sim_aou_norm"].status == OPEN  # SST-5 and AGNews differ by less than their seeds
    assert found["accuracy_gap"].status == NO_DATA
    mends = found["icl_mends_what_ft_mends"]
    assert {effect.place: round(effect.value, 4) for effect, _ in mends.places}["sst2"] == 0.9184  # 45 of 49


def test_the_page_of_the_documentation_says_what_the_authors_runs_say():
    text = (Path(__file__).parents[2] / "docs" / "verdicts.md").read_text(encoding="utf-8")
    for verdict in authors_verdicts():
        (line,) = [line for line in text.splitlines() if line.startswith(f"| `{verdict.claim['name']}` |")]
        cells = [cell.strip() for cell in line.split("|")]
        assert cells[4:6] == [verdict.status, effect_text(verdict.average)]


def test_the_verdicts_are_printed_with_their_effects(outcomes):
    found = list(outcomes[FAILS].values())
    assert "sim_aou_above_random                does not hold  -0.200 [" in plain_verdicts("1.3b", found)
    sheet = verdict_sheet("1.3b", found)
    assert {len(line) for line in sheet.lines} == {8}
    assert len(sheet.lines) == 1 + len(NAMES)
