"""Our way against those of peers.py: seconds, peak memory and numbers of ICL scoring on the same models and prompts.

The models are random, of GPT-2's and of Llama's kind and of the shape's size, in a Hugging Face folder that everybody
reads. Ours also records query vectors, scores over all tokens, and the options' scores after every layer. One peer is
in memory at a time, and takes turns with ours. Its memory is measured in a process of its own:
`python -m benchmarks.peer_runs SHAPE FOLDER PEER BATCH`, the shape as JSON.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks import last_line_of
from benchmarks.measure import interleave, peak_bytes_of
from benchmarks.peers import PEERS, Peer, Seen, Work
from benchmarks.report import BenchFindings, BenchRow, Limit
from benchmarks.scoring import sample_by_length
from benchmarks.shapes import Shape, random_prompts
from fairseq_icl.api import load_model, observe
from fairseq_icl.models import Model
from fairseq_icl.models.hugging_face import read_folder
from fairseq_icl.models.transformers_lm import import_transformers
from fairseq_icl.prompts.build import Prompts

POSITIONS = 2048
FAMILIES = ("gpt2", "llama")
OURS = "ours"
MEMORY_QUERIES = 40
INSTALL = "pip install 'fairseq-icl[bench]'"


def measure_peers(findings: BenchFindings, shape: Shape, rounds: int, sample: int, say: Callable[[str], None]) -> None:
    """A row for each family and peer that is installed; the others are named in a note."""
    missing: dict[str, str] = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory(prefix="fairseq-icl-peers-") as name:
            folder = Path(name)
            try:
                save_random(family, shape, folder)
            except ImportError:
                findings.notes.append(f"transformers is not installed, so no peers were measured; {INSTALL}.")
                return
            run = PeerRun(findings, shape, family, folder, rounds, sample)
            for peer in PEERS:
                if peer.name in missing:
                    continue
                say(f"peers: a {family} of the {shape.name} shape in {peer.name}")
                try:
                    run.measure(peer)
                except ImportError as error:
                    missing[peer.name] = f"{peer.name}: not installed, left out ({error}); {INSTALL}."
    findings.notes += missing.values()
    findings.notes.append(
        "Peers compute attention by their defaults (transformers: PyTorch's scaled-dot-product attention). Ways that "
        f"run the demonstrations with every query were timed on {sample} queries and scaled up; batches are the best "
        "of several sizes. All times include the demonstrations. lm-evaluation-harness records no activations."
    )


class PeerRun:
    """One model in its folder, our way of scoring it, and the prompts for everybody."""

    def __init__(
        self, findings: BenchFindings, shape: Shape, family: str, folder: Path, rounds: int, sample: int
    ) -> None:
        self.findings, self.shape, self.family, self.folder = findings, shape, family, folder
        self.rounds = rounds
        self.ours = load_model(str(folder))
        self.prompts = random_prompts(shape)
        self.order = read_folder(str(folder)).vocabulary.order
        self.sampled = sample_by_length(self.prompts.queries, sample)
        self.memory: int | None = None

    def measure(self, peer: Peer) -> None:
        """The peer's row and its limits."""
        score = peer.load(self.folder)
        prompts = replace(self.prompts, queries=tuple(self.sampled)) if peer.whole else self.prompts
        work = Work.of(prompts.context, prompts.queries, self.order)
        ways: dict[str, Callable[[], object]] = {OURS: partial(observe, self.ours, self.prompts, in_context=True)}
        best = interleave(ways | {str(size): partial(score, work, size) for size in peer.batches}, self.rounds)
        size = min(peer.batches, key=lambda size: best[str(size)])
        seconds = best[str(size)] * len(self.prompts.queries) / len(prompts.queries)
        difference = largest_difference(self.ours, prompts, score(work, size))
        del score, ways  # before another process needs the memory
        if self.memory is None:
            self.memory = peak_of(self.shape, self.folder, OURS, 1)
        peak = peak_of(self.shape, self.folder, peer.name, size)
        batches = f", batches of {size}" if len(peer.batches) > 1 else ""
        name = f"{self.family}, ICL scoring: {peer.name}"
        row = BenchRow(name + batches, best[OURS], seconds, ours_memory=self.memory, authors_memory=peak)
        self.findings.rows.append(row)
        if peer.bound is not None:
            self.findings.expect_faster(row, peer.bound.at(self.shape.name), f"{name}, times faster")
        self.findings.limits.append(Limit(f"{name}, largest relative difference", difference, 1e-5))


def largest_difference(model: Model, prompts: Prompts, theirs: Seen) -> float:
    """max |ours - theirs| over scores and attention outputs, each relative to its largest value."""
    before_label = replace(prompts, settings=replace(prompts.settings, position="query"))
    mine = observe(model, before_label, in_context=True)
    pairs = [(mine.option_logprobs, theirs.scores)]
    if theirs.outputs is not None:
        pairs.append((mine.attention_output, theirs.outputs))
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def peak_of(shape: Shape, folder: Path, name: str, size: int) -> int:
    """Peak bytes above the weights of ICL scoring, in a new process."""
    return int(last_line_of("peer_runs", json.dumps(asdict(shape)), str(folder), name, str(size)))


def main(argv: list[str]) -> None:
    """Load one way, warm up on a few tokens so that libraries have what they keep, measure, print the bytes.

    Ways that run whole prompts have seen their peak after one batch of the longest queries.
    """
    shape, folder, name, size = Shape(**json.loads(argv[0])), argv[1], argv[2], int(argv[3])
    few = random_prompts(shape, num_demonstrations=1, num_queries=1)
    many = random_prompts(shape, num_queries=MEMORY_QUERIES)
    if name == OURS:
        model = load_model(folder)
        observe(model, few, in_context=True)
        print(peak_bytes_of(lambda: observe(model, many, in_context=True)))
        return
    import_transformers().utils.logging.disable_progress_bar()
    (peer,) = [peer for peer in PEERS if peer.name == name]
    score, order = peer.load(Path(folder)), read_folder(folder).vocabulary.order
    longest = sorted(many.queries, key=lambda query: len(query.inputs[0]))[-size:]
    work = Work.of(many.context, longest if peer.whole else many.queries, order)
    score(Work.of(few.context, few.queries, order), size)
    print(peak_bytes_of(lambda: score(work, size)))


def save_random(family: str, shape: Shape, folder: Path) -> None:
    """Save a random model of transformers' own class with a tokenizer that has as many tokens."""
    transformers = import_transformers()
    ids = {"bos_token_id": 256, "eos_token_id": 256, "vocab_size": shape.vocabulary}
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_inner=shape.ffn,
            n_positions=POSITIONS,
            **ids,
        )
        model: Any = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=shape.ffn,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            **ids,
        )
        model = transformers.LlamaForCausalLM(config)
    transformers.utils.logging.disable_progress_bar()
    model.eval().save_pretrained(folder)
    _tokenizer(shape.vocabulary).save(str(folder / "tokenizer.json"))


def _tokenizer(size: int) -> Tokenizer:
    """Bytes, the end of a text, and words that no text becomes, up to `size` tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "<|endoftext|>", *(f"<{number}>" for number in range(size - len(alphabet) - 1))]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


if __name__ == "__main__":
    main(sys.argv[1:])
