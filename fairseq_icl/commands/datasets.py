"""`fairseq-icl datasets`: list the catalogue, show rendered examples, print the data statistics."""

import argparse
import math
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fairseq_icl.errors import UserError
from fairseq_icl.prompts import Encode, Writing, sampling
from fairseq_icl.prompts.catalogue import DatasetSpec, dataset_names, find_spec, load_spec
from fairseq_icl.prompts.encoding import RowEncoder
from fairseq_icl.prompts.readers import SPLITS, Row, compare_rows, has_files, read_split, record_rows
from fairseq_icl.results import text_table
from fairseq_icl.settings import SETTINGS

DESCRIPTION = """List the datasets of the catalogue; show how a dataset's rows are turned into prompts and, with data,
whether they are, row for row, those of the papers; with a dictionary (--dict) print the data statistics: rows, average
tokens of an example, and how many demonstrations fit into the model."""


def main(argv: list[str]) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="fairseq-icl datasets", description=DESCRIPTION)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="dataset of the catalogue, or path of your own YAML file")
    add("--data", type=Path, metavar="DIR", help="folder with the data files; without it only the template is shown")
    add("--dict", metavar="FILE", help="dict.txt of the model: print statistics in its tokens")
    add("--bpe", choices=("gpt2", "sentencepiece"), help="tokenizer of the model (default: split at white space)")
    add("--gpt2-encoder-json", metavar="FILE", help="for --bpe gpt2 (default: encoder.json beside --dict)")
    add("--gpt2-vocab-bpe", metavar="FILE", help="for --bpe gpt2 (default: vocab.bpe beside --dict)")
    of_sentencepiece = "for --bpe sentencepiece (default: sentencepiece.bpe.model beside --dict)"
    add("--sentencepiece-model", metavar="FILE", help=of_sentencepiece)
    add("--max-positions", type=int, default=2048, metavar="N", help="positions of the model (default: %(default)s)")
    add("--rows", type=int, metavar="N", help="average over N random training rows instead of all")
    args = parser.parse_args(argv)
    if args.dict or args.bpe:
        print_statistics(args)
    elif args.names:
        for name in args.names:
            show(load_spec(name) if args.data is None else find_spec(name, args.data), args.data)
    else:  # one line a dataset: name, options, label words, source
        lines: list[tuple[object, ...]] = [("dataset", "labels", "papers", "source")]
        for spec in map(load_spec, dataset_names()):
            words = textwrap.shorten(", ".join(spec.label_words) or "options of each row", 48, placeholder=" ...")
            lines.append((spec.name, words, ", ".join(spec.papers), spec.source))
        print(text_table(lines))
    return 0


def show(spec: DatasetSpec, folder: Path | None) -> None:
    """The specification and, with data, the first evaluation row as it is rendered; else the bare template."""
    print(f"{spec.name}, version {spec.version} ({spec.source})" + (f". {spec.note}" if spec.note else ""))
    if spec.hub:
        print(f"hub: {spec.hub.repo} at {spec.hub.revision} (fairseq-icl fetch data {spec.name} --to DIR)")
    for paper, settings in spec.papers.items():
        print(f"{paper}: " + ", ".join(f"{key} {value}" for key, value in settings.items()))
    if folder is None:
        names = [*spec.fields, *(f"{name}_{part}" for name in spec.cut for part in ("before", "after"))]
        options = spec.label_words or ("<option 0>", "<option 1>")
        print_rendered(spec, Row(0, Path(), "", {name: f"<{name}>" for name in names}, options, gold=-1))
        return
    for split in SPLITS:
        rows = read_split(folder, spec, split)
        counts = Counter(row.gold for row in rows)
        labels = ", ".join(f"{spec.label_words[i] if spec.has_classes else i}: {counts[i]:,}" for i in sorted(counts))
        print(f"{split}: {len(rows):,} rows ({labels})")
        record = record_rows(spec, rows)
        compared = compare_rows(folder, spec, split, rows, record)
        said = f", {compared.text}" if compared is not None else ""
        if compared is not None and compared.is_doubtful:
            others = f"a seed draws others (fairseq-icl fetch data {spec.name})"
            said = f"\n  WARNING: {compared.text}; {others}"
        print(f"  rows in order: sha256 {record.sha256}{said}")
    first = rows[sampling.shuffled(len(rows), sampling.VALIDATION_SEED)[0]]
    print(f"first evaluation row, {first.where}:")
    print_rendered(spec, first)


def print_rendered(spec: DatasetSpec, row: Row) -> None:
    """Input and label of every option in quotes, a shared input once; the gold option is marked."""
    rendered = spec.render(row)
    inputs = {input_text for input_text, _ in rendered}
    if len(inputs) == 1:
        print(f"  input      {inputs.pop()!r}")
    for number, (input_text, label_text) in enumerate(rendered):
        own_input = f"{input_text!r} + " if inputs else ""
        print(f"  option {number} {'*' if number == row.gold else ' '} {own_input}{label_text!r}")


def print_statistics(args: argparse.Namespace) -> None:
    """The table of the given datasets, or of all that have files in the folder."""
    from fairseq_icl import models  # noqa: F401 - slow to import, and in the right order
    from fairseq_icl.models.files import TOKENIZER_FILES, line_encoder, load_bpe, load_dictionary

    if args.data is None or args.dict is None:
        raise UserError("statistics need --data DIR (the data files) and --dict FILE (dict.txt of the model)")
    if args.rows is not None and args.rows < 1:
        raise UserError(f"--rows {args.rows}: must be at least 1")
    files = {flag: Path(args.dict).parent / name for flag, name in TOKENIZER_FILES.get(args.bpe, {}).items()}
    beside = {flag: str(path) if path.is_file() else None for flag, path in files.items()}
    bpe = load_bpe(args.bpe, **{flag: getattr(args, flag) or path for flag, path in beside.items()})
    encode = line_encoder(load_dictionary(args.dict), bpe)
    names = args.names or [name for name in dataset_names(args.data) if has_files(args.data, name)]
    if not names:
        raise UserError(f"{args.data}: no data of any dataset of the catalogue there; put them into DIR/NAME/")
    header = ("dataset", "train rows", "valid rows", "tokens per example", "longest query")
    lines: list[tuple[object, ...]] = [(*header, f"fit into {args.max_positions}")]
    for spec in (find_spec(name, args.data) for name in names):
        found = dataset_statistics(spec, args.data, encode, max_positions=args.max_positions, num_rows=args.rows)
        average = round(found.average_tokens, 1)
        lines.append((found.dataset, found.train_rows, found.valid_rows, average, found.longest_query, found.fitting))
    print(text_table(lines))


@dataclass(frozen=True)
class Statistics:
    """One line of the table."""

    dataset: str
    train_rows: int
    valid_rows: int
    average_tokens: float  # tokens of a training example: input and gold label, without BOS and EOS
    longest_query: int  # tokens of the longest evaluation sequence, with BOS and label
    fitting: int  # demonstrations of average length that fit beside the longest evaluation sequence


def dataset_statistics(
    spec: DatasetSpec, folder: Path, encode: Encode, *, max_positions: int = 2048, num_rows: int | None = None
) -> Statistics:
    """The statistics over all training rows, or over the first `num_rows` after shuffling, and the evaluation rows."""
    encoder = RowEncoder(spec, Writing(encode, max_positions=sys.maxsize))
    train, valid = read_split(folder, spec, "train"), read_split(folder, spec, "valid")
    lengths = []
    for i in sampling.shuffled(len(train), sampling.VALIDATION_SEED)[:num_rows]:
        example = encoder.query(train[i])
        lengths.append(len(example.inputs[example.gold]) + len(example.labels[example.gold]))
    evaluated = sampling.shuffled(len(valid), sampling.VALIDATION_SEED)[: SETTINGS["max_validation"].default]
    longest = max(encoder.query(valid[i]).longest for i in evaluated)
    average = sum(lengths) / len(lengths)
    return Statistics(spec.name, len(train), len(valid), average, longest, num_fitting(average, longest, max_positions))


def num_fitting(length: float, longest: int, max_positions: int) -> int:
    """The largest n with BOS + n * (length + EOS) + longest < max_positions: the authors' rule for equal lengths."""
    return max(0, math.ceil((max_positions - longest - 1) / (length + 1)) - 1)
