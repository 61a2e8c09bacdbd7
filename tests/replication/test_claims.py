"""Verdicts on results that were made to satisfy, to violate and to leave open every claim, and on the authors' runs."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from fairseq_icl.errors import UserError
from fairseq_icl.replication.report.claims import (
    FAILS,
    HOLDS,
    NO_DATA,
    OPEN,
    TOO_FEW,
    Verdict,
    authors_verdicts,
    corrected,
    decide,
    judge,
    summary,
    verdicts,
)
from fairseq_icl.replication.report.effects import Part, Sample, satterthwaite
from fairseq_icl.replication.report.published import Claim, Term, claims
from fairseq_icl.replication.report.text import decided_by, effect_text, plain_verdicts, verdict_sheet
from tests.replication import claims_world as world

NAMES = [claim.name for claim in claims()]
FORM = {"name": "x", "says": "x", "source": "dai2023", "left": {"metric": "m"}, "asks": {"above": 0}, "where": "every"}
ABOVE = Claim.model_validate(FORM)


def judged(folder, level, **options) -> dict[str, Verdict]:
    return {found.claim.name: found for found in verdicts(world.make(folder, level, **options), "1.3b")}


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
    opposite = {HOLDS: FAILS, FAILS: HOLDS, OPEN: OPEN}
    expected = opposite[status] if name == "lcgd_sim_am_delta_reversed" else status  # the same metric, in other layers
    assert verdict.status == expected, verdict.reason
    assert verdict.reason
    layers = {"lcgd_sim_aou_layers": 21, "lcgd_sim_am_delta_layers": 11, "lcgd_sim_am_delta_reversed": 6}
    assert len(verdict.places) == layers.get(name, 2)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_open_says_what_would_decide_it(outcomes, name: str):
    reason = outcomes[OPEN][name].reason
    assert "seeds" in reason or "examples" in reason or "too close to call" in reason


def test_one_seed_decides_nothing_and_says_what_it_shows(tmp_path):
    for name, verdict in judged(tmp_path, world.SATISFIED, seeds=(1,)).items():
        assert verdict.status == OPEN, name
        assert "one seed has no spread (here " in verdict.reason
        assert "[" not in effect_text(verdict.average)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"where": "some"}, r"claims\.0\.where=some: .*'every', 'most' or 'average'"),
        ({"left": {"metrik": "m"}}, r"claims\.0\.left\.metrik: unknown key"),
        ({"asks": {"above": "0"}}, r"claims\.0\.asks\.above=0: must be a number"),
        ({"asks": {}}, r"claims\.0\.asks: give either above or below"),
        ({"source": "dai"}, r"claims\.0: source=dai: no such paper in published.yaml; choose from dai2023, "),
        ({"by": "layer"}, r"claims\.0: by: layer needs the layers"),
        ({"name": "y"}, r"y: the name of two claims"),
    ],
)
def test_a_mistake_in_the_claims_is_one_line_with_file_key_and_remedy(tmp_path, change, told):
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump({"claims": [FORM | change, FORM | {"name": "y"}]}))
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))}: {told}.*; the head of the file says") as caught:
        claims(path)
    assert "\n" not in str(caught.value)
    path.write_text("claims: [")
    with pytest.raises(UserError, match="cannot be read as YAML"):
        claims(tmp_path / "." / "claims.yaml")


class Made:
    """Evidence of one dataset, out of an array (seeds, examples)."""

    datasets = ("made",)

    def __init__(self, **values: np.ndarray) -> None:
        self.values = values

    orders = False  # or every seed an order of the same demonstrations

    def sample(self, term: Term, dataset: str) -> Sample | None:
        values = self.values.get(term.metric)
        if values is None:
            return None
        seeds = tuple((1, seed) if self.orders else (seed, 0) for seed in range(len(values)))
        return Sample(seeds, np.arange(values.shape[1]), values[..., None])


def test_what_seeds_and_examples_add_to_both_sides_cancels():
    generator = np.random.default_rng(1)
    common = 3 * generator.standard_normal((3, 1)) + 5 * generator.standard_normal((1, 50))
    claim = Claim.model_validate(FORM | {"right": {"metric": "n"}})
    own = 0.001 * generator.standard_normal((3, 50))
    paired = judge(claim, Made(m=common + 0.1 + own, n=common))
    alone = judge(ABOVE, Made(m=common + 0.1 + own))
    assert (paired.status, alone.status) == (HOLDS, OPEN)
    assert paired.average.interval() == pytest.approx((0.1, 0.1), abs=0.002)


def test_seeds_that_do_not_differ_at_all_decide_nothing():
    verdict = judge(ABOVE, Made(m=np.repeat(np.linspace(0.2, 0.4, 30)[None], 3, axis=0)))
    assert verdict.status == OPEN
    assert "seeds do not differ" in verdict.reason
    assert effect_text(verdict.average) == "+0.300"


def test_orders_of_the_same_demonstrations_are_one_draw():
    made = Made(m=0.5 + 0.01 * np.random.default_rng(1).standard_normal((4, 30)))
    assert judge(ABOVE, made).status == HOLDS
    made.orders = True
    verdict = judge(ABOVE, made)
    assert (verdict.status, verdict.average.seeds) == (OPEN, 1)
    assert "one seed has no spread" in verdict.reason


SHARE = Claim.model_validate(FORM | {"left": {"metric": "rec2ftp"}, "asks": {"above": 0.5}})


def test_a_quotient_is_taken_over_the_examples_it_is_defined_on():
    values = np.full((3, 80), np.nan)
    values[:, :20] = 1.0
    values[:, 20:30] = 0.0
    verdict = judge(SHARE, Made(rec2ftp=values))
    assert verdict.average.value == pytest.approx(2 / 3)
    low, high = verdict.average.interval()
    assert 0.4 < low < 0.5
    assert 0.75 < high < 0.85
    assert verdict.average.count == 30


def test_all_of_few_is_no_certainty():
    """Two seeds with one mended example each had the interval [1, 1] and held."""
    one = np.full((2, 60), np.nan)
    one[:, 0] = 1.0
    verdict = judge(SHARE, Made(rec2ftp=one))
    assert (verdict.status, verdict.average.value) == (TOO_FEW, 1.0)
    assert "too few: 1 examples" in verdict.reason
    twelve = np.full((2, 60), np.nan)
    twelve[:, :12] = 1.0
    low, high = judge(SHARE, Made(rec2ftp=twelve)).average.interval()
    assert 0.55 < low < 0.75
    assert high == 1.0  # and not beyond


def test_a_spread_ten_times_the_others_is_not_averaged_away():
    equal, one = (satterthwaite([Part(v, 2) for v in variances]) for variances in ([1] * 6, [100, 1, 1, 1, 1, 1]))
    assert (equal.variance, equal.freedom) == (pytest.approx(1 / 6), 6)  # half of 12
    assert (one.variance, one.freedom) == (pytest.approx(105 / 36), 2)  # those of a single dataset


def test_stricter_levels_are_wider_at_three_seeds():
    effect = judge(ABOVE, Made(m=np.random.default_rng(1).standard_normal((3, 30)))).average
    widths = [high - low for low, high in (replace(effect, limits=(-99, 99)).interval(x) for x in (0.05, 0.05 / 6))]
    assert widths[1] > 1.5 * widths[0]


def test_all_claims_together_are_held_to_more(outcomes):
    found = list(outcomes[HOLDS].values())
    assert [verdict.corrected for verdict in found] == [verdict.status for verdict in found]
    weak = [replace(verdict, level=0.04) if verdict.status == HOLDS else verdict for verdict in found]
    assert {verdict.corrected for verdict in corrected(weak) if verdict.status == HOLDS} == {OPEN}


def test_one_sentence_answers(outcomes):
    text = summary("1.3b", list(outcomes[FAILS].values()))
    assert text.startswith(
        f"On 1.3b, of the papers' {len(NAMES)} claims 1 hold, {len(NAMES) - 1} do not hold, 0 are open, and 0 could"
    )
    told = f"{len(NAMES)} are open ({len(NAMES) - 18} for want of a clear effect, 18 for want of seeds),"
    assert told in summary("x", outcomes[OPEN].values())


def test_a_seed_whose_quotient_has_no_value_says_nothing():
    claim = Claim.model_validate(FORM | {"right": {"metric": "n"}, "over": {"metric": "o"}})
    ones, over = np.ones((3, 20)), np.ones((3, 20))
    over[0] = 0.0
    drawn = ones * np.array([[1.0], [1.001], [0.999]])
    verdict = judge(claim, Made(m=drawn, n=0.5 * ones, o=over))
    assert (verdict.status, verdict.places[0][0].seeds) == (HOLDS, 2)
    assert verdict.average.value == pytest.approx(0.5)
    assert judge(claim, Made(m=ones, n=ones, o=0 * ones)).status == NO_DATA


def test_more_examples_are_asked_for_where_examples_are_what_varies():
    generator = np.random.default_rng(3)
    values = np.repeat(0.3 * generator.standard_normal((1, 100)), 3, axis=0)
    values += 0.001 * generator.standard_normal((3, 1))
    verdict = judge(ABOVE, Made(m=values - values.mean() + 0.05))
    assert verdict.status == OPEN
    assert "examples" in verdict.reason
    assert "seeds" not in verdict.reason


def test_most_and_average_need_less_than_every(outcomes):
    effects = [effect for effect, _ in outcomes[HOLDS]["sim_aou_above_random"].places]
    mixed = [*effects, replace(effects[0], value=-0.2, centre=-0.2)]
    found = {
        where: decide(Claim.model_validate(FORM | {"where": where}), mixed).status
        for where in ("every", "most", "average")
    }
    assert found == {"every": FAILS, "most": HOLDS, "average": HOLDS}


def test_a_verdict_shows_the_interval_that_decides(outcomes):
    """And not the average beside it, whose interval is narrower: of two datasets, the less clear one."""
    for status in (HOLDS, FAILS, OPEN):
        for verdict in outcomes[status].values():
            low, high = verdict.judged.interval(verdict.judged_at)
            inside = low > verdict.claim.asks.above and high < verdict.claim.asks.below
            outside = high < verdict.claim.asks.above or low > verdict.claim.asks.below
            told = {HOLDS: inside, FAILS: outside, OPEN: not inside and not outside}
            assert told[verdict.status], verdict.claim.name
    strong, weak = (effect for effect, _ in outcomes[HOLDS]["sim_aou_above_random"].places)
    weak = replace(weak, value=weak.value - 0.02, centre=weak.centre - 0.02)
    verdict = decide(ABOVE, [strong, weak])
    assert (verdict.status, verdict.judged, verdict.reason) == (HOLDS, weak, "on 2 of 2 datasets")
    assert decided_by(verdict).endswith(f"] on {weak.place}")


def test_layers_are_asked_of_models_of_that_depth_only():
    claim = next(claim for claim in claims() if claim.name == "lcgd_sim_aou_layers")
    values = np.ones((3, 5))
    assert judge(claim, Made(sim_aou_norm=values)).status == NO_DATA


def test_the_authors_own_runs_are_held_to_the_same_claims():
    """As docs/verdicts.md has them."""
    found = {verdict.claim.name: verdict for verdict in authors_verdicts()}
    assert found["sim_aou_above_random"].status == HOLDS
    assert found["sim_aou_above_random"].average.value == pytest.approx(0.183, abs=0.001)
    assert found["lcgd_sim_am_delta_layers"].status == OPEN  # appendix B.2 says nothing of layers 22 and 23
    assert min(effect.value for effect, _ in found["lcgd_sim_am_delta_layers"].places) > 0
    assert max(effect.value for effect, _ in found["lcgd_sim_am_delta_reversed"].places) < 0
    assert found["lcgd_sim_aou_norm"].status == OPEN  # SST-5 and AGNews differ by less than their seeds
    assert found["accuracy_gap"].status == NO_DATA
    mends = found["icl_mends_what_ft_mends"]
    above = {effect.place: round(effect.value, 3) for effect, _ in mends.places}
    assert above == {"mr": 0.098, "sst2": 0.034, "sst5": 0.365, "subj": 0.058}  # above what ICL mends anyway


def test_the_page_of_the_documentation_says_what_the_authors_runs_say():
    text = (Path(__file__).parents[2] / "docs" / "verdicts.md").read_text(encoding="utf-8")
    for verdict in authors_verdicts():
        (line,) = [line for line in text.splitlines() if line.startswith(f"| `{verdict.claim.name}` |")]
        cells = [cell.strip() for cell in line.split("|")]
        assert cells[4:6] == [verdict.status, decided_by(verdict)]


def test_the_verdicts_are_printed_with_their_effects(outcomes):
    found = list(outcomes[FAILS].values())
    assert "sim_aou_above_random                 does not hold  -0.200 [" in plain_verdicts(found)
    sheet = verdict_sheet("1.3b", found)
    assert {len(line) for line in sheet.lines} == {10}
    assert len(sheet.lines) == 1 + len(NAMES)
