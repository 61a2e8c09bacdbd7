"""What a plan is said to cost."""

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fairseq_icl.models.files import find_files
from fairseq_icl.operations import DecoderSizes, operations
from fairseq_icl.prompts.build import Prompts, build_prompts
from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.replication import cost, slurm
from fairseq_icl.replication.configuration import compose_configuration
from fairseq_icl.replication.cost import describe, duration, estimate, models_at_once, peak_bytes, stages_of
from fairseq_icl.replication.effort import ROWS, Machine, fine_tuning, measuring, observing, watching
from fairseq_icl.replication.plan import expand
from fairseq_icl.settings import Settings
from fairseq_icl.training.methods import get_method, method_names
from tests.replication.toy_run import configuration, run

SIZES = DecoderSizes.of(layers=3, width=16, heads=2, ffn=32, vocabulary=50)
DEEP = replace(SIZES, layers=6)


@pytest.fixture
def prompts(world) -> Prompts:
    files = find_files(world.model, bpe=None)
    return build_prompts(load_spec(str(world.spec)), world.data, files.writing, Settings(num_demonstrations=4, limit=8))


def test_shared_work_is_counted_once():
    cells = expand(compose_configuration(["experiment=deutch2024", "model=1.3b", "data=."]))
    counts = Counter()
    for stage, (count, _) in stages_of(cells).items():
        counts[stage.name] += count
    baselines = 2 * 5 * 3  # inits, datasets without AGNews, seeds
    assert counts["zsl"] == 6 + baselines  # a pretrained model without demonstrations knows no seed
    assert counts["icl"] == 18 + baselines
    assert counts["train"] == counts["ft"] == 2 * 18 + baselines  # alpha trains nothing of its own
    assert counts["measure"] == len(cells)
    assert counts["prompts"] == 18


def test_a_rotary_folder_is_counted_with_its_own_matrices(tmp_path: Path):
    pytest.importorskip("transformers")
    from tests.models.hf_reference import reference_model, save

    folder = save(reference_model("llama"), tmp_path / "llama")
    sizes = cost.sizes_of({}, find_files(folder))
    assert (sizes.layers, sizes.width, sizes.attention, sizes.keys, sizes.ffn) == (3, 24, 24, 12, 40)
    assert sizes.layer_weights == 2 * 24 * 24 + 2 * 24 * 12 + 3 * 24 * 40
    assert cost.files_bytes(find_files(folder)) > 4 * 3 * sizes.layer_weights


def test_times_are_told_as_people_say_them():
    assert [duration(seconds) for seconds in (5, 330, 3000, 36000)] == ["5 s", "5.5 min", "50 min", "10.0 h"]


def test_scoring_grows_with_layers_queries_and_the_prompt(prompts: Prompts):
    logits = len(prompts.queries) + len(prompts.content_free)  # labels of one token: one row of logits a query
    plain, deep = observing(SIZES, prompts, 0), observing(DEEP, prompts, 0)
    assert plain["logits"] == deep["logits"] == logits * SIZES.vocabulary
    assert deep["tokens"] == 2 * plain["tokens"]
    assert deep["attention"] > 2 * plain["attention"]  # the last layer's is wanted at few tokens
    few = replace(prompts, content_free=())
    twice = replace(few, queries=tuple(q for q in few.queries for _ in range(2)))  # the same batches of twice the rows
    shared = len(few.start) + len(few.opening)
    once = operations(SIZES.forward(shared, shared**2 / 2, read=0))
    assert operations(observing(SIZES, twice, 0)) - once == 2 * (operations(observing(SIZES, few, 0)) - once)
    short, long = (observing(SIZES, few, prefix) for prefix in (10, 20))
    assert long["tokens"] - short["tokens"] == 10 * SIZES.layers  # the prefix runs once, whatever the number of queries


def test_fine_tuning_grows_with_demonstrations_and_losses(prompts: Prompts):
    gd, lcgd = get_method("gd"), get_method("lcgd")
    twice = replace(prompts, finetuning=prompts.finetuning * 2)
    work = fine_tuning(SIZES, prompts, gd, prompts.settings)
    assert fine_tuning(SIZES, twice, gd, prompts.settings) == Counter({kind: 2 * n for kind, n in work.items()})
    tokens = sum(len(sequence.tokens) for sequence in prompts.finetuning)
    scored = sum(sum(sequence.scored) for sequence in prompts.finetuning)
    assert work["logits"] == 2 * tokens * SIZES.vocabulary  # forward, and back
    causal = fine_tuning(SIZES, prompts, lcgd, prompts.settings)
    assert causal["logits"] == SIZES.layers * 2 * scored * SIZES.vocabulary
    whole = fine_tuning(SIZES, prompts, gd, replace(prompts.settings, gradient_norms="all"))
    formed = SIZES.learning("q_proj,out_proj")
    assert operations(whole) - operations(work) == 2 * tokens * formed * SIZES.layers
    token = fine_tuning(SIZES, prompts, gd, replace(prompts.settings, step_per="token"))
    assert token["calls"] == work["calls"] * scored / len(prompts.finetuning)


def test_every_method_and_the_dynamics_can_be_counted(prompts: Prompts):
    plain = operations(fine_tuning(SIZES, prompts, get_method("gd"), prompts.settings))
    for name in method_names():
        if get_method(name).trains:
            assert operations(fine_tuning(SIZES, prompts, get_method(name), prompts.settings)) >= 0.8 * plain
    cut = fine_tuning(SIZES, prompts, get_method("short_circuit"), replace(prompts.settings, layers="0"))
    assert operations(cut) < 0.8 * plain
    one, two = (watching(SIZES, prompts, examples, linearized=False) for examples in (4, 8))
    assert operations(one) < operations(two)
    assert measuring(SIZES, prompts, 1)["touches"] > measuring(SIZES, prompts, 2)["touches"]


def test_rates_between_the_measured_ones_are_interpolated():
    machine = Machine(rates=(1.0, 3.0, 4.0, 5.0), touch=0.0, call=0.0)
    assert [machine.rate(rows) for rows in (1, *ROWS, 10**6)] == pytest.approx([1, 1, 3, 4, 5, 5])
    assert 1 < machine.rate(16) < 3
    seconds = machine.seconds(SIZES.forward(8, 0), SIZES)
    assert seconds == pytest.approx(2 * 8 * SIZES.layer_weights * SIZES.layers)
    assert machine.seconds(SIZES.forward(32, 0), SIZES) == pytest.approx(4 / 3 * seconds)


def test_a_dry_run_measures_and_writes_nothing(world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "run"
    chosen = ["experiment=deutch2024", "method=gd", "init=pretrained", "seed=3,4"]
    config = configuration(world, out, *chosen)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    text = describe(config, expand(config), world.data)
    assert "estimated time:" in text
    assert "estimated memory: 0." in text
    assert not any(tmp_path.iterdir())
    run(world, out, *chosen)
    text = describe(config, expand(config), world.data)
    assert "everything is finished already" in text


def test_workers_have_one_base_model_and_all_else_for_each_of_them(prompts: Prompts, monkeypatch: pytest.MonkeyPatch):
    large = DecoderSizes.of(layers=24, width=2048, heads=32, ffn=8192, vocabulary=50_000)
    cells = expand(compose_configuration(["experiment=deutch2024", "model=1.3b", "data=.", "init=pretrained"]))
    one, two, three = (peak_bytes(large, [prompts], cells, workers) for workers in (1, 2, 3))
    weights, rest = 4 * large.weights, one - 4 * large.weights
    assert three - two < two - one + cost.PROCESS_BYTES  # the parent is there once
    assert two == pytest.approx(weights + 2 * rest + cost.PROCESS_BYTES)
    monkeypatch.setattr(cost, "can_share", lambda: False)
    assert peak_bytes(large, [prompts], cells, 2) == pytest.approx(2 * one + cost.PROCESS_BYTES)


def test_several_models_are_in_use_where_each_has_few_cells():
    whole = expand(compose_configuration(["experiment=deutch2024", "model=1.3b", "data=."]))
    pretrained = [cell for cell in whole if cell.init == "pretrained"]
    assert [models_at_once(pretrained, workers) for workers in (1, 2, 8)] == [1, 1, 1]
    assert [models_at_once(whole, workers) for workers in (1, 2, 3, 4)] == [
        1,
        2,
        2,
        3,
    ]  # 1 + 12 models, most of few cells
    assert models_at_once([cell for cell in whole if cell.dataset == "sst2"], 100) == 7


def test_random_weights_that_are_not_made_yet_can_be_planned(world, tmp_path: Path):
    shape = "model.shape={layers: 2, width: 8, heads: 2, ffn: 16, vocabulary: 50}"
    random = ["model.random=true", shape]
    config = configuration(world, tmp_path / "run", "experiment=deutch2024", "method=gd", "init=pretrained", *random)
    assert "2 layers of width 8" in describe(config, expand(config), world.data)
    assert not any(tmp_path.iterdir())


def test_prompts_of_a_dataset_are_built_once(world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    built: list[Settings] = []
    monkeypatch.setattr(cost, "build_prompts", lambda *given: built.append(given[3]) or build_prompts(*given))
    config = configuration(world, tmp_path, "experiment=deutch2024", "init=pretrained", "seed=3,4,5")
    estimate(config, expand(config), world.data)
    assert len(built) == 1


def test_alpha_of_methods_with_rates_of_their_own_can_be_planned(world, tmp_path: Path):
    config = configuration(world, tmp_path / "run", "experiment=deutch2024", "init=pretrained", "lr=null")
    config["model"]["learning_rates"] = {"toy": {"gd": 0.1, "lcgd": 0.01}}
    cells = expand(config)
    assert {cell.settings.lr for cell in cells} == {0.1, 0.01, None}
    assert "estimated time:" in describe(config, cells, world.data)


def test_runs_held_to_the_norms_of_another_method_can_be_planned(world, tmp_path: Path):
    config = configuration(world, tmp_path / "run", "experiment=clipping", "method=lcgd")
    held = [cell for cell in expand(config) if cell.settings.layer_clip_value == "gd"]
    assert len(held) == 1
    assert "estimated time:" in describe(config, held, world.data)


def test_a_plan_for_slurm_measures_the_machine_once(world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from fairseq_icl.commands.replicate import _described

    asked: list[int] = []
    monkeypatch.setattr(slurm, "estimate", lambda *given: asked.append(1) or estimate(*given))
    monkeypatch.setattr(cost, "estimate", lambda *given: asked.append(2))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    config = configuration(world, tmp_path / "run", "experiment=deutch2024", "method=gd", "launcher=slurm")
    text = _described(config, expand(config), world.data, [])
    assert "estimated time:" in text
    assert "#SBATCH" in text
    assert asked == [1]


def test_an_estimate_is_of_the_order_of_a_real_run(world, tmp_path: Path):
    config = configuration(world, tmp_path / "run", "experiment=deutch2024", "method=gd,lcgd", "init=pretrained")
    plan = estimate(config, expand(config), world.data)
    times = []
    for folder in ("warm", "run", "run"):  # the first loads what all need, the last has only the report to make
        start = time.process_time()
        run(world, tmp_path / folder, "experiment=deutch2024", "method=gd,lcgd", "init=pretrained")
        times.append(time.process_time() - start)
    taken = times[1] - times[2]
    planned = plan.seconds - dict(plan.parts)["start and report"]
    assert taken / 8 < planned < 8 * taken  # another process may have any share of the machine
