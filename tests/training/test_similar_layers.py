"""layers=similar: the layers that move as ICL moves them, found on train rows."""

from dataclasses import replace

import pytest
import torch

import fairseq_icl as fi
from fairseq_icl.errors import UserError
from fairseq_icl.models import Model
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.replication.cells import Cell
from fairseq_icl.settings import Settings
from fairseq_icl.training.fine_tuning import best_stretch
from fairseq_icl.training.methods import get_method
from fairseq_icl.training.vectors import train_queries

HOW = {"lr": 0.3, "selection_rows": 5}


@pytest.fixture(scope="module")
def demo() -> tuple[Model, Prompts]:
    model = fi.load_model("demo")
    return model, fi.build_prompts(model, "demo_sentiment", k=4, seed=2, limit=4)


@pytest.mark.parametrize(
    ("values", "stretch"), [([-1, 3, 2, -4], "1-2"), ([1, -0.5, 2], "0-2"), ([-2, -1, -3], "1-1"), ([0.5], "0-0")]
)
def test_the_best_stretch(values: list[float], stretch: str):
    assert best_stretch(values) == stretch


@pytest.mark.parametrize("method", ["lcgd", "shallow_gd"])
def test_the_method_learns_in_the_layers_that_train_rows_choose(demo, method: str):
    model, prompts = demo
    rows = train_queries(model, prompts, replace(prompts.settings, selection_rows=5), 5)
    assert not {query.row for query in rows} & set(prompts.context_rows)
    asked = replace(prompts, queries=rows)
    with fi.fine_tuned(model, prompts, method, **HOW) as tuned:
        z, one, other = (
            fi.observe(of, asked, in_context=icl, record="heads").activations.heads[:, :, :, 0].double()
            for of, icl in ((model, False), (model, True), (tuned, False))
        )
    moved = (other - z).norm(dim=-1) > 1e-4 * z.norm(dim=-1)  # (n, L, H)
    cosines = torch.cosine_similarity(one - z, other - z, dim=-1).where(moved, torch.nan)
    expected = best_stretch(cosines.nanmean((0, 2)).nan_to_num().tolist())
    assert expected != "0-5"
    found = []
    for layers in ("similar", expected, None):
        with fi.fine_tuned(model, prompts, method, layers=layers, **HOW) as tuned:
            found.append(fi.observe(tuned, prompts).option_logprobs)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_method_without_heads_to_look_at_says_so(demo):
    with (
        pytest.raises(UserError, match=r"^layers=similar: .* linearized_lcgd does not show its heads"),
        fi.fine_tuned(*demo, "linearized_lcgd", layers="similar", **HOW),
    ):
        pass


def test_what_is_chosen_by_is_part_of_what_a_cell_is_known_by():
    def observed(**settings: object) -> Settings:
        return Cell("model", "sst2", "lcgd", "", Settings(lr=0.1, **settings)).observed("ft").settings

    assert get_method("lcgd").reads(fi.settings.SETTINGS["selection_rows"])
    for more in ({"selection_rows": 3}, {"separator": "newline"}):
        assert observed(layers="similar", **more) != observed(layers="similar")
    assert observed(separator="newline") == observed()
