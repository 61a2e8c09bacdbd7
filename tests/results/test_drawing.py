"""A metric by layer: one line per run with its interval, or a hint at what the table has."""

from pathlib import Path

import matplotlib as mpl
import pandas as pd
import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.results.collector import Collector
from fairseq_icl.results.drawing import STYLE, layers_figure, log_scale, panels
from tests.metrics.observations import random_observation


def table(method: str = "gd") -> pd.DataFrame:
    collector = Collector(["sim_aou", "accuracy_zsl"])
    collector.add(range(6), *(random_observation(seed) for seed in range(3)))
    return collector.table(dataset="sst2", seed=1, permutation=0, method=method, init="pretrained")


def test_every_run_of_the_table_is_a_line_over_the_layers(tmp_path: Path):
    both = pd.concat([table("gd"), table("lcgd")])
    figure = layers_figure(both, "sim_aou", tmp_path / "figure.png")
    [ax] = figure.axes
    lines = [container.lines[0] for container in ax.containers]
    values = both[(both["metric"] == "sim_aou") & both["example"].isna() & both["layer"].notna()]["value"]
    assert [line.get_xdata().tolist() for line in lines] == [[0, 1, 2]] * 2
    assert [y for line in lines for y in line.get_ydata()] == values.tolist()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["gd", "lcgd"]
    assert ax.get_title() == "sst2"
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_legend_names_what_differs():
    runs = [table().assign(seed=seed, dataset=name) for seed in (1, 2) for name in ("sst2", "mine")]
    figure = layers_figure(pd.concat(runs), "sim_aou")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["sst2, seed 1", "mine, seed 1", "sst2, seed 2", "mine, seed 2"]
    assert figure.axes[0].get_title() == ""
    [alone] = layers_figure(table(), "sim_aou").legends[0].get_texts()
    assert alone.get_text() == "gd"


def test_a_metric_that_the_table_does_not_have_by_layer_suggests_one():
    with pytest.raises(UserError, match=r"sim_auo: no values by layer in this table; did you mean sim_aou"):
        layers_figure(table(), "sim_auo")
    with pytest.raises(UserError, match="accuracy_zsl: no values by layer"):
        layers_figure(table(), "accuracy_zsl")


@pytest.mark.parametrize("values", [(0.0001, 0.03), (0.002, 0.03)], ids=["wide", "narrow"])
def test_ticks_of_a_logarithmic_axis_are_numbers(values: tuple[float, float]):
    with mpl.rc_context(STYLE):
        figure, (ax,) = panels(["one"])
        ax.plot(values, [0, 1])
        log_scale(ax)
        figure.draw_without_rendering()
        shown = [label.get_text() for label in ax.get_xticklabels(which="both") if label.get_text()]
    assert len(shown) >= 3
    assert all(float(text) > 0 for text in shown)
