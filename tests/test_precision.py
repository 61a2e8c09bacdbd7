"""Precision: every stage computes in it, within its rounding of fp32; results say it and are never mixed."""

import itertools
import json
import logging
from pathlib import Path

import pytest
import torch
from fairseq import options
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

import fairseq_icl as fi
from fairseq_icl.commands.doctor import Findings, compare_devices
from fairseq_icl.errors import UserError
from fairseq_icl.models import Model
from fairseq_icl.models.pretrained_lm import DTYPES
from fairseq_icl.observing import Observation
from fairseq_icl.observing.saved import load_observations, save_observations
from fairseq_icl.observing.weight_updates import observe_weight_updates
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.replication.cells import OBSERVED, Keys
from fairseq_icl.replication.engine import Engine
from fairseq_icl.replication.find_model import find_model
from fairseq_icl.replication.folders import ResultsFolder
from fairseq_icl.replication.plan import expand
from fairseq_icl.replication.report import Contents, html, markdown_page
from fairseq_icl.replication.report.run import load_run
from fairseq_icl.results import means, read_results
from fairseq_icl.settings import Settings
from fairseq_icl.tasks.restore import restore
from fairseq_icl.training.methods import Method, training_command, training_options
from tests.commands import succeeded
from tests.replication import toy_run
from tests.world import PLUGIN, World, make_world

HALF = ("fp16", "bf16")
WORDS = ["experiment=deutch2024", "method=gd", "init=pretrained"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("precision") / "w")


@pytest.fixture(scope="module")
def models(world: World) -> dict[str, Model]:
    return {name: fi.load_model(world.model, bpe=None, precision=name) for name in DTYPES}


def prompts_for(world: World, model: Model, k: int = 1) -> Prompts:
    return fi.build_prompts(model, str(world.spec), data=world.data, k=k, seed=3, limit=6)


def eps(precision: str) -> float:
    return torch.finfo(DTYPES[precision]).eps


def assert_close(found: Tensor, exact: Tensor, precision: str, steps: float) -> None:
    """Within `steps` roundings of the largest value, and not the same: fp32 was not used in secret."""
    assert (found - exact).abs().max() <= steps * eps(precision) * exact.abs().max()
    assert not torch.equal(found, exact)


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("method", ["gd", "lcgd"])
def test_one_step_is_that_of_fp32_within_rounding(
    world: World, models: dict[str, Model], method: str, precision: str
) -> None:
    weights, norms = {}, {}
    for name in ("fp32", precision):
        model = models[name]
        before = {key: parameter.detach().clone() for key, parameter in model.lm.named_parameters()}
        with fi.fine_tuned(model, prompts_for(world, model), method, lr=1.0) as tuned:
            weights[name], norms[name] = tuned.weights, tuned.gradients["norm"]
        assert all(torch.equal(parameter, before[key]) for key, parameter in model.lm.named_parameters())
    for key, exact in weights["fp32"].items():
        assert weights[precision][key].dtype == DTYPES[precision]
        assert_close(weights[precision][key].float(), exact, precision, steps=4)
    learnt = norms["fp32"] > 1e-4  # key biases have no gradient but rounding
    assert norms[precision][learnt].to_numpy() == pytest.approx(
        norms["fp32"][learnt].to_numpy(), rel=20 * eps(precision)
    )


@pytest.fixture(scope="module")
def seen(world: World, models: dict[str, Model]) -> dict[str, tuple[Observation, Observation]]:
    """Precision -> what is seen in ZSL and ICL."""
    found = {}
    for name, model in models.items():
        prompts = prompts_for(world, model, k=6)
        found[name] = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
    return found


@pytest.mark.parametrize("precision", HALF)
def test_what_is_recorded_are_values_of_the_precision_near_those_of_fp32(
    seen: dict[str, tuple[Observation, Observation]], precision: str
) -> None:
    for half, exact in zip(seen[precision], seen["fp32"], strict=True):
        assert half.precision == precision
        for name in ("attention_output", "attention_row", "query_vector"):
            found = getattr(half, name)
            assert torch.equal(found, found.to(DTYPES[precision]).float())
            assert_close(found, getattr(exact, name), precision, steps=8)
        assert_close(half.option_logprobs, exact.option_logprobs, precision, steps=8)


@pytest.mark.parametrize("precision", HALF)
def test_the_shared_prefix_is_the_whole_prompt_within_rounding(
    world: World, models: dict[str, Model], seen: dict[str, tuple[Observation, Observation]], precision: str
) -> None:
    model = models[precision]
    prompts = prompts_for(world, model, k=6)
    whole = fi.observing.observe_all(
        fi.observing.Observer(model, prompts, in_context=True, whole_prompt=True), prompts.queries
    )
    for name in ("attention_output", "attention_row", "context_row", "option_logprobs"):
        found, exact = getattr(seen[precision][1], name), getattr(whole, name)
        assert (found - exact).abs().max() <= 8 * eps(precision) * exact.abs().max()


def test_observations_of_two_precisions_are_not_compared(
    world: World, models: dict[str, Model], seen: dict[str, tuple[Observation, Observation]], tmp_path: Path
) -> None:
    save_observations(tmp_path / "seen.safetensors", {"zsl": seen["fp16"][0]})
    zsl = load_observations(tmp_path / "seen.safetensors")[1]["zsl"]
    with pytest.raises(UserError, match="observations in fp16 and fp32; observe all of them in one precision"):
        fi.compare(prompts_for(world, models["fp32"], k=6), zsl, seen["fp32"][1])


@pytest.mark.parametrize("method", ["linearized", "linearized_lcgd", "match_icl"])
def test_methods_with_passes_of_their_own_run_in_half_precision(
    world: World, models: dict[str, Model], method: str
) -> None:
    model = models["fp16"]
    prompts = prompts_for(world, model, k=2)
    with fi.fine_tuned(model, prompts, method, lr=0.01) as tuned:
        assert fi.observe(tuned, prompts).option_logprobs.isfinite().all()
        assert {weight.dtype for weight in tuned.weights.values()} == {torch.float16}


def test_updates_in_weight_space_are_summed_in_fp32(world: World, models: dict[str, Model]) -> None:
    model = models["fp16"]
    prompts = prompts_for(world, model, k=2)
    prefix = fi.observing.Observer(model, prompts, in_context=True).prefix
    with fi.fine_tuned(model, prompts, lr=0.1) as tuned:
        updates = observe_weight_updates(model, tuned, prompts.queries, prefix, prompts.start, "option0")
    assert updates.icl.dtype == updates.ft.dtype == torch.float32


def test_a_sequential_method_is_refused_before_anything_is_loaded(world: World, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lcgd_sequential: one layer's step cannot be taken alone in half precision"):
        expand(toy_run.configuration(world, tmp_path, *WORDS[::2], "method=lcgd_sequential", "precision=bf16"))


def with_scale(scale: int, *flags: str) -> Method:
    return Method("scaled", "", ("--criterion", "cross_entropy", "--fp16-init-scale", str(scale), *flags))


def test_an_update_that_overflows_is_skipped_counted_and_not_recorded(
    world: World, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = models["fp16"]
    prompts = prompts_for(world, model, k=6)
    monkeypatch.setattr("fairseq_icl.training.fine_tuning.get_method", lambda name: with_scale(2**17))
    with caplog.at_level(logging.WARNING), fi.fine_tuned(model, prompts, "scaled", lr=0.1) as tuned:
        rows = tuned.gradients.groupby("step")["demonstration"].first().tolist()
        ft = fi.observe(tuned, prompts)
    skipped = 6 - len(rows)
    assert 0 < skipped < 6
    table = fi.compare(prompts, fi.observe(model, prompts), fi.observe(model, prompts, in_context=True), ft)
    assert means(table).set_index("metric")["value"]["skipped_updates"] == skipped
    assert f"{skipped} of 6 updates were skipped" in caplog.text
    assert rows == [row for sequence in prompts.finetuning if (row := str(sequence.row)) in rows]  # one each, in order


def test_torch_itself_is_not_changed_while_a_model_trains(world: World, models: dict[str, Model]) -> None:
    before, during = Tensor.cuda, []
    hook = register_module_forward_pre_hook(lambda *_: during.append(Tensor.cuda))
    try:
        with fi.fine_tuned(models["fp16"], prompts_for(world, models["fp16"]), "gd", lr=0.1):
            pass
    finally:
        hook.remove()
    assert set(during) == {before}


def test_a_loss_scale_that_nothing_fits_is_one_line(
    world: World, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = with_scale(2**30, "--min-loss-scale", "536870912.0")
    monkeypatch.setattr("fairseq_icl.training.fine_tuning.get_method", lambda name: method)
    with (
        pytest.raises(UserError, match="overflows fp16 at every loss scale"),
        fi.fine_tuned(models["fp16"], prompts_for(world, models["fp16"]), "scaled", lr=0.1),
    ):
        pass


def test_weights_beyond_the_precision_are_refused(world: World, tmp_path: Path) -> None:
    state = torch.load(world.model, weights_only=False)
    state["model"]["decoder.layers.0.fc1.weight"][0, 0] = 1e5
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"precision=fp16: layers\.0\.fc1\.weight has weights too large for it"):
        fi.load_model(tmp_path / "model.pt", bpe=None, tokenizer=world.dictionary.parent, precision="fp16")


def test_keys_of_all_results_depend_on_it_and_prompts_do_not(world: World, tmp_path: Path) -> None:
    config = toy_run.configuration(world, tmp_path / "run", *WORDS)
    engine = Engine(Keys(find_model(config["model"], tmp_path), world.data), ResultsFolder(tmp_path / "run"))
    cells = [expand(config | {"precision": name})[0] for name in DTYPES]
    for kind in ("cell", *OBSERVED):
        assert len({engine.keys.of(cell, kind) for cell in cells}) == 3
    assert len({cell.prompts_key() for cell in cells}) == 1


@pytest.fixture(scope="module")
def mixed(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder with the same cell in two precisions, and an unfinished one in a third."""
    out = tmp_path_factory.mktemp("mixed") / "run"
    for precision in ("fp32", "fp16"):
        toy_run.run(world, out, *WORDS, f"precision={precision}")
    return out


def test_precisions_in_one_folder_are_told_apart_and_said(mixed: Path) -> None:
    folder = load_run(mixed)
    assert sorted(folder.planned["model"]) == ["model (precision=fp16)", "model (precision=fp32)"]
    assert set(folder.summary["runs"]) == {1}
    assert "model (precision=fp16)" in folder.models
    assert folder.computed_in == "Computed in fp16, fp32."
    assert any("different precision (fp16, fp32)" in warning for warning in folder.warnings)
    contents = Contents.of(folder)
    for page in (html.page(contents, []), markdown_page(contents, [])):
        assert "Computed in fp16, fp32." in page


def test_results_and_the_command_that_repeats_them_say_the_precision(mixed: Path) -> None:
    said = {}
    for cell in mixed.glob("cells/*/cell.json"):
        content = json.loads(cell.read_text())
        said[content["cell"]["settings"]["precision"]] = content
        assert read_results(cell.parent / "results.parquet")[1]["machine"] == content["machine"]
    assert {name: content["machine"]["precision"] for name, content in said.items()} == {"fp32": "fp32", "fp16": "fp16"}
    assert "--precision fp16" in said["fp16"]["command"]
    assert "--fp16 --fp16-init-scale 4 --fp16-scale-window 256" in said["fp16"]["command"]


def test_a_run_of_one_precision_keeps_the_names_of_its_models(world: World, tmp_path: Path) -> None:
    folder = load_run(
        toy_run.run(world, tmp_path / "run", *WORDS[::2], "method=none", "vary={precision: [bf16, fp16]}")
    )
    assert set(folder.planned["model"]) == {"model"}
    assert set(folder.planned["variant"]) == {"", "precision=bf16", "precision=fp16"}


def parsed(*flags: str) -> dict[str, object]:
    """What fairseq-train makes of these flags, with the plugin's task."""
    words = ["--task", "demonstration_prompting", "--arch", "pretrained_lm", "--optimizer", "sgd", "--user-dir", PLUGIN]
    words += ["--criterion", "cross_entropy", "--pretrained", "model.pt", "--dataset", "sst2", "DATA", *flags]
    return vars(options.parse_args_and_arch(options.get_training_parser(), list(map(str, words))))


@pytest.mark.parametrize("flag", [["--precision", "{}"], ["--precision={}"], ["--{}"]])
@pytest.mark.parametrize("precision", HALF)
def test_our_flag_and_those_of_fairseq_mean_the_same(flag: list[str], precision: str) -> None:
    found = parsed(*(word.format(precision) for word in flag))
    assert (str(found["precision"]), found["fp16"], found["bf16"]) == (
        precision,
        precision == "fp16",
        precision == "bf16",
    )
    assert (found["fp16_init_scale"], found["fp16_scale_window"], found["tpu"]) == (4, 256, False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--precision", "fp32", "--fp16"], "fp16 and fp32 at once; give one of them"),
        (["--bf16", "--fp16"], "bf16 and fp16 at once"),
        (["--precision", "half"], "choose from 'fp32', 'fp16', 'bf16'"),
        (
            ["--memory-efficient-fp16"],
            "--memory-efficient-fp16: fairseq does not have it for SGD; use --precision fp16",
        ),
        (
            ["--memory-efficient-bf16"],
            "--memory-efficient-bf16: fairseq does not have it for SGD; use --precision bf16",
        ),
    ],
)
def test_flags_that_fairseq_cannot_follow_are_one_line(flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parsed(*flags)


def test_saved_weights_are_values_of_the_precision_and_are_read_again_in_it(world: World, tmp_path: Path) -> None:
    succeeded(world.train(tmp_path, "--bf16"))
    path = tmp_path / "checkpoint_last.pt"
    saved = torch.load(path, weights_only=False)["model"]
    (model,), _, task = restore(str(path), {"task": "demonstration_prompting"})
    assert task.settings.precision == "bf16"
    in_python = fi.load_model(world.model, bpe=None, precision="bf16", device="cpu")
    with fi.fine_tuned(in_python, prompts_for(world, in_python, k=6), lr=0.1) as tuned:
        for name, weight in saved.items():
            read = dict(model.named_parameters())[name]
            assert read.dtype == torch.bfloat16
            assert torch.equal(weight, read.float())
            assert torch.equal(read, tuned.weights[name])


def test_options_of_training_follow_the_precision(world: World) -> None:
    files = fi.load_model(world.model, bpe=None).files
    gd = Method("gd", "", ("--criterion", "cross_entropy"))
    command = training_command(training_options(gd, Settings(precision="bf16", lr=1.0), files, "DATA", "sst2"))
    assert "--bf16" in command.split()
    assert "--fp16" not in command.split()


def test_the_doctor_compares_two_devices(models: dict[str, Model]) -> None:
    rows = [0, 5, 7, 9, 11, 4]
    decoder = models["fp32"].lm.decoder
    findings = Findings()
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    compare_devices(findings, decoder, rows, other="cpu")
    assert "differ by at most 0.0e+00 from those of the CPU" in findings.lines[0]
    assert "ok       gpu fp16" in findings.lines[1]
    assert not findings.problems
    assert all(torch.equal(value, before[name]) for name, value in decoder.state_dict().items())
    factor = itertools.count(1)  # what a device that computes something else would do
    with decoder.output_projection.register_forward_hook(lambda _, __, logits: logits * next(factor)):
        compare_devices(findings, decoder, rows, other="cpu")
    assert findings.problems == 1
    assert "PROBLEM  gpu" in findings.lines[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_the_doctor_says_that_there_is_no_gpu(models: dict[str, Model]) -> None:
    findings = Findings()
    compare_devices(findings, models["fp32"].lm.decoder, [0, 5])
    assert findings.lines == ["  ok       gpu            none here: numbers of CPU and GPU were not compared"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: CPU and GPU cannot be compared")
def test_cpu_and_gpu_agree(models: dict[str, Model]) -> None:
    findings = Findings()
    compare_devices(findings, models["fp32"].lm.decoder, [0, 5, 7, 9])
    assert not findings.problems, findings.lines
