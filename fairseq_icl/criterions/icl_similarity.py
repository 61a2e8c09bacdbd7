"""The criterion `icl_similarity`: in one pass over the queries it observes ZSL, ICL and FT and measures how they agree.

For `fairseq-validate`. ZSL and ICL have the base weights, FT the fine-tuned ones; a base checkpoint is scored without
FT. What is measured of each example stays with the criterion; `finish`, which the task calls after the last batch,
gathers it from all processes, logs every mean through fairseq's metrics, writes the table and prints a summary.
"""

import dataclasses
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional  # fairseq's parser knows Optional[X], not X | None

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor, nn

from fairseq_icl.criterions.finetuned import method_of, read_other, weights_in_place
from fairseq_icl.criterions.similarity_summary import summary
from fairseq_icl.errors import UserError
from fairseq_icl.metrics.collect import Collector
from fairseq_icl.metrics.training_attention import TrainingTokens
from fairseq_icl.observe import Observation, PrefixCache, concatenate, observe_queries
from fairseq_icl.observe.activations import PRECISIONS, save_activations
from fairseq_icl.observe.weight_updates import observe_weight_updates
from fairseq_icl.reading import CHOICES, PAPER
from fairseq_icl.results import means, provenance, write_results

logger = logging.getLogger(__name__)

READING_FLAGS = ("position", "random_update", "attention_similarity")


def _help(text: str, reading: str | None = None) -> dict[str, str]:
    """Metadata of a flag: its help text, which for a difference between code and paper ends with both values."""
    if reading is not None:
        text += f" (authors' code: {CHOICES[reading][0]}; paper: {PAPER[reading]}; default: as --reading says)"
    return {"help": text}


@dataclass
class ICLSimilarityConfig(FairseqDataclass):
    """Flags of the criterion."""

    position: Optional[ChoiceEnum(CHOICES["position"])] = field(
        default=None,
        metadata=_help(
            "token whose activations are compared: label of option 0, last query token, gold label", "position"
        ),
    )
    random_update: Optional[ChoiceEnum(CHOICES["random_update"])] = field(
        default=None, metadata=_help("the random update that sim_aou_random compares with", "random_update")
    )
    attention_similarity: Optional[ChoiceEnum(CHOICES["attention_similarity"])] = field(
        default=None, metadata=_help("compare attention before the softmax or after it", "attention_similarity")
    )
    metrics: Optional[str] = field(
        default=None,
        metadata=_help("comma-separated names of metrics (default: all the checkpoint allows, but for sim_weights)"),
    )
    results: Optional[str] = field(
        default=None, metadata=_help("write the table of all values, per example and layer: FILE.parquet or FILE.csv")
    )
    save_activations: Optional[str] = field(
        default=None,
        metadata=_help("write the observed activations to FILE.safetensors, in half precision as the authors did"),
    )
    activation_precision: ChoiceEnum(list(PRECISIONS)) = field(
        default="half", metadata=_help("precision of --save-activations")
    )
    other_finetuned: Optional[str] = field(
        default=None,
        metadata=_help("a second fine-tuned checkpoint of the same base: adds alpha, the SimAM-delta between the two"),
    )
    path: Optional[str] = field(default=None)  # fairseq's own flag: the checkpoint that is scored


@register_criterion("icl_similarity", dataclass=ICLSimilarityConfig)
class ICLSimilarity(FairseqCriterion):
    """Measures; there is nothing to train with it."""

    def __init__(self, cfg: ICLSimilarityConfig, task: Any) -> None:
        super().__init__(task)
        self.cfg = cfg
        _check_endings(cfg)
        chosen = {name: str(cfg[name]) for name in READING_FLAGS if cfg[name] is not None}
        self.reading = dataclasses.replace(task.reading, **chosen)
        self.names = [name.strip() for name in cfg.metrics.split(",")] if cfg.metrics else None
        self.other = read_other(cfg.other_finetuned, task) if cfg.other_finetuned else None
        self.prefixes = PrefixCache()
        self._start()

    def _start(self) -> None:
        self.training = _training_tokens(self.task)
        self.collector = Collector(self.names, self.reading, self.training)
        self.kept: list[tuple[Tensor, dict[str, Observation]]] = []

    def forward(self, model: nn.Module, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Observe one batch. The loss is that of the gold label under FT (or ZSL), for fairseq's own log."""
        if model.training:
            raise UserError(
                "--criterion icl_similarity only measures: use it with fairseq-validate, and train with cross_entropy "
                "or layer_causal_ce"
            )
        queries, example = sample["queries"], torch.tensor(sample["positions_in_set"])
        seen = self._observe(model, queries)
        extras = self._observe_extras(model, queries) if "ft" in seen else {}
        self.collector.add(example, **seen, **extras)
        if self.cfg.save_activations:
            self.kept.append((example, seen))
        answered = seen.get("ft", seen["zsl"])
        loss = -answered.option_logprobs.gather(1, answered.gold[:, None]).sum()
        size = len(queries)
        log = {"loss": loss.item(), "ntokens": sample["ntokens"], "nsentences": size, "sample_size": size}
        return loss, size, log

    def _observe(self, model: nn.Module, queries: list) -> dict[str, Observation]:
        """The three settings on one batch, or two if nothing was fine-tuned."""
        wants_context = self.training is not None or self.cfg.save_activations is not None
        wanted = {"position": self.reading.position, "context_row": wants_context}
        with model.base_weights():
            context = self.task.prompts.context
            prefix = self.prefixes.of(model, context)
            seen = {
                "zsl": observe_queries(model, queries, **wanted),
                "icl": observe_queries(model, queries, context=context, prefix=prefix, **wanted),
            }
        if model.is_trained:
            seen["ft"] = observe_queries(model, queries, **wanted)
        return seen

    def _observe_extras(self, model: nn.Module, queries: list) -> dict[str, Any]:
        """What single metrics need besides: a second fine-tuned model, updates in weight space."""
        extras: dict[str, Any] = {}
        if self.other is not None:
            with weights_in_place(model, self.other):
                extras["other_ft"] = observe_queries(model, queries, position=self.reading.position)
        if "sim_weights" in (self.names or ()):
            with model.base_weights():
                prefix = self.prefixes.of(model, self.task.prompts.context)
            if prefix is None:
                raise UserError("--metrics sim_weights: defined for fairseq's own attention only; leave it out")
            extras["weights"] = observe_weight_updates(model, queries, prefix, self.reading.position)
        return extras

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """fairseq's loss: nats per query."""
        size = sum(log["sample_size"] for log in logging_outputs)
        metrics.log_scalar("loss", sum(log["loss"] for log in logging_outputs) / max(size, 1), size, round=4)

    def finish(self) -> None:
        """After the last batch, on every process: gather, log; on the first one also write and print."""
        for seen in _gather_from_others(self.collector.seen):
            self.collector.merge(seen)
        cfg, prompts = self.task.cfg, self.task.prompts
        method = method_of(self.cfg.path)
        table = self.collector.table(prompts.spec.name, cfg.seed, cfg.permutation, method, str(cfg.init))
        overall = means(table)
        for row in overall.itertuples():
            if row.value or not row.metric.startswith("zero_updates_"):
                metrics.log_scalar(row.metric, row.value, round=5)
        kept = self.kept
        for others in _gather_from_others(self.kept) if self.cfg.save_activations else []:
            kept = kept + others
        if _rank() == 0:
            if self.cfg.results:
                write_results(self.cfg.results, table, self._provenance(method))
            if self.cfg.save_activations:
                save_activations(self.cfg.save_activations, *_in_order(kept), str(self.cfg.activation_precision))
            print(summary(overall), flush=True)
        self._start()

    def _provenance(self, method: str) -> dict[str, Any]:
        """Configuration, versions and hashes of what was scored."""
        flags = {name: self.cfg[name] for name in ICLSimilarityConfig.__dataclass_fields__ if not name.startswith("_")}
        config = {
            "task": dict(self.task.cfg),
            "criterion": flags,
            "reading": dataclasses.asdict(self.reading),
            "context_rows": list(self.task.prompts.context_rows),
        }
        finetuned = {} if method == "none" else {"finetuned": self.cfg.path}
        other = {"other_finetuned": self.cfg.other_finetuned} if self.other is not None else {}
        made = provenance(config, finetuned | other)
        made["checkpoints"]["base"] = self.task.base_sha256
        return made


def _training_tokens(task: Any) -> TrainingTokens | None:
    """The query vectors recorded during fine-tuning beside their places in the prompt; None if none were recorded."""
    recorded: dict[int, Tensor] = task.training_queries  # row -> (layers, tokens, d)
    if not recorded:
        return None
    queries = torch.cat(list(recorded.values()), dim=1)
    lengths = [tokens.size(1) for tokens in recorded.values()]
    try:
        return TrainingTokens.align(
            queries, list(recorded), lengths, task.prompts.context_rows, task.prompts.context_spans
        )
    except ValueError as error:  # labels of another length were switched in, or nothing fitted into the prompt
        logger.warning("attention to training tokens is left out: %s", error)
        return None


def _check_endings(cfg: ICLSimilarityConfig) -> None:
    """Tell a wrong file name before the work and not after it."""
    if cfg.results and Path(cfg.results).suffix not in (".parquet", ".csv"):
        raise UserError(f"--results {cfg.results}: the name must end in .parquet or .csv")
    if cfg.save_activations and Path(cfg.save_activations).suffix != ".safetensors":
        raise UserError(f"--save-activations {cfg.save_activations}: the name must end in .safetensors")


def _in_order(kept: list[tuple[Tensor, dict[str, Observation]]]) -> tuple[Tensor, dict[str, Observation]]:
    """Batches joined and put in the order of the validation set, each example once."""
    example = torch.cat([part for part, _ in kept])
    unique, place = example.unique(return_inverse=True)
    first = torch.full_like(unique, len(example)).scatter_reduce(0, place, torch.arange(len(example)), "amin")
    settings = kept[0][1].keys()
    return unique, {name: concatenate([seen[name] for _, seen in kept]).take(first) for name in settings}


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _gather_from_others(own: Any) -> list[Any]:
    """What the other processes hold in place of `own`, in the order of their ranks."""
    if not torch.distributed.is_initialized():
        return []
    gathered = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, own)
    del gathered[_rank()]
    return gathered
