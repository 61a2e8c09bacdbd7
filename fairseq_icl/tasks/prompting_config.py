"""Every flag of the task `demonstration_prompting`, with its help text."""

from dataclasses import dataclass, field
from typing import Any, Optional  # fairseq's parser knows Optional[X], not X | None

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II, MISSING

from fairseq_icl.models.pretrained_lm import INITS
from fairseq_icl.reading import CHOICES, PAPER


def described(text: str, default: Any = None, **metadata: Any) -> Any:
    """A dataclass field with a help text."""
    return field(default=default, metadata={"help": text, **metadata})


def reading_flag(name: str, text: str) -> Any:
    """A flag for one difference between code and paper; left out, `--reading` decides."""
    authors, paper = CHOICES[name][0], PAPER[name]
    return described(f"{text} (authors' code: {authors}; paper: {paper}; default: as --reading says)")


def choice(name: str) -> Any:
    """The type of such a flag."""
    return Optional[ChoiceEnum(list(CHOICES[name]))]


@dataclass
class DemonstrationPromptingConfig(FairseqDataclass):
    """Configuration of the task."""

    data: str = described("folder with the datasets' files (JSONL, TSV, CSV or Parquet)", MISSING)
    dataset: str = described("name of a dataset of the catalogue (fairseq-icl datasets) or path of a YAML", MISSING)
    num_demonstrations: int = described("number of demonstrations k", 32)
    seed: int = II("common.seed")
    permutation: int = described("index of the permutation of the demonstrations (0: see --permutation-zero)", 0)
    limit: Optional[int] = described("score only the first N validation examples (after shuffle and cap)")
    max_validation: int = described("cap of the validation set; the authors keep 2000 rows", 2000)

    missing_class: ChoiceEnum(["warn", "refuse"]) = described(
        "what to do if no demonstration in the prompt has one of the labels; the authors do not look", "warn"
    )

    base_model: Optional[str] = described(
        "checkpoint of the pretrained model, with dict.txt beside it (default in fairseq-validate: the one that the "
        "fine-tuned checkpoint names)",
        argparse_alias="--pretrained",
    )
    dict: Optional[str] = described("dictionary of the model (default: dict.txt beside the checkpoint)")
    bpe: Optional[str] = field(default=None)  # fairseq's own flag
    # fairseq's own flags as well, whose configuration does not admit None: hence "".
    gpt2_encoder_json: str = described("encoder.json for --bpe gpt2 (default: beside the checkpoint)", "")
    gpt2_vocab_bpe: str = described("vocab.bpe for --bpe gpt2 (default: beside the checkpoint)", "")
    sentencepiece_model: str = described(
        "model file for --bpe sentencepiece (default: sentencepiece.bpe.model beside the checkpoint)", ""
    )
    init: ChoiceEnum(list(INITS)) = described(
        "weights: pretrained; untrained (nothing kept from the checkpoint); trained-embeddings (embeddings and the "
        "layers' layer norms kept: the second paper's 'trained embeddings'); layer-norms (only the layers' layer norms "
        "kept: its 'no training')",
        "pretrained",
    )
    train_parameters: str = described(
        "comma-separated parts of the names of the parameters that learn", "self_attn.k_proj,self_attn.v_proj"
    )
    linearize: bool = described("train and score the first-order expansion around the pretrained weights", False)

    reading: ChoiceEnum(["authors", "paper"]) = described(
        "which reading of the protocol sets the flags that differ between the authors' code and the paper", "authors"
    )
    loss_on: choice("loss_on") = reading_flag("loss_on", "tokens that carry the fine-tuning loss")
    finetuning_order: choice("finetuning_order") = reading_flag(
        "finetuning_order", "order of fine-tuning: drawn anew, or that of the ICL prompt"
    )
    finetuning_demonstrations: choice("finetuning_demonstrations") = reading_flag(
        "finetuning_demonstrations", "fine-tune on all k demonstrations or on those that fit into the ICL prompt"
    )
    biases: choice("biases") = reading_flag("biases", "whether biases of the trained projections learn")
    final_norm: choice("final_norm") = reading_flag(
        "final_norm", "final layer norm of the baselines trained-embeddings and layer-norms"
    )
    permutation_zero: choice("permutation_zero") = reading_flag(
        "permutation_zero", "what permutation index 0 means: no permutation, or the first one drawn"
    )
    step_per: choice("step_per") = reading_flag("step_per", "one optimizer step per demonstration or per scored token")

    switch_labels: ChoiceEnum(["none", "demonstrations", "finetuning", "both"]) = described(
        "where demonstrations get false labels", "none"
    )
    switch_fraction: float = described("share of the demonstrations whose label is switched", 1.0)
    switch_seed: Optional[int] = described("seed of the switching (default: --seed)")

    record_gradients: Optional[str] = described("write the gradient norm of every layer and step to this Parquet file")
    record_queries: bool = described(
        "keep the query vectors of the demonstrations in the checkpoint (for attention to training tokens)", False
    )
    layer_clip: ChoiceEnum(["none", "norm", "max"]) = described(
        "limit every layer's gradient: its norm, or its largest component", "none"
    )
    layer_clip_value: Optional[str] = described(
        "the limit: one value, one per layer (comma-separated), or from:FILE (a file of --record-gradients)"
    )
