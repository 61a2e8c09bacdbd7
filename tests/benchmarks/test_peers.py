"""Other libraries give the numbers that we give; one that is not installed is named and left out."""

from pathlib import Path

import pytest

from benchmarks import peer_runs
from benchmarks.peer_runs import FAMILIES, OURS, largest_difference, measure_peers, peak_of, save_random
from benchmarks.peers import PEERS, Peer, Seen, Work, by_length, load_harness, load_lens, load_lens_cached
from benchmarks.report import BenchFindings
from benchmarks.shapes import Shape, random_prompts
from fairseq_icl.api import load_model
from fairseq_icl.models.hugging_face import read_folder

# Theirs, and nothing that we could change.
pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = Shape("small", layers=2, width=32, heads=2, ffn=64, vocabulary=400)
PACKAGES = {load_lens: "transformer_lens", load_lens_cached: "transformer_lens", load_harness: "lm_eval"}


def work_and_folder(family: str, folder: Path) -> Work:
    save_random(family, SMALL, folder)
    prompts = random_prompts(SMALL, num_demonstrations=2, num_queries=5)
    return Work.of(prompts.context, prompts.queries, read_folder(str(folder)).vocabulary.order)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_peer_gives_our_numbers(peer: Peer, family: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES.get(peer.load, "transformers"))
    work = work_and_folder(family, tmp_path)
    prompts = random_prompts(SMALL, num_demonstrations=2, num_queries=5)
    score = peer.load(tmp_path)
    for size in (1, 2, 8):
        seen = score(work, size)
        assert (seen.outputs is None) == (peer.load is load_harness)
        assert largest_difference(load_model(str(tmp_path)), prompts, seen) < 1e-5


def test_work_is_in_the_ids_of_the_model() -> None:
    prompts = random_prompts(SMALL, num_demonstrations=1, num_queries=3)
    order = list(reversed(range(SMALL.vocabulary)))
    work = Work.of(prompts.context, prompts.queries, order)
    assert work.context == tuple(order[token] for token in prompts.context)
    assert work.inputs[2] == tuple(order[token] for token in prompts.queries[2].inputs[0])
    assert work.options.tolist() == [[order[label[0]] for label in query.labels] for query in prompts.queries]
    assert [len(batch.inputs) for batch in work.batches(2)] == [2, 1]


def test_batches_of_like_length_come_back_in_order() -> None:
    prompts = random_prompts(SMALL, num_demonstrations=1, num_queries=7)
    work = Work.of(prompts.context, prompts.queries, range(SMALL.vocabulary))
    lengths: list[int] = []

    def score(batch: Work) -> Seen:
        lengths.extend(len(one) for one in batch.inputs)
        return Seen(batch.options)

    seen = by_length(work, 3, score)
    assert lengths == sorted(lengths)
    assert seen.scores.tolist() == work.options.tolist()


def test_every_family_has_a_row_and_a_wrong_number_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")

    def load_wrong(folder: Path):
        right = PEERS[1].load(folder)
        return lambda work, size: Seen(1.001 * right(work, size).scores)

    chosen = (PEERS[1], Peer("a wrong one", load_wrong))
    monkeypatch.setattr(peer_runs, "PEERS", chosen)
    monkeypatch.setattr(peer_runs, "peak_of", lambda *_: 2**20)
    findings, said = BenchFindings("small", ""), list[str]()
    measure_peers(findings, SMALL, rounds=1, sample=2, say=said.append)
    assert len(findings.rows) == len(chosen) * len(FAMILIES) == len(said)
    assert all(row.ratio and row.ours_memory == row.authors_memory == 2**20 for row in findings.rows)
    same = {limit.what: limit.kept for limit in findings.limits if "difference" in limit.what}
    assert list(same.values()) == [True, False] * len(FAMILIES)


def test_peer_that_is_not_installed_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")

    def absent(folder: Path):
        raise ImportError("No module named 'absent'")

    monkeypatch.setattr(peer_runs, "PEERS", (Peer("an absent one", absent), PEERS[0]))
    monkeypatch.setattr(peer_runs, "peak_of", lambda *_: 2**20)
    findings = BenchFindings("small", "")
    measure_peers(findings, SMALL, rounds=1, sample=1, say=lambda _: None)
    assert len(findings.rows) == len(FAMILIES)
    (note,) = [note for note in findings.notes if note.startswith("an absent one: not installed, left out")]
    assert "pip install 'fairseq-icl[bench]'" in note


def test_without_transformers_there_are_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ImportError("No module named 'transformers'")

    monkeypatch.setattr(peer_runs, "import_transformers", absent)
    findings = BenchFindings("small", "")
    measure_peers(findings, SMALL, rounds=1, sample=1, say=lambda _: None)
    assert findings.rows == findings.limits == []
    assert findings.notes[0].startswith("transformers is not installed")


def test_memory_is_that_of_a_process_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    work_and_folder("gpt2", tmp_path)
    for name in (OURS, PEERS[0].name):
        assert 0 < peak_of(SMALL, tmp_path, name, 1) < 2**28
