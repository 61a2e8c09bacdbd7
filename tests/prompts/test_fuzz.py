"""Whatever a file, a YAML or a template holds: prompts that keep their promises, or a line that says what is wrong."""

import csv
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairseq_icl.errors import UserError
from fairseq_icl.prompts import Writing
from fairseq_icl.prompts.build import Prompts, build_prompts
from fairseq_icl.prompts.catalogue import DatasetSpec, load_spec, parse_spec
from fairseq_icl.prompts.readers import read_split
from fairseq_icl.settings import SETTINGS, Settings
from tests.prompts.samples import SENTIMENT, encode_bytes, spec_of, write_jsonl

SPEC = spec_of(SENTIMENT)
many = settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])

surrogates = st.characters(categories=["Cs", "L", "Zs", "Cc"])
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.text(surrogates, max_size=4)
)
values = st.recursive(
    scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3), max_leaves=6
)
labels = st.sampled_from([0, 1, "0", "1", -1, 2, "", None]) | values
rows = st.fixed_dictionaries({}, optional={"text": st.text(max_size=20) | values, "label": labels, "other": values})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder for all cases; warnings of thousands of odd prompts would only slow them down."""
    logging.disable(logging.WARNING)
    yield tmp_path_factory.mktemp("fuzz")
    logging.disable(logging.NOTSET)


def checked(function: Any, *args: Any, **settings: Any) -> Any:
    """The function's result, or None for a UserError; any other exception is a failure."""
    try:
        return function(*args, **settings)
    except UserError:
        return None


def read_or_refuse(folder: Path, spec: DatasetSpec = SPEC) -> None:
    for row in checked(read_split, folder, spec, "train") or []:
        assert row.gold in range(len(row.options))
        assert all(isinstance(text, str) for text in row.texts.values())
        spec.render(row)


@pytest.mark.parametrize("suffix", ["jsonl", "tsv", "csv", "parquet"])
@many
@given(content=st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(folder: Path, suffix: str, content: bytes) -> None:
    (folder / suffix).mkdir(exist_ok=True)
    header = {
        "tsv": b"text\tlabel\n",
        "csv": b"text,label\n",
        "jsonl": b'{"text": "x", "label": 1}\n',
        "parquet": b"PAR1",
    }
    (folder / suffix / f"train.{suffix}").write_bytes(header[suffix] + content)
    read_or_refuse(folder / suffix)


@many
@given(content=st.lists(rows, max_size=4))
def test_any_json_rows_are_read_or_refused(folder: Path, content: list[dict[str, Any]]) -> None:
    write_jsonl(folder / "rows" / "train.jsonl", content)
    read_or_refuse(folder / "rows")


words = st.lists(st.text(max_size=4) | values, max_size=4)
choices = values | st.fixed_dictionaries({"text": words, "label": words})


@many
@given(row=st.fixed_dictionaries({"question": st.text() | values, "choices": choices, "answerKey": labels}))
def test_any_options_are_read_or_refused(folder: Path, row: dict[str, Any]) -> None:
    write_jsonl(folder / "options" / "train.jsonl", [row])
    read_or_refuse(folder / "options", load_spec("arc_easy"))


line = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x00"), max_size=20)


@many
@given(texts=st.lists(line, min_size=1, max_size=4))
def test_texts_survive_every_format(folder: Path, texts: list[str]) -> None:
    place = folder / "formats"
    content = [{"text": text, "label": 0} for text in texts]
    write_jsonl(place / "jsonl" / "train.jsonl", content)
    for name in ("csv", "parquet", "tsv"):
        (place / name).mkdir(exist_ok=True)
    with (place / "csv" / "train.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *((text, 0) for text in texts)])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), place / "parquet" / "train.parquet")
    formats = ["jsonl", "csv", "parquet"]
    if not any("\t" in text for text in texts):
        lines = "".join(f"{text}\t0\n" for text in texts)
        (place / "tsv" / "train.tsv").write_bytes(f"text\tlabel\n{lines}".encode())
        formats.append("tsv")
    for name in formats:
        assert [row.texts["text"] for row in read_split(place / name, SPEC, "train")] == texts


keys = st.sampled_from(
    ["version", "source", "fields", "template", "label_words", "options", "cut", "splits", "papers", "label"]
)


@many
@given(changes=st.dictionaries(keys | st.text(max_size=5), values, max_size=3), removed=st.sets(keys, max_size=2))
def test_any_catalogue_entry_is_loaded_or_refused(changes: dict[str, Any], removed: set[str]) -> None:
    data = {key: value for key, value in {**SENTIMENT, **changes}.items() if key not in removed}
    checked(parse_spec, data, "fuzz.yaml", "fuzz")


@many
@given(data=values | st.text(max_size=40) | st.dictionaries(keys, values, max_size=6))
def test_any_yaml_file_is_loaded_or_refused(folder: Path, data: Any) -> None:
    path = folder / "any.yaml"
    text = data if isinstance(data, str) else yaml.safe_dump(data)
    path.write_text(text, encoding="utf-8", errors="replace")
    checked(load_spec, str(path))


CHOSEN = (
    "loss_on",
    "finetuning_order",
    "finetuning_demonstrations",
    "permutation_zero",
    "switch_labels",
    "missing_class",
)
unicode = st.text(st.characters(codec="utf-8"), max_size=10)
word = st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"]), min_size=1, max_size=5) | unicode
requests = st.builds(
    Settings,
    num_demonstrations=st.integers(0, 4),
    seed=st.integers(0, 2**32 - 1),
    permutation=st.integers(-1, 4),
    switch_fraction=st.floats(0, 1),
    **{name: st.sampled_from(SETTINGS[name].choices) for name in CHOSEN},
)


@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(
    around=st.tuples(unicode, unicode),
    words=st.lists(word, min_size=2, max_size=3),
    content=st.lists(st.tuples(unicode, st.integers(0, 1)), min_size=3, max_size=6),
    request=requests,
    max_positions=st.integers(20, 400),
)
def test_any_prompt_keeps_its_promises_or_is_refused(
    folder: Path,
    around: tuple[str, str],
    words: list[str],
    content: list[tuple[str, int]],
    request: Settings,
    max_positions: int,
) -> None:
    for split in ("train", "valid"):
        write_jsonl(folder / "prompts" / f"{split}.jsonl", [{"text": text, "label": i} for text, i in content])
    spec = checked(spec_of, SENTIMENT, template="{text}".join(around), label_words=words)
    writing = Writing(encode_bytes, max_positions)
    prompts = spec and checked(build_prompts, spec, folder / "prompts", writing, request)
    if prompts:
        check_promises(prompts, spec, folder / "prompts", writing)


def check_promises(prompts: Prompts, spec: DatasetSpec, folder: Path, writing: Writing) -> None:
    asked, max_positions = prompts.settings, writing.max_positions
    read = read_split(folder, spec, "valid")
    for query in prompts.queries:
        options = spec.render(read[query.row])
        assert query.inputs == tuple(writing.tokens(text) for text, _ in options)
        assert query.labels == tuple(writing.tokens(text) for _, text in options)
        assert query.gold == read[query.row].gold
        assert query.longest <= max_positions
    longest = max(query.longest for query in prompts.queries)
    assert prompts.context[0] == 0
    assert not prompts.context_rows or len(prompts.context) + longest < max_positions
    assert len(set(prompts.context_rows)) == len(prompts.context_rows) <= asked.num_demonstrations
    assert sum(end - start + 1 for start, end in prompts.context_spans) == len(prompts.context) - 1
    assert all(prompts.context[end] == 2 for _, end in prompts.context_spans)
    fitting = asked.finetuning_demonstrations == "fitting"
    assert len(prompts.finetuning) == (len(prompts.context_rows) if fitting else asked.num_demonstrations)
    for sequence in prompts.finetuning:
        assert len(sequence.tokens) == len(sequence.scored)
        assert (sequence.tokens[0], sequence.scored[0], sequence.scored[-1]) == (0, False, True)
    if asked.switch_labels in ("none", "both"):
        trained = {sequence.row: sequence.tokens[1:] for sequence in prompts.finetuning}
        for row, (start, end) in zip(prompts.context_rows, prompts.context_spans, strict=True):
            assert prompts.context[start:end] == trained[row]
