"""What each stage of a cell needs, counted from the model's sizes and the prompts' lengths; and the seconds it takes.

    seconds = operations of matrix products / rate of such products + the rest, in units that are measured as well

The rate depends on how many rows a product has: measured are products of the model's own width for a few numbers of
rows. What is no matrix product is small, and counted in two units: `touch`, the time to change one number in memory,
and `call`, the time of a call of torch's that does next to nothing.

The constants were fitted to single stages on two shared cores of an AMD EPYC with one thread: the demo model (6
layers of 128, where calls are all), random weights of fairseq's 125M shape, and SmolLM2-135M (30 layers of 576, grouped
keys) on SST-2, CB and AGNews.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fairseq_icl.observing.layout import lay_out, plan_batches
from fairseq_icl.operations import DecoderSizes, Work, like_feed_forward, times
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.results.bootstrap import RESAMPLES
from fairseq_icl.results.collector import TRAINING_EXAMPLES
from fairseq_icl.settings import Settings
from fairseq_icl.training.layer_causal import parse_layers
from fairseq_icl.training.methods import PROTOCOL, RUN_THE_MODEL_ONCE, Method
from fairseq_icl.training.short_circuit import layer_of_cut

ROWS = (8, 32, 128, 512)
"""Numbers of rows at which products are measured; in between the rate is interpolated, beyond it hardly grows."""
MEASURED_SECONDS = 0.1
"""For each of them."""
ATTENTION = 2.0
"""Time of attention's operations over that of products with weights: its softmax, and matrices of 64 columns."""
LAYER_CALLS, STEP_CALLS, QUERY_CALLS = 400, 3000, 100
"""Calls in a pass through a layer (forward, or backward), in a step of fairseq's trainer beside them, and for a query
that is observed. A linearized model's passes make twice as many: dual numbers are packed and unpacked in Python."""
TOKEN_TOUCHES = (25, 10)
"""Touches for a token in a layer: times the width (norms, residuals, heads), and times the feed-forward's width."""
LOGIT_TOUCHES = 8
"""Touches of a logit in a softmax over the vocabulary."""
WEIGHT_TOUCHES = 12
"""Touches of a weight that learns at every step: its gradient made, averaged, three norms, the update."""
METRIC_CALLS, VALUE_TOUCHES, RANK_TOUCHES, PAIR_TOUCHES = 2000, 130, 3300, 4
"""Calls of a metric or two; touches of a number of a vector, of a token that is ranked by its weight, and of a pair of
tokens whose order is compared in two rankings (Kendall)."""


@dataclass(frozen=True)
class Machine:
    """How fast this machine is, in seconds."""

    rates: tuple[float, ...]
    """Operations a second of products with as many rows as `ROWS` says."""
    touch: float
    call: float

    @classmethod
    @torch.no_grad()
    def measured(cls, sizes: DecoderSizes, dtype: torch.dtype) -> "Machine":
        """With the number of threads in force; on the GPU if there is one."""
        like = torch.empty(0, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")
        rates = []
        for rows in ROWS:
            flops, products = like_feed_forward(sizes, rows, like)
            rates.append(flops / _mean_seconds(products))
        large, small = like.new_ones(2**24), like.new_ones(4, 4)
        touch = _mean_seconds([lambda: large.mul_(1.0)]) / large.numel()
        return cls(tuple(rates), touch, _mean_seconds([lambda: torch.mm(small, small)] * 1000))

    def rate(self, rows: float) -> float:
        """Operations a second of products with so many rows."""
        at = min(max(math.log(max(rows, 1)), math.log(ROWS[0])), math.log(ROWS[-1]))
        for low, high, slow, fast in zip(ROWS, ROWS[1:], self.rates, self.rates[1:], strict=False):
            if at <= math.log(high):
                share = (at - math.log(low)) / (math.log(high) - math.log(low))
                return slow + share * (fast - slow)
        return self.rates[-1]

    def seconds(self, work: Work, sizes: DecoderSizes) -> float:
        """Time of what was counted."""
        products = sum(count / self.rate(rows) for rows, count in work.items() if isinstance(rows, int))
        token = TOKEN_TOUCHES[0] * sizes.width + TOKEN_TOUCHES[1] * sizes.ffn
        touches = work["tokens"] * token + work["logits"] * LOGIT_TOUCHES + work["touches"]
        calls = work["layers"] * LAYER_CALLS + work["calls"]
        return products + ATTENTION * work["attention"] / self.rates[-1] + touches * self.touch + calls * self.call


def _mean_seconds(works: Sequence[Callable[[], object]]) -> float:
    """Mean time of the given works, each done at least once, for `MEASURED_SECONDS`."""
    works[0]()
    start, count = clock(), 0
    while not count or clock() - start < MEASURED_SECONDS:
        for work in works:
            work()
        count += len(works)
    return (clock() - start) / count


def clock() -> float:
    """Processor time of a single thread, which other programs hardly disturb; with several threads, or a GPU, time."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def observing(
    sizes: DecoderSizes, prompts: Prompts, prefix: int, *, by_depth: bool = True, linearized: bool = False
) -> Work:
    """Passes over all queries in batches, after BOS or a prefix of so many tokens.

    That and what all queries begin with run once, but in a linearized model, which shares nothing.
    """
    stem = 0 if linearized else (prefix or len(prompts.start)) + len(prompts.opening)
    more = len(prompts.start) if linearized else -len(prompts.opening)
    work = sizes.forward(stem, stem**2 / 2, read=0) + Work({"calls": QUERY_CALLS * len(prompts.queries)})
    batches = [[prompts.queries[index] for index in batch] for batch in plan_batches(prompts.queries)]
    for batch in filter(None, (*batches, prompts.content_free)):
        layout = lay_out(batch, prompts.settings.position)
        lengths = [len(sequence) + more for sequence in layout.sequences]
        if linearized:  # runs whole prompts, filled up to the longest
            lengths = [max(lengths)] * len(lengths)
        rows, logits = sum(lengths), len(layout.logit_sequence)
        scores = sum(length * (stem + length / 2) for length in lengths)
        work += sizes.forward(rows, scores, read=logits) + sizes.unembedding(logits)
        if by_depth and logits > len(batch):  # labels of several tokens need all logits of every layer
            work += times(sizes.layers - 1, sizes.unembedding(logits))
        if prompts.settings.queries == "train" and not prefix:  # the fine-tuning loss of the queries
            work += sizes.forward(rows, sum(length**2 / 2 for length in lengths)) + sizes.unembedding(rows)
    return _linearized(work) if linearized else work


def _linearized(forward: Work) -> Work:
    """A pass of values and tangents, and one of values."""
    return times(3, forward) + Work({"layers": 3 * forward["layers"]})


def watching(sizes: DecoderSizes, prompts: Prompts, examples: int, *, linearized: bool) -> Work:
    """Dynamics: after every demonstration but the last the first queries, fine-tuned and on a prefix that grows."""
    few = replace(prompts, queries=prompts.queries[:examples], content_free=())
    prefix = len(prompts.context)
    points = max(0, min(len(prompts.context_rows), len(prompts.finetuning) - 1))
    tuned = observing(sizes, few, 0, by_depth=False, linearized=linearized)
    shown = observing(sizes, few, prefix // 2, by_depth=False) + Work({"calls": 3 * METRIC_CALLS})
    return times(points, tuned + shown)


def fine_tuning(sizes: DecoderSizes, prompts: Prompts, method: Method, settings: Settings) -> Work:
    """All steps of a method; query vectors are recorded on the way, or each by a pass of its own."""
    options = PROTOCOL | method.options
    linearized, matches = bool(options["linearize"]), options["criterion"] == "match_icl"
    on_the_way = options["criterion"] in RUN_THE_MODEL_ONCE and not options["sequential"]
    work = Work()
    for sequence in prompts.finetuning:
        ends = [end for end, scored in enumerate(sequence.scored) if scored]
        steps = [(end + 1, 1) for end in ends] if settings.step_per == "token" else [(len(sequence.tokens), len(ends))]
        for length, scored in steps:
            work += _step(sizes, length, scored, options, settings)
            if linearized:
                work += _linearized(sizes.forward(length, length**2 / 2))
            elif on_the_way:
                work += Work({length: 2 * length * sizes.learning("q_proj") * sizes.layers})
            else:
                work += sizes.forward(length, length**2 / 2)
    work = times(options["max_epoch"], work)
    if matches:  # its targets: the demonstrations once more, after the prompt and alone
        prefix, lengths = len(prompts.context), [len(sequence.tokens) for sequence in prompts.finetuning]
        work += sizes.forward(prefix, prefix**2 / 2)
        for length in lengths:
            work += sizes.forward(length, length * prefix) + sizes.forward(length, length**2 / 2)
    return work


def _step(sizes: DecoderSizes, rows: int, scored: int, options: dict[str, object], settings: Settings) -> Work:
    """One step on `rows` tokens of which `scored` have a loss."""
    criterion, linearized = options["criterion"], bool(options["linearize"])
    whole = settings.gradient_norms == "all" and not linearized
    formed = ",q_proj,out_proj" if whole else ""  # gradients of frozen matrices whose norm is not found without them
    learning = sizes.learning(settings.train_parameters + formed)
    layers, losses, extra = sizes.layers, rows, Work()
    if criterion == "layer_causal_ce":
        losses = scored * len(parse_layers(settings.layers, sizes.layers))
    elif criterion == "short_circuit_ce":
        layers = layer_of_cut(settings.layers, sizes.layers) + 1
    elif criterion == "match_icl":
        losses = 0
    if options["sequential"]:  # every layer runs again after its step, and reads the vocabulary by itself
        own = times(2 * losses // max(scored, 1), sizes.unembedding(scored))
        losses, extra = 0, own + sizes.forward(rows, rows**2 / 2) + Work({"calls": layers * STEP_CALLS // 4})
    work = sizes.training(rows, losses, learning, linearized=linearized, layers=layers)
    touches = layers * (WEIGHT_TOUCHES * sizes.learning(settings.train_parameters) + (2 * learning if whole else 0))
    if linearized or whole:  # what is done in Python: dual numbers, or a look at every gradient
        extra += Work({"layers": layers * (12 if linearized else 1)})
    return work + extra + Work({"touches": touches, "calls": STEP_CALLS})


def measuring(sizes: DecoderSizes, prompts: Prompts, trained: int) -> Work:
    """All metrics of a cell with `trained` fine-tuned models: if with one, also attention to the training tokens."""
    queries, shown = len(prompts.queries), len(prompts.context)
    numbers = queries * sizes.layers * (sizes.width + RESAMPLES)
    if trained != 1:
        return Work({"calls": METRIC_CALLS, "touches": VALUE_TOUCHES / 4 * numbers})
    ranked = min(queries, TRAINING_EXAMPLES) * sizes.layers * shown
    touches = VALUE_TOUCHES * numbers + ranked * (RANK_TOUCHES + PAIR_TOUCHES * shown)
    return Work({"calls": 10 * METRIC_CALLS, "touches": touches})
