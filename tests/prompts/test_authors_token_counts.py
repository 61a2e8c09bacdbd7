"""What the authors' log of a real run on Subj printed of its data, which needs no checkpoint to be checked.

The counts of tokens of every row are in a file beside this one, in the order of a copy of Subj whose train split has
its last 300 rows out of place. Where that copy is beside the clone, the counts are made anew and must be the same.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from fairseq_icl.prompts import Writing, sampling
from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.prompts.encoding import RowEncoder
from fairseq_icl.prompts.readers import read_split
from fairseq_icl.replication.report.published import authors_trajectory, published_figures

COUNTS = Path(__file__).with_name("subj_token_counts.json")
DATA = Path(__file__).parents[3] / "shared" / "data"
MOVED, ROWS = 300, 8000
K, SEED = 32, 4


@pytest.fixture(scope="module")
def counts() -> dict[str, list[int]]:
    """Tokens of input and label of every row of valid and train, without BOS; the labels of valid."""
    kept = json.loads(COUNTS.read_text())
    if (DATA / "subj").is_dir():
        assert made_anew() == kept
    return kept


def made_anew() -> dict[str, list[int]]:
    from fairseq_icl import models  # noqa: F401 - fairseq has to be imported by it
    from fairseq_icl.models.files import line_encoder, load_bpe, load_dictionary

    files = {"gpt2_encoder_json": "encoder.json", "gpt2_vocab_bpe": "vocab.bpe"}
    bpe = load_bpe("gpt2", **{name: str(DATA / "gpt2_bpe" / file) for name, file in files.items()})
    spec = load_spec("subj")
    encoder = RowEncoder(spec, Writing(line_encoder(load_dictionary(str(DATA / "gpt2_bpe" / "dict.txt")), bpe)))
    rows = {split: read_split(DATA, spec, split) for split in ("valid", "train")}
    found = {
        split: [len(query.inputs[0]) + len(query.labels[0]) for query in map(encoder.query, rows[split])]
        for split in rows
    }
    return {"valid": found["valid"], "gold": [row.gold for row in rows["valid"]], "train": found["train"]}


def test_the_validation_set_is_that_of_the_log(counts: dict[str, list[int]]):
    printed = published_figures()["other"]["subj_seed4_fp32"]
    sizes = np.array(counts["valid"])
    assert len(sizes) == 2000
    assert 1 + sizes.max() == printed["longest_sequence"]
    assert 2 * (1 + sizes.mean()) == pytest.approx(printed["tokens_per_batch"]["zsl"], abs=0.05)
    share = 100 * np.mean([gold == 0 for gold in counts["gold"]])
    assert share == pytest.approx(printed["positive_share"], abs=0.051)
    # A model that says that label for everything is as accurate as the log's fine-tuned model.
    assert share == pytest.approx(printed["accuracy"]["ft"], abs=0.051)


def test_the_prompt_is_as_long_as_that_of_the_log(counts: dict[str, list[int]]):
    for precision in ("fp16", "fp32"):
        log = authors_trajectory(precision)
        assert len(log) == K
        context = 1 + int((log["sample_size"] + 1).sum())  # each demonstration with the EOS that closes it
        printed = published_figures()["other"]["subj_seed4_fp32"]["tokens_per_batch"]["icl"]
        assert 2 * (context + np.mean(counts["valid"])) == pytest.approx(printed, abs=0.05)


def test_all_sample_sizes_are_those_of_the_rows_that_the_seed_draws(counts: dict[str, list[int]]):
    """A row of the authors' order is at most 300 lines further up in the copy, and the further the later it is."""
    sizes = authors_trajectory()["sample_size"].tolist()
    drawn = sampling.shuffled(ROWS, SEED)[:K]
    assert fitting(drawn, sizes, counts["train"]) == K
    shuffled = [list(np.random.default_rng(seed).permutation(sizes)) for seed in range(3)]
    assert max(fitting(drawn, wrong, counts["train"]) for wrong in shuffled) < 28  # what chance reaches
    assert fitting(sampling.shuffled(ROWS, SEED + 1)[:K], sizes, counts["train"]) < 28


def fitting(rows: list[int], sizes: list[int], tokens: list[int]) -> int:
    """How many sizes fit at most, if rows are moved up by a number of lines that never falls from row to row."""
    best = np.zeros(MOVED + 1, dtype=int)  # by the number of lines
    for row, size in sorted(zip(rows, sizes, strict=True)):
        lines = row - np.arange(MOVED + 1)
        fits = [0 <= line < ROWS - MOVED and tokens[line] == size for line in lines]
        best = np.maximum.accumulate(best) + fits
    return int(best.max())
