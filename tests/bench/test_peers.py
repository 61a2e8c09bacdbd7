"""transformers, asked both ways, gives the numbers that we give; without it there is one clear line."""

import pytest

from fairseq_icl.bench import peers
from fairseq_icl.bench.peers import FAMILIES, measure_peers
from fairseq_icl.bench.report import BenchFindings
from fairseq_icl.bench.shapes import Shape
from fairseq_icl.errors import UserError

SMALL = Shape("small", layers=2, width=32, heads=2, ffn=64, vocabulary=400)


def test_every_family_and_way_has_a_row_and_the_same_numbers(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(peers, "BATCHES", (16,))
    findings, said = BenchFindings("small", ""), list[str]()
    measure_peers(findings, SMALL, rounds=1, sample=2, say=said.append)
    assert len(findings.rows) == 2 * len(FAMILIES) == 2 * len(said)
    same = [limit for limit in findings.limits if "difference" in limit.what]
    assert len(same) == len(FAMILIES)
    assert all(limit.kept and limit.value > 0 for limit in same)


def test_both_ways_of_transformers_agree(tmp_path):
    pytest.importorskip("transformers")
    model = peers.save_random("llama", SMALL, tmp_path)
    peer = peers.Peer(model, range(SMALL.vocabulary))
    prompts = peers.random_prompts(SMALL, num_demonstrations=2, num_queries=5)
    careful, naive = peer.careful(prompts, 2), peer.naive(prompts, prompts.queries)
    assert float((careful.scores - naive.scores).abs().max()) < 1e-5
    assert float((careful.outputs - naive.outputs).abs().max()) < 1e-5


def test_without_transformers_there_is_one_clear_line(tmp_path, monkeypatch: pytest.MonkeyPatch):
    def absent() -> None:
        raise ImportError("No module named 'transformers'")

    monkeypatch.setattr(peers, "import_transformers", absent)
    with pytest.raises(UserError, match=r"--peers: needs transformers; .*\[bench\]"):
        peers.save_random("gpt2", SMALL, tmp_path)
