"""The report's page in a real browser: it works from disk, asks for nothing, and takes no name for markup."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairseq_icl.replication.folders import ResultsFolder
from fairseq_icl.replication.report import Contents, write_report
from fairseq_icl.replication.report.run import load_run
from tests.conftest import chromium
from tests.replication.claims_world import GD, LCGD, SATISFIED, finish, table

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium and playwright here")
ATTACK = "\"'><img src=x onerror=window.attacked=1><script>window.attacked=1</script>"
WIDE, NARROW = {"width": 1300, "height": 900}, {"width": 400, "height": 800}


def example(row: int, disagreement: float) -> dict[str, Any]:
    weights = {"demonstrations": [[100 * row, 900], [500, 500]], "tokens": [[[0, 700]], [[3, 600]]]}
    shares = {"zsl": [0.5, 0.5], "icl": [0.9, 0.1], "ft": [0.2, 0.8]}
    said = {"row": row, "gold": 0, "disagreement": disagreement, "query": f"query {row} {ATTACK}"}
    return said | {"options": [" good", ATTACK], "probabilities": shares, "icl": weights, "ft": weights}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a small run: two methods, two datasets, one of them named by an attacker."""
    folder = tmp_path_factory.mktemp("page")
    store, entries = ResultsFolder(folder / "run"), []
    for number, dataset in enumerate(("sst2", ATTACK)):
        for init, method in (GD, LCGD):
            for seed in (1, 2):
                key = f"{method}{number}{seed}"
                place = {"model": "1.3b", "init": init, "dataset": dataset, "method": method, "variant": ""}
                entries.append({**place, "seed": seed, "permutation": 0, "key": key})
                means = SATISFIED[init, method]
                finish(store, key, table(means, dict.fromkeys(means, 0.01 * seed), 0.01), place | {"seed": seed})
                kept = {"demonstrations": [["one", " two"], [ATTACK, " four"]]}
                kept["examples"] = [example(2, 0.9), example(1, 0.4)]
                (store.cell(key).path / "examples.json").write_text(json.dumps(kept))
    store.add_plan({"experiment": ATTACK, "tables": ["deutch2024_table2"], "cells": entries})
    run = load_run(folder / "run")
    grid = np.linspace(1, 2, 32 * 24).reshape(32, 24)
    run = replace(run, gradients={"gd01": grid, "lcgd01": grid**3})
    return write_report(Contents.of(run), folder / "report", ("html",))["html"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, report: Path) -> Iterator[Any]:
    """The page, opened from disk; at the end nothing may have gone wrong or left it."""
    context = browser.new_context(viewport=WIDE, color_scheme="light")
    opened, troubles, requests = context.new_page(), [], []
    opened.on(
        "console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None
    )
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    opened.on("request", lambda request: requests.append(request.url))
    opened.goto(report.as_uri())
    yield opened
    assert troubles == []
    assert requests == [report.as_uri()]
    assert opened.evaluate("window.attacked") is None
    context.close()


def test_the_page_opens_with_the_verdicts(page: Any):
    assert page.locator("main h2").first.inner_text() == "Do the papers' claims hold?"
    assert page.locator("p.answer").inner_text().startswith("On ")
    overview = page.locator("#overview table")
    assert overview.locator("tbody tr td:first-child").all_inner_texts()[-2:] == ["gd", "lcgd"]
    row = page.locator("#claim-lcgd_sim_aou_norm")
    assert "undecided" in row.inner_text()
    assert row.locator("> td").count() == 3  # the claim, here, the authors' runs
    assert page.title() == f"Report: {ATTACK}"


def test_toggles_change_the_charts(page: Any):
    lines = page.locator("#figures figure").nth(1).locator("polyline.line")
    panels = page.locator("#figures figure").nth(1).locator(".panels svg")
    assert (lines.count(), panels.count()) == (4, 2)
    page.locator("input[data-tag='method=gd']").uncheck()
    assert lines.count() == 2
    assert page.locator("#figures figure").nth(1).locator(".legend").inner_text() == "lcgd, pretrained"
    page.locator("input[data-tag='dataset=sst2']").uncheck()
    assert (lines.count(), panels.count()) == (1, 1)
    page.locator("input[data-tag='method=lcgd']").uncheck()
    assert "Nothing is chosen" in page.locator("#figures figure").nth(1).inner_text()


def test_the_authors_runs_are_a_band_beside_the_lines(page: Any):
    figure = page.locator("[id='figure-layers_sim_aou_norm_1.3b']")
    assert figure.locator("polygon.band").count() == 2  # of gd and lcgd on sst2; the other dataset has none
    assert "authors' runs: lcgd, pretrained" in figure.locator(".legend").inner_text()


def test_the_value_under_the_pointer_is_shown(page: Any):
    mark = page.locator("#figures figure").first.locator(".mark").first
    mark.scroll_into_view_if_needed()
    mark.hover(force=True)
    assert "layer 0: 0.5" in page.locator("#tip").inner_text()
    cell = page.locator("rect.cell").first
    cell.scroll_into_view_if_needed()
    cell.hover(force=True)
    assert page.locator("#tip").inner_text() == "layer 0, step 0: 1"


def test_an_example_can_be_chosen(page: Any):
    shown = page.locator("#example")
    assert shown.locator(".query").inner_text() == f"query 2 {ATTACK}"  # the one that disagrees most
    assert shown.locator(".weight").all_inner_texts() == ["20.0", "20.0", "90.0", "90.0"]
    page.locator("#example-number").select_option("1")
    assert shown.locator(".query").inner_text() == f"query 1 {ATTACK}"
    page.locator("#example-layer").fill("1")
    assert shown.locator(".weight").first.inner_text() == "50.0"
    page.locator("#example-group").select_option("1")
    assert shown.locator(".query").inner_text() == f"query 2 {ATTACK}"


def test_names_stay_text(page: Any):
    assert ATTACK in page.locator("#papers").inner_text()
    assert ATTACK in page.locator("#toggles").inner_text()
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2


def test_a_number_leads_to_its_configuration_and_tables_are_copied(page: Any):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    link = page.locator("#papers td a").first
    link.click()
    assert page.locator(f"details{link.get_attribute('href')}").get_attribute("open") is not None
    for form, part in (("csv", "SimAOU_norm, GD"), ("latex", r"\begin{tabular}")):
        page.locator(f"#papers button[data-form='{form}']").first.click()
        page.wait_for_function("document.querySelector('#papers .actions').innerText.includes('copied')")
        assert part in page.evaluate("navigator.clipboard.readText()")


def test_nothing_is_wider_than_a_narrow_screen_and_the_theme_changes(page: Any):
    page.set_viewport_size(NARROW)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    cut = "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    assert page.evaluate(cut) == 0  # no value lies outside
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
