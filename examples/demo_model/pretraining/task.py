"""`demo_pretraining`: language modelling on episodes drawn on the fly, widened as the model learns to read them."""

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING

from examples.demo_model.episodes import Level
from examples.demo_model.pretraining.batches import EpisodeBatches, HeldOutBatches
from examples.demo_model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass
class DemoPretrainingConfig(FairseqDataclass):
    data: str = field(default=MISSING, metadata={"help": "folder with dict.txt and sentencepiece.bpe.model"})
    tokens_per_batch: int = field(default=2048, metadata={"help": "tokens of a batch, whatever the length of its rows"})
    updates_per_epoch: int = field(default=50, metadata={"help": "updates between two looks at the level"})
    widen_at: float = field(default=0.85, metadata={"help": "accuracy at which the next level begins"})
    widen_at_epochs: str = field(
        default="",
        metadata={
            "help": "the next levels begin at these epochs (6,8,10), whatever the accuracy: data do not depend on it"
        },
    )
    # The stock language model reads these three from the task.
    tokens_per_sample: int = field(default=1024, metadata={"help": "longest row the model must take"})
    max_target_positions: int = field(default=1024, metadata={"help": "longest row the model must take"})
    add_bos_token: bool = field(default=True, metadata={"help": "rows begin with BOS (they always do)"})
    seed: int = II("common.seed")


@register_task("demo_pretraining", dataclass=DemoPretrainingConfig)
class DemoPretrainingTask(FairseqTask):
    """Split "train": episodes at the current level. Any other split: the held-out dataset of that name."""

    resumes = True  # see fairseq_icl.compat

    def __init__(self, cfg: DemoPretrainingConfig, dictionary: Dictionary, tokenizer: Tokenizer) -> None:
        super().__init__(cfg)
        self.dictionary, self.tokenizer = dictionary, tokenizer
        self.state.add_factory("level", lambda: 0)  # kept in the checkpoint, so that a resumed run goes on where it was
        self.totals: Counter[str] = Counter()

    @classmethod
    def setup_task(cls, cfg: DemoPretrainingConfig, **kwargs) -> "DemoPretrainingTask":
        folder = Path(cfg.data)
        return cls(cfg, Dictionary.load(str(folder / "dict.txt")), Tokenizer(folder / "sentencepiece.bpe.model"))

    def load_dataset(self, split: str, **kwargs) -> None:
        cfg = self.cfg
        if split == "train":
            dataset = EpisodeBatches(self.tokenizer, cfg.seed, cfg.updates_per_epoch, cfg.tokens_per_batch)
        else:
            dataset = HeldOutBatches(self.tokenizer, seed=0, num_batches=5, dataset=split)
        self.datasets[split] = dataset

    def begin_epoch(self, epoch, model) -> None:
        """Set the level of the epoch, and forget the accuracies of the one before."""
        level = self.level_of(epoch)
        if level > self.state.level:
            logger.info("level %d from epoch %d on", level, epoch)
        self.state.merge_state_dict({"level": level})
        self.datasets["train"].level = Level(level)
        self.totals.clear()

    def level_of(self, epoch: int) -> int:
        """What is planned for the epoch, also in a run that goes on in the middle.

        Without a plan, one more if in the last epoch most labels that could be known were right, in every watched
        format.
        """
        planned = [int(first) for first in self.cfg.widen_at_epochs.split(",") if first]
        if planned:
            return sum(epoch >= first for first in planned)
        level = self.state.level
        watched = Level(level).watched_formats
        accuracies = [self.totals[f"{name}_correct"] / max(1, self.totals[name]) for name in watched]
        return min(Level.LAST, level + (min(accuracies) >= self.cfg.widen_at))

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        loss, sample_size, log = super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)
        self.totals.update(log)
        return loss, sample_size, log

    def reduce_metrics(self, logging_outputs, criterion) -> None:
        super().reduce_metrics(logging_outputs, criterion)
        metrics.log_scalar("level", self.state.level, round=0)

    def max_positions(self) -> int:
        return self.cfg.tokens_per_sample

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary
