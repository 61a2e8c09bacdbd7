"""The task `demonstration_prompting`: demonstrations to fine-tune on or to prompt with, queries to answer."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field, make_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import BaseFairseqModel, FairseqDecoder
from fairseq.optim import FairseqOptimizer
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING

from fairseq_icl.compat.command_line import TASK, flag, flags_of
from fairseq_icl.devices import within_memory
from fairseq_icl.errors import UserError
from fairseq_icl.models.checkpoints import BASE_REFERENCE
from fairseq_icl.models.files import TOKENIZER_FILES, ModelFiles, find_files
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.observing.layout import MAX_TOKENS
from fairseq_icl.observing.probe import attention_queries, observe_training_queries
from fairseq_icl.prompts.build import Prompts, build_prompts
from fairseq_icl.prompts.catalogue import find_spec
from fairseq_icl.results.gradient_record import GradientRecorder
from fairseq_icl.settings import FLAG_OF_TASK, READINGS, SETTINGS, Settings
from fairseq_icl.tasks.prompt_datasets import FinetuningDataset, QueryDataset
from fairseq_icl.training.gradients import GradientControl, check_precision, choose_what_learns, gradient_control
from fairseq_icl.training.layer_causal import sequential_step
from fairseq_icl.training.methods import LOSS_SCALE, RUN_THE_MODEL_ONCE
from fairseq_icl.training.softmax_gradient import stop_softmax_gradient

logger = logging.getLogger(__name__)

TEXT = Optional[str]  # noqa: UP045 - what fairseq's parser knows
FLAGS = [
    flag("data", str, MISSING, "folder with the datasets' files (JSONL, TSV, CSV or Parquet)"),
    flag(
        "dataset",
        str,
        MISSING,
        "dataset of the catalogue (fairseq-icl datasets), NAME of DATA/NAME.yaml, or path of a YAML",
    ),
    ("seed", int, field(default=II("common.seed"))),
    flag(
        "base_model",
        TEXT,
        None,
        "checkpoint of the pretrained model with dict.txt beside it, or a Hugging Face folder (default in "
        "fairseq-validate: the one that the fine-tuned checkpoint names)",
        argparse_alias="--pretrained",
    ),
    flag("dict", TEXT, None, "dictionary of the model (default: dict.txt beside the checkpoint)"),
    # fairseq's own flags; those of files do not admit None in its configuration: hence "".
    ("bpe", TEXT, field(default=None)),
    flag("gpt2_encoder_json", str, "", "encoder.json for --bpe gpt2 (default: beside the checkpoint)"),
    flag("gpt2_vocab_bpe", str, "", "vocab.bpe for --bpe gpt2 (default: beside the checkpoint)"),
    flag(
        "sentencepiece_model",
        str,
        "",
        "model file for --bpe sentencepiece (default: sentencepiece.bpe.model beside the checkpoint)",
    ),
    flag("linearize", bool, False, "train and score the first-order expansion around the pretrained weights"),
    flag(
        "reading",
        ChoiceEnum(list(READINGS)),
        READINGS[0],
        "which reading of the protocol sets the flags that differ between the authors' code and the paper",
    ),
    *flags_of(FLAG_OF_TASK),
    flag("record_gradients", TEXT, None, "write the gradient norm of every layer and step to this Parquet file"),
    flag(
        "record_queries",
        bool,
        False,
        "keep the query vectors of the demonstrations in the checkpoint (for attention to training tokens)",
    ),
]
DemonstrationPromptingConfig = make_dataclass("DemonstrationPromptingConfig", FLAGS, bases=(FairseqDataclass,))


@register_task(TASK, dataclass=DemonstrationPromptingConfig)
class DemonstrationPromptingTask(FairseqTask):
    """Builds the papers' prompts from a dataset, a seed and a permutation, and freezes what does not learn."""

    resumes = True  # what was recorded before an interruption is part of the result; see compat.models
    files: ModelFiles

    def __init__(self, cfg: Any, dictionary: Dictionary, settings: Settings):
        super().__init__(cfg)
        self.dictionary, self.settings = dictionary, settings
        self.training_queries: dict[int, torch.Tensor] = {}
        self.control: GradientControl | None = None
        self._decoder: FairseqDecoder | None = None
        self._step: tuple[list[int], float, int] = ([], 0.0, 0)

    @classmethod
    def setup_task(cls, cfg: Any, **given: Any) -> "DemonstrationPromptingTask":
        """The task; `given` (files, settings, prompts) need not be made again."""
        if "prompts" not in given:
            find_spec(cfg.dataset, cfg.data)  # an unknown dataset is told before minutes of loading
        if "files" not in given:
            if cfg.base_model is None:
                raise UserError("no model: give the pretrained checkpoint with --pretrained MODEL.pt")
            named = {flag: cfg[flag] or None for files in TOKENIZER_FILES.values() for flag in files}
            given["files"] = find_files(cfg.base_model, bpe=cfg.bpe, dictionary=cfg.dict, tokenizer_files=named)
        if "settings" not in given:  # criterions add theirs
            names = [name for name, known in SETTINGS.items() if known.is_flag_of(FLAG_OF_TASK)]
            flags = {name: str(cfg[name]) if SETTINGS[name].choices and cfg[name] else cfg[name] for name in names}
            given["settings"] = Settings.of(str(cfg.reading), seed=cfg.seed, **flags)
        task = cls(cfg, given["files"].load_dictionary(), given["settings"])
        task.__dict__.update(given)  # `prompts` in place of those that the property makes
        return task

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """The flags, and fairseq's own defaults where the papers' protocol has others."""
        super().add_args(parser)
        # fairseq drops a last batch smaller than its default multiple of 8: a demonstration would be lost. The data are
        # a few token sequences in memory: a process and a thread to load them ahead would only cost time. A process for
        # each GPU, which is fairseq's default, would make one step of as many demonstrations.
        parser.set_defaults(required_batch_size_multiple=1, num_workers=0, data_buffer_size=0, distributed_world_size=1)
        if "--path" in parser._option_string_actions:  # scoring
            parser.set_defaults(max_tokens=MAX_TOKENS)
        else:
            parser.set_defaults(batch_size=1, max_epoch=1, **LOSS_SCALE)

    @cached_property
    def prompts(self) -> Prompts:
        """All token sequences of this dataset, seed and permutation."""
        spec = find_spec(self.cfg.dataset, self.cfg.data)
        return build_prompts(spec, Path(self.cfg.data), self.files.writing, self.settings)

    def load_dataset(self, split: str, combine: bool = False, task_cfg: Any = None, **kwargs: Any) -> None:
        """ "train" is the demonstrations in fine-tuning order, any other split the queries."""
        pad = self.dictionary.pad()
        if split == "train":
            self.datasets[split] = FinetuningDataset(self.prompts.finetuning, self.settings.step_per, pad)
        else:
            self.datasets[split] = QueryDataset(self.prompts, pad)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> BaseFairseqModel:
        """The model with everything frozen but `--train-parameters`."""
        model = super().build_model(cfg, from_checkpoint)
        logger.info("%s learn", choose_what_learns(model, self.settings))
        model = LinearizedLM(model.decoder, model.trained_names) if self.cfg.linearize else model
        if self.settings.softmax_gradient == "stopped":
            stop_softmax_gradient(model.decoder)
        self._decoder = model.decoder
        return model

    def build_criterion(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """The criterion; flags of it that do not fit the model are told now and not at the first step."""
        criterion = super().build_criterion(cfg, from_checkpoint)
        if self._decoder is not None and hasattr(criterion, "check_decoder"):
            criterion.check_decoder(self._decoder)
        return criterion

    def get_batch_iterator(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """fairseq's iterator, but training keeps the order of the demonstrations (no `--curriculum` needed)."""
        is_training = isinstance(dataset, FinetuningDataset)
        limit: Any = kwargs.get("max_positions")
        for row, tokens, _ in dataset.items if is_training and isinstance(limit, int) else ():
            if len(tokens) > limit:  # fairseq would leave it out
                raise UserError(
                    f"{self.prompts.spec.name}, train row {row}: {len(tokens):,} tokens, but the model or "
                    f"--max-tokens admits {limit:,}; raise --max-tokens, or shorten the row"
                )
        iterator = super().get_batch_iterator(dataset, *args, **kwargs)
        iterator.disable_shuffling |= is_training
        return iterator

    def train_step(
        self,
        sample: dict[str, Any],
        model: BaseFairseqModel,
        criterion: Any,
        optimizer: FairseqOptimizer,
        update_num: int,
        ignore_grad: bool = False,
    ) -> tuple[torch.Tensor, int, dict[str, Any]]:
        """fairseq's step; remembers what the gradient record needs and, if asked, the query vectors before it."""
        check_precision(self.settings.precision, model, optimizer)
        if ignore_grad:
            return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)
        control = self._control(model)
        first = control.begins_update()
        if first:
            self._step = ([], 0.0, 0)
        # fairseq would go on without the demonstrations for which there was no memory.
        watched = control.watching(optimizer, first=first)
        with within_memory("fine-tuning"), watched, self._recording_queries(sample, model, criterion):
            if getattr(criterion, "sequential", False):
                if not first:
                    raise UserError("--update-freq: sequential updates are of one batch each; leave it at 1")
                loss, sample_size, logs = sequential_step(sample, model, criterion, optimizer, update_num, control)
            else:
                loss, sample_size, logs = super().train_step(sample, model, criterion, optimizer, update_num)
        value = float(loss.detach())
        control.check_finite(optimizer, value, sample["rows"])
        rows, loss_sum, size = self._step
        self._step = (rows + sample["rows"], loss_sum + value, size + int(sample_size))
        return loss, sample_size, logs

    @contextmanager
    def _recording_queries(self, sample: dict[str, Any], model: Any, criterion: Any) -> Iterator[None]:
        """Around a step's passes: if asked, keep the demonstrations' query vectors, from before the model learns.

        They are those of the pass that the loss is computed with, where it is the only one and the model's own.
        """
        if not self.cfg.record_queries:
            yield
            return
        tokens, lengths = sample["net_input"]["src_tokens"], sample["net_input"]["src_lengths"]
        is_own_pass = any(type(criterion) is CRITERION_REGISTRY[name] for name in RUN_THE_MODEL_ONCE)
        if self.cfg.linearize or getattr(criterion, "sequential", False) or not is_own_pass:
            queries = observe_training_queries(model, tokens)  # (layers, B, T, d)
            yield
        else:
            with attention_queries(model.decoder) as seen:
                yield
            queries = torch.stack(seen[: len(model.decoder.layers)])
        for row, length, vectors in zip(sample["rows"], lengths.tolist(), queries.unbind(1), strict=True):
            # A copy: as a view it would keep, and a checkpoint save, the padding of the whole batch.
            self.training_queries[row] = vectors[:, :length].to("cpu", torch.float32, copy=True)

    def optimizer_step(self, optimizer: FairseqOptimizer, model: BaseFairseqModel, update_num: int) -> None:
        """Gradients are final here (averaged and clipped): limit and record them per layer, then step."""
        self._control(model).before_step(optimizer, update_num, self._step)
        super().optimizer_step(optimizer, model, update_num)
        self._control(model).after_update()

    def _control(self, model: BaseFairseqModel) -> GradientControl:
        if self.control is None:
            path = self.cfg.record_gradients
            if path is None and self.settings.gradient_norms == "all":
                raise UserError("--gradient-norms all: has no effect without --record-gradients FILE")
            recorder = GradientRecorder(model.decoder, Path(path)) if path else None
            self.control = gradient_control(model.decoder, self.settings, recorder, linearized=self.cfg.linearize)
        return self.control

    def valid_step(self, sample: dict[str, Any], model: BaseFairseqModel, criterion: Any) -> Any:
        if not sample:  # a process of several whose share has run out
            return 0.0, 0, {"loss": 0.0, "nll_loss": 0.0, "ntokens": 0, "nsentences": 0, "sample_size": 0}
        return super().valid_step(sample, model, criterion)

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """fairseq's reduction; a criterion that measures the whole set finishes its tables here."""
        super().reduce_metrics(logging_outputs, criterion)
        if hasattr(criterion, "finish"):
            criterion.finish()

    def state_dict(self) -> dict[str, Any]:
        """What a fine-tuned checkpoint says about itself: its base, and the recorded query vectors."""
        base = {"path": str(self.cfg.base_model), "sha256": self.files.sha256}
        state = {BASE_REFERENCE: base, "linearized": bool(self.cfg.linearize), "init": self.settings.init}
        return state | ({"training_queries": self.training_queries} if self.training_queries else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the base is the one the checkpoint was trained from."""
        trained_from = state_dict.get(BASE_REFERENCE)
        if trained_from and trained_from["sha256"] != self.files.sha256:
            raise UserError(
                f"{self.cfg.base_model}: not the model that was fine-tuned (sha256 {self.files.sha256[:12]}, the "
                f"checkpoint names {trained_from['path']} with {trained_from['sha256'][:12]}); "
                "give the right one with --base-model"
            )
        self.training_queries = state_dict.get("training_queries", {})

    def max_positions(self) -> int:
        """The model's own limit, 2048 for the dense LMs: longer prompts lose demonstrations."""
        return self.files.writing.max_positions

    @property
    def source_dictionary(self) -> Dictionary:
        """The model's dictionary."""
        return self.dictionary

    target_dictionary = source_dictionary
