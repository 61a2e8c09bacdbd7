"""Pretraining episodes: reproducible, and never a sight of the held-out tasks."""

import re
from collections import Counter
from random import Random

import pytest

from examples.demo_model.episodes import (
    FORMATS,
    HELD_OUT,
    HELD_OUT_TEMPLATES,
    Level,
    draw_episode,
    draw_labels,
    draw_template,
    fill,
)
from examples.demo_model.grammar import FAMILY_OF, is_held_out, sentence
from examples.demo_model.words import BRIDGES, FAMILIES, GROUPS, LABEL_WORDS, NUM_COMMON, PERSONS, SUBJECTS, VERBS

WIDEST = Level(Level.LAST)


@pytest.mark.parametrize("format_name", FORMATS)
def test_episodes_follow_from_the_seed(format_name):
    assert draw_episode(Random(3), WIDEST, 20, format_name) == draw_episode(Random(3), WIDEST, 20, format_name)
    assert draw_episode(Random(3), WIDEST, 20, format_name) != draw_episode(Random(4), WIDEST, 20, format_name)


@pytest.mark.parametrize("number", range(Level.LAST + 1))
@pytest.mark.parametrize("format_name", FORMATS)
def test_every_level_draws_every_format(number, format_name):
    episode = draw_episode(Random(number), Level(number), 12, format_name)
    assert len(episode.inputs) == len(episode.labels) == len(episode.classes) == 12
    assert set(episode.labels) <= set(GROUPS if episode.natural else LABEL_WORDS)
    assert all(Level(number).format_weights)


def test_a_class_keeps_its_label_word_through_an_episode():
    for seed in range(50):
        episode = draw_episode(Random(seed), WIDEST, 30, "template")
        pairs = set(zip(episode.classes, episode.labels, strict=True))
        assert len(pairs) == len({cls for cls, _ in pairs}) == len({label for _, label in pairs})


def test_no_two_classes_of_a_held_out_mapping_are_ever_drawn_together():
    rng = Random(0)
    task = HELD_OUT["demo_topic"]
    draws = [set(zip(task.groups, draw_labels(rng, list(task.groups), LABEL_WORDS), strict=True)) for _ in range(5000)]
    assert max(len(draw & task.mapping) for draw in draws) == 1
    assert set.union(*draws) == {(group, word) for group in task.groups for word in LABEL_WORDS}


def test_common_label_words_are_drawn_five_times_as_often():
    rng = Random(0)
    counts = Counter(word for _ in range(5000) for word in draw_labels(rng, ["food", "music"], LABEL_WORDS))
    common = sum(counts[word] for word in LABEL_WORDS[:NUM_COMMON]) / NUM_COMMON
    others = sum(counts[word] for word in LABEL_WORDS[NUM_COMMON:]) / (len(LABEL_WORDS) - NUM_COMMON)
    assert 4 < common / others < 5.5


def test_held_out_tasks_have_one_common_label_word_each():
    for task in HELD_OUT.values():
        assert len(set(task.label_words) & set(LABEL_WORDS[:NUM_COMMON])) == 1


def test_held_out_templates_are_never_drawn_but_their_words_are():
    rng = Random(0)
    drawn = {draw_template(rng, family, True, 12) for family in FAMILIES for _ in range(2000)}
    assert drawn.isdisjoint(HELD_OUT_TEMPLATES)
    assert {"Review:", "Sentiment:", "Input:", "Type:", "Article:", "Answer:"} <= {
        word for template in drawn for word in template.split()
    }


def test_held_out_sentences_are_never_drawn():
    for seed in range(200):
        for text in draw_episode(Random(seed), WIDEST, 10, "sentence").inputs:
            sentences = text.rsplit(" ", 1)[0]  # without the mark before the label
            assert not is_held_out(re.sub(rf" ({'|'.join(BRIDGES)}): ", " | ", sentences))


def test_about_a_tenth_of_the_sentences_is_held_out():
    rng = Random(0)
    texts = [sentence(rng, group) for group in GROUPS for _ in range(200)]
    assert 0.08 < sum(map(is_held_out, texts)) / len(texts) < 0.12


def test_no_word_plays_two_parts():
    words = [word for group in GROUPS.values() for word in group] + [*GROUPS, *LABEL_WORDS, *PERSONS, *SUBJECTS, *VERBS]
    assert len(words) == len(set(words))


def test_sentences_hold_a_word_of_their_group():
    rng = Random(1)
    for group, words in GROUPS.items():
        for _ in range(20):
            assert set(sentence(rng, group).split()) & set(words)


def test_held_out_tasks_use_groups_of_one_family_and_different_label_words():
    for task in HELD_OUT.values():
        assert len({FAMILY_OF[group] for group in task.groups}) == 1
        assert len(set(task.label_words)) == len(task.groups)


def test_templates_take_one_text_or_a_pair():
    assert fill("Input: {text} Type:", "the film was dull") == "Input: the film was dull Type:"
    assert fill("{premise} Question: {hypothesis} Answer:", "a | b") == "a Question: b Answer:"
