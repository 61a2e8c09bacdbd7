"""The criterion `icl_similarity`: in one pass over the queries it observes ZSL, ICL and FT and measures how they agree.

For `fairseq-validate`. ZSL and ICL have the base weights, FT the fine-tuned ones; a base checkpoint is scored without
FT. Observing is observe.Observer's work, measuring results.Collector's; here is what fairseq needs around them:
batches from its loader, several processes, its log. `finish`, which the task calls after the last batch, gathers what
all processes saw, logs every mean through fairseq's metrics, writes the table and prints a summary.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

import pandas as pd
import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor

from fairseq_icl.compat.command_line import flag, flags_of
from fairseq_icl.errors import UserError, naming
from fairseq_icl.models import Model, facts_of
from fairseq_icl.models.checkpoints import BASE_REFERENCE, base_reference, is_hugging_face, read_checkpoint
from fairseq_icl.models.pretrained_lm import LINEARIZED_MARK, PretrainedLM
from fairseq_icl.observing import Observation, Observer
from fairseq_icl.observing.observation import Gathering
from fairseq_icl.observing.saved import PRECISIONS, save_observations
from fairseq_icl.observing.weight_updates import observe_weight_updates
from fairseq_icl.results import LENGTH_RATIO, means, provenance, text_table, write_results
from fairseq_icl.results.collector import Collector, training_tokens
from fairseq_icl.settings import SETTINGS
from fairseq_icl.training.methods import name_of_method

NAME = "icl_similarity"
TEXT = Optional[str]
ORDER = ("accuracy", "rec2ftp", "rpa", "sim_aou", "sim_am", "alpha", "sim_", "recall", "kendall")
"""Order of the summary: that of the papers."""
FLAGS = [
    *flags_of(NAME),
    flag(
        "metrics",
        TEXT,
        None,
        "comma-separated names of metrics (default: all the checkpoint allows, but for sim_weights)",
    ),
    flag("results", TEXT, None, "write the table of all values, per example and layer: FILE.parquet or FILE.csv"),
    flag(
        "save_activations",
        TEXT,
        None,
        "write the observed activations to FILE.safetensors, in half precision as the authors did",
    ),
    flag("activation_precision", ChoiceEnum(list(PRECISIONS)), "half", "precision of --save-activations"),
    flag(
        "other_finetuned",
        TEXT,
        None,
        "a second fine-tuned checkpoint of the same base: adds alpha, the SimAM-delta between the two",
    ),
    ("path", TEXT, dataclasses.field(default=None)),  # fairseq's own flag: the checkpoint that is scored
]
ICLSimilarityConfig: Any = dataclasses.make_dataclass("ICLSimilarityConfig", FLAGS, bases=(FairseqDataclass,))


@register_criterion(NAME, dataclass=ICLSimilarityConfig)
class ICLSimilarity(FairseqCriterion):
    """Measures; there is nothing to train with it."""

    def __init__(self, cfg: Any, task: Any) -> None:
        super().__init__(task)
        self.cfg = cfg
        for name, endings in (("results", (".parquet", ".csv")), ("save_activations", (".safetensors",))):
            if cfg[name] and Path(cfg[name]).suffix not in endings:  # told before the work and not after it
                named = f"--{name.replace('_', '-')} {cfg[name]}"
                raise UserError(f"{named}: the name must end in {' or '.join(endings)}")
        of_criterion = [name for name, known in SETTINGS.items() if known.is_flag_of(NAME)]
        chosen = {name: str(cfg[name]) for name in of_criterion if cfg[name] is not None}
        self.settings = dataclasses.replace(task.settings, **chosen)
        self.names = [name.strip() for name in cfg.metrics.split(",")] if cfg.metrics else None
        self.other = read_other(cfg.other_finetuned, task) if cfg.other_finetuned else None
        self.observers: dict[str, Observer] = {}
        self.device = torch.device("cpu")
        self._start()

    def _start(self) -> None:
        recorded = self.task.training_queries
        self.tokens = training_tokens(self.task.prompts, recorded) if recorded else None
        self.collector = Collector(self.names, self.settings, self.tokens)
        self.kept: dict[str, Gathering] = {}
        self.is_kept = torch.zeros(len(self.task.prompts.queries), dtype=torch.bool)

    def forward(
        self, model: PretrainedLM, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Observe one batch. The loss is that of the gold label under FT (or ZSL), for fairseq's own log."""
        if model.training:
            raise UserError(
                "--criterion icl_similarity only measures: use it with fairseq-validate, and train with cross_entropy "
                "or layer_causal_ce"
            )
        if not self.observers:
            self.observers, self.device = self._make_observers(model), next(model.parameters()).device
        queries, example = sample["queries"], torch.tensor(sample["positions_in_set"])
        seen = {name: observer(queries) for name, observer in self.observers.items()}
        weights = None
        if "ft" in seen and "sim_weights" in (self.names or ()):
            icl, ft, start = self.observers["icl"], self.observers["ft"], self.task.prompts.start
            if icl.prefix is None:
                raise UserError("--metrics sim_weights: not defined for this model's attention; leave it out")
            position = self.settings.position
            weights = observe_weight_updates(icl.model, ft.model, queries, icl.prefix, start, position)
        extras: dict[str, Any] = {"other_ft": seen.get("other_ft"), "weights": weights}
        self.collector.add(example, seen["zsl"], seen["icl"], seen.get("ft"), **extras)
        if self.cfg.save_activations:
            self._keep(example, {name: part for name, part in seen.items() if name != "other_ft"})
        answered = seen.get("ft", seen["zsl"])
        loss, size = -answered.option_logprobs.gather(1, answered.gold[:, None]).sum(), len(queries)
        log = {"loss": loss.item(), "ntokens": sample["ntokens"], "nsentences": size, "sample_size": size}
        return loss, size, log

    def _make_observers(self, model: PretrainedLM) -> dict[str, Observer]:
        """One for each condition, by name; `other_ft` for a second fine-tuned model."""
        prompts = dataclasses.replace(self.task.prompts, settings=self.settings)
        base = Model(model, self.task.files, *facts_of(self.settings), weights=model.base_state or None)
        saves = self.cfg.save_activations is not None
        # The context's scores are needed for attention to training tokens, and by those who want everything.
        icl = Observer(base, prompts, in_context=True, context_row=saves or self.tokens is not None)
        observers = {"zsl": Observer(base, prompts, context_row=saves), "icl": icl}
        if model.base_state:
            tuned = base.under(None, method_of(self.cfg.path))
            observers["ft"] = Observer(tuned, prompts, context_row=saves)
            if self.other is not None:
                check_same_names(self.other, model)
                like = next(model.parameters())
                other = {name: tensor.to(like) for name, tensor in self.other.items()}
                observers["other_ft"] = Observer(base.under(other), prompts)
        return observers

    def _keep(self, example: Tensor, conditions: Mapping[str, Observation]) -> None:
        """Keep what was seen of examples (n,) for --save-activations. One seen twice is the same again."""
        for name, seen in conditions.items():
            self.kept.setdefault(name, Gathering(len(self.is_kept))).put(example, seen)
        self.is_kept[example] = True

    def _kept_in_order(self) -> tuple[Tensor, dict[str, Observation]]:
        """(example, observations by condition) of all that were kept, in the order of the validation set."""
        example = self.is_kept.nonzero().flatten()
        seen = {name: gathering.observation() for name, gathering in self.kept.items()}
        if len(example) < len(self.is_kept):  # a part of the set, or that of one of several processes
            seen = {name: whole.take(example) for name, whole in seen.items()}
        return example, seen

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """fairseq's loss: nats per query."""
        size = sum(log["sample_size"] for log in logging_outputs)
        metrics.log_scalar("loss", sum(log["loss"] for log in logging_outputs) / max(size, 1), size, round=4)

    def finish(self) -> None:
        """After the last batch, on every process: gather, log; on the first one also write and print."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if torch.distributed.is_initialized():
            parts: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, (self.collector.seen, *self._kept_in_order()))
            for seen, *kept in parts[:rank] + parts[rank + 1 :]:
                self.collector.merge(seen)
                self._keep(*kept)
        settings, method, name = self.settings, method_of(self.cfg.path), self.task.prompts.spec.name
        table = self.collector.table(name, settings.seed, settings.permutation, method, settings.init)
        overall = means(table)
        for row in overall.itertuples():
            if row.value or not row.metric.startswith("zero_updates_"):
                metrics.log_scalar(row.metric, row.value, round=5)
        if rank == 0:
            if self.cfg.results:
                write_results(self.cfg.results, table, self._provenance(method))
            if self.cfg.save_activations:
                example, seen = self._kept_in_order()
                save_observations(self.cfg.save_activations, seen, example, str(self.cfg.activation_precision))
            print(summary(overall), flush=True)
        self._start()

    def _provenance(self, method: str) -> dict[str, Any]:
        """Configuration, versions and hashes of what was scored."""
        flags = {name: self.cfg[name] for name in ICLSimilarityConfig.__dataclass_fields__ if not name.startswith("_")}
        config = {
            "task": dict(self.task.cfg),
            "criterion": flags,
            "settings": dataclasses.asdict(self.settings),
            "context_rows": list(self.task.prompts.context_rows),
            "rows": {split: dataclasses.asdict(record) for split, record in self.task.prompts.rows.items()},
        }
        finetuned = {} if method == "none" else {"finetuned": self.cfg.path}
        other = {"other_finetuned": self.cfg.other_finetuned} if self.other is not None else {}
        made = provenance(config, finetuned | other, precision=self.settings.precision, device=self.device)
        made["checkpoints"]["base"] = self.task.files.sha256
        return made


def read_finetuned(path: str | None) -> dict[str, Any]:
    """The state of a fine-tuned checkpoint with its 'cfg'; empty for a base checkpoint."""
    state = read_checkpoint(path) if path and not is_hugging_face(path) else {}
    with naming(str(path)):
        if base_reference(state) is None:
            return {}
    if not isinstance(state.get("cfg"), dict):
        raise UserError(f"{path}: a fine-tuned checkpoint without its 'cfg': it was altered; train again")
    return state


def method_of(path: str | None) -> str:
    """The name of the method that a checkpoint was fine-tuned with; none for a base checkpoint."""
    state = read_finetuned(path)
    return name_of_method(state["cfg"], bool(state["task_state"].get("linearized"))) if state else "none"


def read_other(path: str, task: Any) -> dict[str, Tensor]:
    """The weights of a second fine-tuned checkpoint, which must have the same base and kind as the task's."""
    state = read_finetuned(path)
    if not state or state["task_state"][BASE_REFERENCE]["sha256"] != task.files.sha256:
        raise UserError(f"--other-finetuned {path}: not fine-tuned from the same base model")
    if bool(state["task_state"].get("linearized")) != bool(task.cfg.linearize):
        raise UserError(f"--other-finetuned {path}: one of the two models is linearized and the other is not")
    return {name: tensor for name, tensor in state["model"].items() if name != LINEARIZED_MARK}


def check_same_names(weights: dict[str, Tensor], model: PretrainedLM) -> None:
    """Refuse a second fine-tuned model that trained other parameters than the first."""
    different = sorted(weights.keys() ^ set(model.trained_names))
    if different:
        raise UserError(f"--other-finetuned: the two models trained different parameters, for example {different[0]}")


def summary(overall: pd.DataFrame) -> str:
    """Every mean with its bootstrap interval, and the counts; `overall` is `results.means` of one run."""

    def place(row: Any) -> int:
        return next((place for place, start in enumerate(ORDER) if row.metric.startswith(start)), len(ORDER))

    values = dict(overall[["metric", "value"]].itertuples(index=False))
    lines = [("metric", "value", "95 % interval over examples", "length ratio")]
    measured = overall[overall["low"].notna() & ~overall["metric"].str.startswith(LENGTH_RATIO)]
    for row in sorted(measured.itertuples(), key=place):
        interval = "none (n=1)" if values["examples"] == 1 else f"[{row.low:.4f}, {row.high:.4f}]"
        ratio = values.get(f"{LENGTH_RATIO}{row.metric}")
        lines.append((row.metric, f"{row.value:.4f}", interval, "" if ratio is None else f"{ratio:.4f}"))
    text = [text_table(lines, names=1)]
    zero, undefined = (
        {name.removeprefix(start): int(n) for name, n in values.items() if name.startswith(start) and n}
        for start in ("zero_updates_", "undefined_")
    )
    if told := [f"{name} {n}" for name, n in undefined.items() if name not in zero]:
        text.append(f"values left out because they are not defined here: {', '.join(told)}")
    if zero:
        told = [f"{name} {n}" for name, n in zero.items()]
        text.append(f"cosines left out because an update is not above rounding: {', '.join(told)}")
    return "\n".join([*text, f"{int(values['examples'])} examples"])
