"""What each stage computes on a tiny run. Whoever changes the numbers of a stage raises its version in cells.STAGES.

python -m tests.replication.test_stages      writes stages.json anew, once the versions are raised
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fairseq_icl as fi
from fairseq_icl.replication.cells import STAGES

KNOWN = Path(__file__).with_name("stages.json")
TOLERANCE = 1e-4


def summary(*arrays: object) -> list[float]:
    """A few numbers that change when the arrays do: weighted means of what is finite, and how much is."""
    found = []
    for array in arrays:
        values = np.nan_to_num(np.asarray(array, dtype=np.float64), posinf=0.0, neginf=0.0).ravel()
        found += [float(np.cos(np.arange(values.size)) @ values), float(np.abs(values).mean()), float(values.size)]
    return found


def computed() -> dict[str, list[float]]:
    """Stage -> a summary of what it makes of the demo model and data."""
    torch.set_num_threads(1)
    model = fi.load_model("demo", device="cpu")
    drawn = fi.load_model("demo", init="trained-embeddings", seed=2, device="cpu")
    prompts = fi.build_prompts(model, "demo_sentiment", k=4, seed=2, limit=6)
    zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
    tuned = {}
    for method in ("gd", "lcgd"):
        with fi.fine_tuned(model, prompts, method=method, lr=0.3) as found:
            tuned[method] = (found.weights, fi.observe(found, prompts))
    table = fi.compare(prompts, zsl, icl, tuned["gd"][1])
    means = table[table["example"].isna()].sort_values(["metric", "layer"])
    asked = [[*query.inputs[0], query.gold] for query in prompts.queries]
    trained = [list(sequence.tokens) for sequence in prompts.finetuning]
    return {
        "prompts": summary(prompts.context, np.concatenate(asked), np.concatenate(trained)),
        "weights": summary(*(weight.detach() for weight in list(drawn.lm.parameters())[:6])),
        "observing": summary(
            *(array for seen in (zsl, icl) for array in (seen.attention_output, seen.option_logprobs))
        ),
        "training": summary(*(weight for weights, _ in tuned.values() for weight in list(weights.values())[:4])),
        "metrics": summary(means["value"], means["low"].astype(float), means["high"].astype(float)),
    }


@pytest.fixture(scope="module")
def numbers() -> dict[str, list[float]]:
    before = torch.get_num_threads()
    found = computed()
    torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_the_numbers_of_a_stage_are_those_of_its_version(stage: str, numbers: dict[str, list[float]]):
    known = json.loads(KNOWN.read_text())[stage]
    same = len(known["numbers"]) == len(numbers[stage]) and np.allclose(
        known["numbers"], numbers[stage], rtol=TOLERANCE
    )
    said = f"the stage {stage} computes other numbers than version {known['version']} did"
    assert same, f"{said}: raise its version in replication/cells.py: STAGES, then python -m {__name__}"
    assert known["version"] == STAGES[stage], "write stages.json anew: python -m tests.replication.test_stages"


def test_another_version_of_a_stage_is_another_key_of_what_passes_it(world, tmp_path, monkeypatch):
    from fairseq_icl.models.files import find_files
    from fairseq_icl.replication.cells import Keys
    from fairseq_icl.replication.plan import expand
    from tests.replication.toy_run import configuration

    (cell,) = expand(configuration(world, tmp_path, "experiment=deutch2024", "method=gd", "init=pretrained"))
    files = find_files(world.model, bpe=None, name="toy")

    def keys() -> list[str]:
        return [Keys(files, world.data).of(cell, kind) for kind in ("zsl", "ft", "cell")]

    before = keys()
    monkeypatch.setitem(STAGES, "metrics", STAGES["metrics"] + 1)
    assert [old == new for old, new in zip(before, keys(), strict=True)] == [True, True, False]
    monkeypatch.setitem(STAGES, "training", STAGES["training"] + 1)
    assert [old == new for old, new in zip(before, keys(), strict=True)] == [True, False, False]
    monkeypatch.setitem(STAGES, "observing", STAGES["observing"] + 1)
    assert [old == new for old, new in zip(before, keys(), strict=True)] == [False, False, False]


if __name__ == "__main__":
    found = computed()
    KNOWN.write_text(
        json.dumps({stage: {"version": STAGES[stage], "numbers": found[stage]} for stage in STAGES}, indent=1)
    )
