"""Dynamics: ICL with j demonstrations against fine-tuning after j of them, for every j.

    curve = Curve(prompts, zsl, icl, examples=48)
    with fine_tuned(model, prompts, "gd", lr=0.3, after_demonstration=curve.after_demonstration) as tuned:
        ft = observe(tuned, prompts)
    table = curve.finish(ft)

The demonstrations run once: the prefix grows by one at a time, as the fine-tuned weights do. What cannot be shared is
the queries, which every j sees anew, so a curve is measured on the first `examples` of them. Its last point is that
part of the plain run's own observations.
"""

from dataclasses import replace

import pandas as pd
import torch

from fairseq_icl.errors import UserError
from fairseq_icl.models import Model
from fairseq_icl.observing import Observation, Observer, observe_all
from fairseq_icl.observing.prefix import Prefix, run_prefix, supports_prefix
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.results import CURVE_COLUMNS, means
from fairseq_icl.results.collector import Collector

METRICS = ("accuracy_zsl", "accuracy_icl", "accuracy_ft", "rpa", "sim_aou", "sim_am_delta")


class Curve:
    """Metrics after each demonstration, collected while a model is fine-tuned on them one by one."""

    def __init__(self, prompts: Prompts, zsl: Observation, icl: Observation, examples: int) -> None:
        """`zsl` and `icl` are observations of all queries of `prompts`; the first `examples` make the curve."""
        if examples < 1:
            raise UserError(f"curve_examples={examples}: must be at least 1")
        self.whole = icl
        # METRICS need no prior of the labels.
        self.prompts = replace(prompts, queries=prompts.queries[:examples], content_free=())
        self.zsl = self._first(zsl)
        self.shown = min(len(prompts.context_rows), len(prompts.finetuning))
        self.prefix: Prefix | None = None
        self.points: list[pd.DataFrame] = []

    @torch.no_grad()
    def after_demonstration(self, count: int, tuned: Model, base: Model) -> None:
        """Measure one point, while `fine_tuned` trains; the last one is for `finish`."""
        if count < len(self.prompts.finetuning) and count <= self.shown:
            trained = observe_all(Observer(tuned, self.prompts, by_depth=False), self.prompts.queries)
            self._add(count, self._in_context(count, base), trained)

    def finish(self, ft: Observation) -> pd.DataFrame:
        """The curve, of columns CURVE_COLUMNS; its last point is of the fine-tuned model's own observation."""
        self._add(len(self.prompts.finetuning), self._first(self.whole), self._first(ft))
        return pd.concat(self.points, ignore_index=True)

    def _first(self, seen: Observation) -> Observation:
        """What was seen on the queries of the curve, rows of attention no wider than the longest of them."""
        taken = seen.take(range(len(self.prompts.queries)))
        return replace(taken, attention_row=taken.attention_row[..., -int(taken.query_length.max()) :])

    def _in_context(self, count: int, base: Model) -> Observation:
        """ICL of the base model with the first `count` demonstrations."""
        prompts, decoder = self.prompts, base.lm.decoder
        stop = prompts.context_spans[count][0] if count < len(prompts.context_spans) else len(prompts.context)
        if supports_prefix(decoder):
            self.prefix = base.evaluate(lambda: run_prefix(decoder, prompts.context[:stop], self.prefix))
        shorter = replace(prompts, context=prompts.context[:stop])
        observer = Observer(base, shorter, in_context=True, context_row=False, by_depth=False, prefix=self.prefix)
        return observe_all(observer, prompts.queries)

    def _add(self, count: int, icl: Observation, ft: Observation) -> None:
        collector = Collector(METRICS, self.prompts.settings)
        collector.add(range(len(self.zsl)), self.zsl, icl, ft)
        overall = means(collector.table()).assign(demonstrations=count)
        self.points.append(overall.loc[overall["metric"].isin(METRICS), list(CURVE_COLUMNS)])
