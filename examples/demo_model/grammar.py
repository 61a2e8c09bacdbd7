"""Sentences of the demo corpus: a group's telling word among filler, in frames shared by all groups of its family."""

from random import Random
from zlib import crc32

from examples.demo_model.words import FAMILIES, GROUPS, PERSONS, SUBJECTS, VERBS

FAMILY_OF: dict[str, str] = {group: family for family, groups in FAMILIES.items() for group in groups}

FRAMES: dict[str, tuple[str, ...]] = {
    "topic": (
        "the {w} and the {v}",
        "we saw the {w} here",
        "{p} told us about the {w}",
        "this {s} is about the {w}",
        "there was some {w} and some {v} in the {s}",
        "{p} asked for the {w} with the {v}",
        "the {w} came up in the {s} again",
        "nobody had seen the {w} or the {v} today",
    ),
    "quality": (
        "the {s} was {w}",
        "this {w} and {v} {s}",
        "{p} found the {s} {w}",
        "it is the {w} {s} of {p}",
        "the {s} of {p} looked {w} and {v}",
        "how {w} the {s} is and how {v}",
        "the {w} {s} we had today",
        "this {s} seemed {w} to all of us",
    ),
    "relation": (
        "{a} | {p} {w} {b} the {s}",
        "{a} | {w} {p} {b} the {s}",
        "{a} | {p} {b} the {s} {w}",
    ),
    "subjective": (
        "i {w} the {s} is for {p}",
        "we {w} this is the {s}",
        "{p} and i {w} it so",
        "i {w} that {p} had the {s}",
    ),
    "objective": (
        "the {s} was {w} here",
        "{p} says it was {w} in the {s}",
        "the {s} {w} by {p} today",
        "this {s} of {p} was {w} again",
    ),
}
"""Frames by family (or by group where the groups differ in build). {w} {v}: words of the group; the rest is filler."""


def sentence(rng: Random, group: str, num_words: int = 12, num_frames: int = 8, num_fillers: int = 12) -> str:
    """One sentence of a group, from its first `num_words` words, `num_frames` frames and so on; by default from all.

    Pairs of sentences (family "relation") come as "premise | hypothesis".
    """
    word, other = rng.sample(GROUPS[group][:num_words], 2)
    frames = FRAMES[group if group in FRAMES else FAMILY_OF[group]][:num_frames]
    person, subject, verb = (rng.choice(filler[:num_fillers]) for filler in (PERSONS, SUBJECTS, VERBS))
    return rng.choice(frames).format(w=word, v=other, p=person, s=subject, b=verb, a=f"{person} {verb} the {subject}")


def is_held_out(text: str) -> bool:
    """Whether a sentence belongs to the tenth that pretraining never shows: word combinations kept for the datasets."""
    return crc32(text.encode()) % 10 == 0
