import logging
from pathlib import Path
from typing import Any

import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.prompts import Writing
from fairseq_icl.prompts.build import Prompts, build_prompts
from fairseq_icl.prompts.catalogue import DatasetSpec, load_spec
from fairseq_icl.prompts.encoding import RowEncoder
from fairseq_icl.settings import Settings
from tests.prompts.samples import (
    CHOICE,
    SENTIMENT,
    encode_bytes,
    encode_words,
    spec_of,
    write_jsonl,
    write_sentiment,
)

SPEC = spec_of(SENTIMENT)
[NEGATIVE], [POSITIVE] = encode_words("Negative"), encode_words("Positive")


def build(folder: Path, spec: DatasetSpec = SPEC, **changes: Any) -> Prompts:
    settings = {"num_demonstrations": 6, "seed": 3, **changes}
    writing = Writing(settings.pop("encode", encode_words), settings.pop("max_positions", 2048))
    return build_prompts(spec, folder, writing, Settings.of(**settings))


def num_dropped(prompts: Prompts) -> int:
    return prompts.settings.num_demonstrations - len(prompts.context_rows)


def labels_in_prompt(prompts: Prompts) -> dict[int, int]:
    return {
        row: prompts.context[end - 1] for row, (_, end) in zip(prompts.context_rows, prompts.context_spans, strict=True)
    }


def labels_in_finetuning(prompts: Prompts) -> dict[int, int]:
    return {sequence.row: sequence.tokens[-1] for sequence in prompts.finetuning}


def test_context_is_bos_and_demonstrations_closed_by_eos(tmp_path: Path) -> None:
    prompts = build(write_sentiment(tmp_path), num_demonstrations=2)
    words = [
        encode_words(f"Review: train{i} Sentiment: {('Negative', 'Positive')[i % 2]}") for i in prompts.context_rows
    ]
    assert prompts.context == (0, *words[0], 2, *words[1], 2)
    assert prompts.context_spans == ((1, 5), (6, 10))


def test_queries_follow_seed_one_whatever_the_run_seed(tmp_path: Path) -> None:
    write_sentiment(tmp_path)
    first, second = build(tmp_path, seed=3), build(tmp_path, seed=4)
    assert first.queries == second.queries
    assert first.context_rows != second.context_rows


def test_query_options_share_the_input_object(tmp_path: Path) -> None:
    query = build(write_sentiment(tmp_path)).queries[0]
    assert query.inputs[0] is query.inputs[1]
    assert query.shared_input
    assert query.single_token
    assert query.labels == ((NEGATIVE,), (POSITIVE,))


def test_multi_token_labels_are_kept_whole(tmp_path: Path) -> None:
    prompts = build(write_sentiment(tmp_path), encode=encode_bytes)
    assert prompts.queries[0].labels[1] == tuple(encode_bytes(" Positive"))
    assert not prompts.queries[0].single_token
    assert not prompts.single_token


def test_options_that_change_the_input_are_not_shared(tmp_path: Path) -> None:
    row = {"sentence": "The _ was late.", "option1": "bus", "option2": "road", "answer": "2"}
    for split in ("train", "valid"):
        write_jsonl(tmp_path / f"{split}.jsonl", [row])
    prompts = build(tmp_path, load_spec("winogrande"), num_demonstrations=1)
    [query] = prompts.queries
    assert not query.shared_input
    assert not query.single_token
    assert prompts.finetuning[0].tokens == (0, *encode_words("The road was late."))


def test_rows_may_have_different_numbers_of_options(tmp_path: Path) -> None:
    rows = [
        {"question": "a", "choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]}, "answer": "C"},
        {"question": "b", "choices": {"text": ["x", "x"], "label": ["1", "2"]}, "answer": "2"},
    ]
    for split in ("train", "valid"):
        write_jsonl(tmp_path / f"{split}.jsonl", rows)
    prompts = build(tmp_path, spec_of(CHOICE), num_demonstrations=2, switch_labels="both")
    assert sorted(len(query.labels) for query in prompts.queries) == [2, 3]


def test_limit_keeps_the_first_queries_and_the_same_prompt(tmp_path: Path) -> None:
    write_sentiment(tmp_path)
    long_row = {"text": " ".join(["long"] * 30), "label": 0}
    write_jsonl(tmp_path / "sample_valid.jsonl", [*[{"text": "short", "label": 0}] * 9, long_row])
    full, limited = build(tmp_path, max_positions=60), build(tmp_path, max_positions=60, limit=1)
    assert limited.queries == full.queries[:1]
    assert limited.queries[0].longest < 30
    assert limited.context == full.context
    assert num_dropped(full) > 0


def test_validation_is_capped_after_the_shuffle(tmp_path: Path) -> None:
    write_sentiment(tmp_path, num_valid=50)
    assert build(tmp_path, max_validation=7).queries == build(tmp_path).queries[:7]


def test_demonstration_is_appended_only_while_the_sum_stays_below_the_limit(tmp_path: Path) -> None:
    write_sentiment(tmp_path)
    needed = 1 + 6 * 5 + 5  # BOS, six demonstrations of four tokens and EOS, the query with BOS and label
    assert num_dropped(build(tmp_path, max_positions=needed + 1)) == 0
    assert num_dropped(build(tmp_path, max_positions=needed)) == 1


def test_building_stops_at_the_first_demonstration_that_does_not_fit(tmp_path: Path) -> None:
    write_sentiment(tmp_path)
    third = build(tmp_path).context_rows[2]
    rows = [{"text": "w " * (40 if i == third else 1), "label": 0} for i in range(12)]
    write_jsonl(tmp_path / "sample_train.jsonl", rows)
    prompts = build(tmp_path, max_positions=60)
    assert len(prompts.context_rows) == 2
    assert num_dropped(prompts) == 4
    assert len(prompts.finetuning) == 6


def test_dropped_demonstrations_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build(write_sentiment(tmp_path), max_positions=36)
    assert "only 5 of 6 demonstrations fit into 36 positions" in caplog.text


@pytest.mark.parametrize("permutation", [0, 2])
def test_finetuning_on_fitting_demonstrations_keeps_the_order(tmp_path: Path, permutation: int) -> None:
    write_sentiment(tmp_path)
    settings = {"max_positions": 30, "permutation": permutation}
    authors = build(tmp_path, **settings)
    drawn = build(tmp_path, **settings, finetuning_demonstrations="fitting")
    assert len(authors.finetuning) == 6
    assert drawn.finetuning == tuple(s for s in authors.finetuning if s.row in authors.context_rows)
    paper = build(tmp_path, **settings, reading="paper")
    assert tuple(s.row for s in paper.finetuning) == paper.context_rows


def test_finetuning_order_of_the_prompt_includes_what_does_not_fit(tmp_path: Path) -> None:
    write_sentiment(tmp_path)
    prompts = build(tmp_path, max_positions=30, permutation=1, finetuning_order="icl")
    order = tuple(sequence.row for sequence in prompts.finetuning)
    assert len(order) == 6
    assert order[: len(prompts.context_rows)] == prompts.context_rows


def test_loss_on_all_tokens_or_on_the_label(tmp_path: Path) -> None:
    write_sentiment(tmp_path)
    assert build(tmp_path).finetuning[0].scored == (False, True, True, True, True)
    on_label = build(tmp_path, loss_on="label").finetuning[0]
    assert on_label.scored == (False, False, False, False, True)


def test_switched_labels_go_where_asked(tmp_path: Path) -> None:
    write_sentiment(tmp_path)
    true = labels_in_prompt(build(tmp_path))
    flipped = {row: NEGATIVE + POSITIVE - label for row, label in true.items()}
    for switch, shown, trained in [
        ("none", true, true),
        ("demonstrations", flipped, true),
        ("finetuning", true, flipped),
        ("both", flipped, flipped),
    ]:
        prompts = build(tmp_path, switch_labels=switch)
        assert labels_in_prompt(prompts) == shown
        assert labels_in_finetuning(prompts) == trained
        assert [query.gold for query in prompts.queries] == [query.gold for query in build(tmp_path).queries]


def test_both_sides_see_the_same_switched_labels_in_any_order(tmp_path: Path) -> None:
    write_sentiment(tmp_path)
    settings = {"switch_labels": "both", "switch_fraction": 0.5, "switch_seed": 8}
    prompts = build(tmp_path, permutation=3, **settings)
    assert labels_in_prompt(prompts) == labels_in_finetuning(prompts)
    assert labels_in_prompt(prompts) == labels_in_prompt(build(tmp_path, permutation=0, **settings))
    true = labels_in_prompt(build(tmp_path))
    assert sum(true[row] != label for row, label in labels_in_prompt(prompts).items()) == 3


def test_missing_class_is_warned_of_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_sentiment(tmp_path)
    write_jsonl(tmp_path / "sample_train.jsonl", [{"text": "x", "label": 0}] * 6)
    with caplog.at_level(logging.WARNING):
        build(tmp_path)
    assert "sample: no demonstration in the prompt has the label Positive" in caplog.text


def test_missing_class_is_refused_on_request(tmp_path: Path) -> None:
    write_sentiment(tmp_path)
    write_jsonl(tmp_path / "sample_train.jsonl", [{"text": "x", "label": 0}] * 6)
    with pytest.raises(UserError, match="has the label Positive; raise num_demonstrations or take another seed"):
        build(tmp_path, missing_class="refuse")


def test_missing_class_is_passed_over_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_sentiment(tmp_path)
    write_jsonl(tmp_path / "sample_train.jsonl", [{"text": "x", "label": 0}] * 6)
    build(tmp_path, missing_class="ignore")
    assert "no demonstration in the prompt" not in caplog.text


def test_prompts_remember_what_they_were_built_from(tmp_path: Path) -> None:
    prompts = build(write_sentiment(tmp_path), position="gold")
    assert (prompts.spec, prompts.data) == (SPEC, tmp_path)
    assert prompts.settings == Settings(num_demonstrations=6, seed=3, position="gold")


def test_special_symbols_are_those_of_the_model(tmp_path: Path) -> None:
    spec = spec_of(SENTIMENT, template="{text}\nSentiment:")
    writing = Writing(encode_words, bos=100, separator=(101, 102), line_break=(103,))
    settings = Settings(num_demonstrations=2, seed=3)
    prompts = build_prompts(spec, write_sentiment(tmp_path), writing, settings)
    [sentiment] = encode_words("Sentiment:")
    texts = [encode_words(f"train{i}") for i in prompts.context_rows]
    labels = [(NEGATIVE, POSITIVE)[i % 2] for i in prompts.context_rows]
    shown = [(*text, 103, sentiment, label) for text, label in zip(texts, labels, strict=True)]
    assert prompts.start == (100,)
    assert prompts.context == (100, *shown[0], 101, 102, *shown[1], 101, 102)
    assert prompts.context_spans == ((1, 5), (7, 11))
    assert [sequence.tokens for sequence in prompts.finetuning] == [(100, *tokens) for tokens in shown]


def test_no_demonstrations_leave_the_bare_bos(tmp_path: Path) -> None:
    prompts = build(write_sentiment(tmp_path), num_demonstrations=0, permutation=1)
    assert (prompts.context, prompts.finetuning, prompts.context_rows) == ((0,), (), ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_demonstrations": 13}, "13 demonstrations asked for, but the train split of sample has 12 rows; lower"),
        ({"num_demonstrations": -1}, "num_demonstrations=-1: must be at least 0"),
        ({"limit": 0}, "limit=0: must be at least 1"),
        ({"max_validation": 0}, "max_validation=0: must be at least 1"),
        ({"seed": -1}, "^seed=-1: must be at least 0"),
        ({"switch_seed": -1}, "switch_seed=-1: must be at least 0"),
        ({"switch_labels": "some"}, "switch_labels=some: choose from none"),
        ({"switch_labels": "both", "switch_fraction": 2.0}, "switch_fraction=2.0: must be at most 1"),
        ({"permutation": 1000}, "permutation=1000: must be at most 999"),
        ({"max_positions": 4}, r"sample_valid.jsonl:\d+: 5 tokens with its label, but the model has 4 positions"),
    ],
)
def test_impossible_request_is_one_clear_line(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build(write_sentiment(tmp_path), **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "encode", "message"),
    [
        (["good", "good bye"], encode_words, "'good bye' has tokens .* begin with those of 'good'"),
        (["Pos", "Positive"], encode_bytes, "'Positive' has tokens .* begin with those of 'Pos'"),
        (["one", "two"], lambda line: [4 for _ in line.split()], "cannot be told apart"),
        (["one", "two"], lambda line: [3 for _ in line.split()], "'one' is unknown to the dictionary.*tokenizer .bpe."),
        (["one", "two"], lambda line: [5] * ("two" not in line), "label word 'two' has no tokens"),
    ],
)
def test_label_words_must_be_told_apart_by_their_tokens(
    tmp_path: Path, words: list[str], encode: Any, message: str
) -> None:
    write_sentiment(tmp_path)
    with pytest.raises(UserError, match=message):
        build(tmp_path, spec_of(SENTIMENT, label_words=words), encode=encode)


def test_thousands_of_label_words_are_told_apart() -> None:
    words = [f"word{number}" for number in range(5000)]
    RowEncoder(spec_of(SENTIMENT, label_words=words), Writing(encode_words))
    with pytest.raises(UserError, match=r"'word77 x' has tokens .* begin with those of 'word77' "):
        RowEncoder(spec_of(SENTIMENT, label_words=[*words, "word77 x"]), Writing(encode_words))


def test_empty_input_is_reported_with_its_row(tmp_path: Path) -> None:
    write_sentiment(tmp_path)
    write_jsonl(tmp_path / "sample_valid.jsonl", [{"text": "\n", "label": 0}])
    with pytest.raises(UserError, match=r"sample_valid.jsonl:1: the input is empty"):
        build(tmp_path, spec_of(SENTIMENT, template="{text}"))


def test_empty_option_is_reported_with_its_row(tmp_path: Path) -> None:
    choices = {"text": ["red", " "], "label": ["A", "B"]}
    for split in ("train", "valid"):
        write_jsonl(
            tmp_path / f"{split}.jsonl",
            [{"question": "?", "choices": choices, "answer": "A"}] * (6 if split == "train" else 1),
        )
    with pytest.raises(UserError, match=r"valid.jsonl:1: option 1 has no tokens"):
        build(tmp_path, spec_of(CHOICE), encode=encode_bytes)
