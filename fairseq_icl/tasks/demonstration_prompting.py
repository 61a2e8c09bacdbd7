"""The task `demonstration_prompting`: demonstrations to fine-tune on or to prompt with, queries to answer."""

import logging
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel, FairseqDecoder
from fairseq.optim import FairseqOptimizer
from fairseq.tasks import FairseqTask, register_task

from fairseq_icl.checkpoints import BASE_REFERENCE, language_model_config, read_checkpoint, sha256_of
from fairseq_icl.compat import TASK
from fairseq_icl.encoding import TOKENIZER_FILES, line_encoder, load_bpe, load_dictionary
from fairseq_icl.errors import UserError
from fairseq_icl.gradients import GradientControl
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.observe.batches import MAX_TOKENS
from fairseq_icl.observe.training_queries import observe_training_queries
from fairseq_icl.prompts.build import PromptSet, build_prompts
from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.reading import CHOICES, Reading
from fairseq_icl.tasks.prompt_datasets import FinetuningDataset, QueryDataset
from fairseq_icl.tasks.prompting_config import DemonstrationPromptingConfig

logger = logging.getLogger(__name__)


@register_task(TASK, dataclass=DemonstrationPromptingConfig)
class DemonstrationPromptingTask(FairseqTask):
    """Builds the papers' prompts from a dataset, a seed and a permutation, and freezes what does not learn."""

    def __init__(self, cfg: DemonstrationPromptingConfig, dictionary: Dictionary, reading: Reading):
        super().__init__(cfg)
        self.dictionary = dictionary
        self.reading = reading
        self.training_queries: dict[int, torch.Tensor] = {}
        self._decoder: FairseqDecoder | None = None
        self._gradients: GradientControl | None = None
        self._step: tuple[list[int], float, int] = ([], 0.0, 0)

    @classmethod
    def setup_task(cls, cfg: DemonstrationPromptingConfig, **kwargs: Any) -> "DemonstrationPromptingTask":
        if cfg.base_model is None:
            raise UserError("no model: give the pretrained checkpoint with --pretrained MODEL.pt")
        if not Path(cfg.base_model).is_file():
            raise UserError(f"{cfg.base_model}: no such checkpoint; check --pretrained, --base-model or --path")
        load_spec(cfg.dataset)  # an unknown dataset is told before minutes of loading
        overrides = {name: cfg[name] and str(cfg[name]) for name in CHOICES if name in cfg}
        dictionary = load_dictionary(cfg.dict or Path(cfg.base_model).parent / "dict.txt")
        return cls(cfg, dictionary, Reading.of(str(cfg.reading), **overrides))

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """The flags, and fairseq's own defaults where the papers' protocol has others."""
        super().add_args(parser)
        # fairseq drops a last batch smaller than its default multiple of 8: a demonstration would be lost. The data are
        # a few token sequences in memory: a process and a thread to load them ahead would only cost time.
        parser.set_defaults(required_batch_size_multiple=1, num_workers=0, data_buffer_size=0)
        if "--path" in parser._option_string_actions:  # scoring
            parser.set_defaults(max_tokens=MAX_TOKENS)
        else:
            parser.set_defaults(batch_size=1, max_epoch=1)

    @cached_property
    def base_sha256(self) -> str:
        """Hash of the base checkpoint."""
        return sha256_of(self.cfg.base_model)

    @cached_property
    def prompts(self) -> PromptSet:
        """All token sequences of this dataset, seed and permutation."""
        cfg = self.cfg
        return build_prompts(
            load_spec(cfg.dataset),
            Path(cfg.data),
            line_encoder(self.dictionary, tokenizer_of(cfg)),
            num_demonstrations=cfg.num_demonstrations,
            seed=cfg.seed,
            permutation=cfg.permutation,
            reading=self.reading,
            max_positions=self.max_positions(),
            max_validation=cfg.max_validation,
            limit=cfg.limit,
            switch_labels=str(cfg.switch_labels),
            switch_fraction=cfg.switch_fraction,
            switch_seed=cfg.switch_seed,
            missing_class=str(cfg.missing_class),
            bos=self.dictionary.bos(),
            eos=self.dictionary.eos(),
        )

    def load_dataset(self, split: str, combine: bool = False, task_cfg: Any = None, **kwargs: Any) -> None:
        """ "train" is the demonstrations in fine-tuning order, any other split the queries."""
        if split == "train":
            self.datasets[split] = FinetuningDataset(self.prompts.finetuning, self.reading.step_per)
        else:
            self.datasets[split] = QueryDataset(self.prompts.queries)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> BaseFairseqModel:
        """The model with everything frozen but `--train-parameters`."""
        model = super().build_model(cfg, from_checkpoint)
        freeze_all_but(model, self.cfg.train_parameters, biases=self.reading.biases == "trained")
        model = LinearizedLM(model.decoder, model.trained_names) if self.cfg.linearize else model
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
        iterator = super().get_batch_iterator(dataset, *args, **kwargs)
        if isinstance(dataset, FinetuningDataset):
            iterator.disable_shuffling = True
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
        if self.cfg.record_queries and not ignore_grad:
            for row, tokens in zip(sample["rows"], sample["tokens"], strict=True):
                self.training_queries[row] = observe_training_queries(model, tokens)
        loss, sample_size, logs = super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)
        if not ignore_grad:
            value = float(loss.detach())
            self._control(model).check_finite(optimizer, value, sample["rows"])
            rows, loss_sum, size = self._step
            self._step = (rows + sample["rows"], loss_sum + value, size + int(sample_size))
        return loss, sample_size, logs

    def optimizer_step(self, optimizer: FairseqOptimizer, model: BaseFairseqModel, update_num: int) -> None:
        """Gradients are final here (averaged and clipped): limit and record them per layer, then step."""
        self._control(model).before_step(optimizer, model, update_num, self._step)
        self._step = ([], 0.0, 0)
        super().optimizer_step(optimizer, model, update_num)

    def _control(self, model: BaseFairseqModel) -> GradientControl:
        if self._gradients is None:
            self._gradients = GradientControl(self.cfg, model.decoder)
        return self._gradients

    def finish_recording(self) -> None:
        """Write what the gradient record still holds back; at the end of a process that happens by itself."""
        if self._gradients is not None:
            self._gradients.flush()

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
        base = {"path": str(self.cfg.base_model), "sha256": self.base_sha256}
        state = {BASE_REFERENCE: base, "linearized": bool(self.cfg.linearize), "init": str(self.cfg.init)}
        return state | ({"training_queries": self.training_queries} if self.training_queries else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the base is the one the checkpoint was trained from."""
        trained_from = state_dict.get(BASE_REFERENCE)
        if trained_from and trained_from["sha256"] != self.base_sha256:
            raise UserError(
                f"{self.cfg.base_model}: not the model that was fine-tuned (sha256 {self.base_sha256[:12]}, the "
                f"checkpoint names {trained_from['path']} with {trained_from['sha256'][:12]}); "
                "give the right one with --base-model"
            )
        self.training_queries = state_dict.get("training_queries", {})

    @cached_property
    def _max_positions(self) -> int:
        return language_model_config(read_checkpoint(self.cfg.base_model), self.cfg.base_model).max_target_positions

    def max_positions(self) -> int:
        """The model's own limit, 2048 for the dense LMs: longer prompts lose demonstrations."""
        return self._max_positions

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary


def tokenizer_of(cfg: DemonstrationPromptingConfig) -> Any | None:
    """fairseq's tokenizer `--bpe` with its files, which are looked for beside the checkpoint; None without a name."""
    folder, files = Path(cfg.base_model).parent, TOKENIZER_FILES.get(cfg.bpe, {})
    return load_bpe(cfg.bpe, **{flag: str(cfg[flag] or folder / name) for flag, name in files.items()})


def freeze_all_but(model: BaseFairseqModel, parts: str, *, biases: bool) -> None:
    """Only parameters whose name contains one of the comma-separated `parts` learn; biases among them on request."""
    wanted = [part.strip() for part in parts.split(",") if part.strip()]
    for name, parameter in model.named_parameters():
        is_bias = name.endswith(".bias")
        parameter.requires_grad_(any(part in name for part in wanted) and (biases or not is_bias))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"--train-parameters {parts}: no parameter of the model has such a name")
