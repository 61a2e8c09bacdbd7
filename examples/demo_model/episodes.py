"""Pretraining episodes: one classification task shown as a row of demonstrations with labels that only they define.

An episode draws a format, a few word groups, a label word for each group and a template, and then demonstrations.
`Level` says how wide the draw is; formats are mixed at every level, since a change of format unlearns the skill.
"""

from dataclasses import dataclass
from random import Random

from examples.demo_model.grammar import FAMILY_OF, is_held_out, sentence
from examples.demo_model.words import BRIDGES, FAMILIES, GROUPS, LABEL_WORDS, NUM_COMMON, PREFIXES, SEPARATORS, SUFFIXES


@dataclass(frozen=True)
class HeldOutTask:
    """A dataset's task: groups, the label words that stand for them, and a template; pretraining never shows these."""

    groups: tuple[str, ...]
    label_words: tuple[str, ...]
    template: str
    """With {text}, or with {premise} and {hypothesis}."""

    @property
    def mapping(self) -> set[tuple[str, str]]:
        return set(zip(self.groups, self.label_words, strict=True))


HELD_OUT: dict[str, HeldOutTask] = {
    "demo_sentiment": HeldOutTask(("negative", "positive"), ("marble", "copper"), "Review: {text} Sentiment:"),
    "demo_subjectivity": HeldOutTask(("objective", "subjective"), ("left", "ivory"), "Input: {text} Type:"),
    "demo_topic": HeldOutTask(
        ("politics", "sport", "money", "computing"), ("gamma", "silver", "olive", "crimson"), "Article: {text} Answer:"
    ),
    "demo_pairs": HeldOutTask(
        ("affirmed", "denied", "open"), ("sigma", "alpha", "omega"), "{premise} Question: {hypothesis} Answer:"
    ),
}
"""Each has exactly one common label word: without demonstrations it is likeliest for every input, which is chance."""

HELD_OUT_TEMPLATES = {task.template for task in HELD_OUT.values()}

COMMON_WEIGHT = 5
"""How much oftener a common label word is drawn than another. As in real language models, some labels are likelier."""

NATURAL_SHARE = 0.25
"""Share of the episodes whose labels are the groups' names: they teach what words mean, which fine-tuning needs."""

FORMATS = ("bare", "separator", "sentence", "template")


@dataclass(frozen=True)
class Level:
    """How wide episodes are drawn: 0 is the narrowest, `Level.LAST` has every group, word, frame and label word."""

    number: int
    LAST = 6

    def _grow(self, first: int, last: int) -> int:
        return first + round((last - first) * self.number / self.LAST)

    @property
    def num_words(self) -> int:
        return self._grow(3, 12)

    @property
    def num_frames(self) -> int:
        return self._grow(2, 8)

    @property
    def num_label_words(self) -> int:
        return self._grow(12, len(LABEL_WORDS))

    @property
    def num_fillers(self) -> int:
        """Of each list of filler and template words."""
        return self._grow(3, 12)

    @property
    def num_classes(self) -> int:
        """Most classes of an episode of sentences; bare words have up to eight from the start."""
        return self._grow(3, 5)

    @property
    def format_weights(self) -> tuple[int, ...]:
        """Weights of `FORMATS`: all of them from the start, but at first mostly bare pairs, which teach copying."""
        if self.number == 0:
            return 24, 8, 4, 4
        return self._grow(10, 4), self._grow(6, 4), self._grow(12, 14), self._grow(12, 18)

    @property
    def watched_formats(self) -> tuple[str, ...]:
        """The formats that must be read well before the next level."""
        return FORMATS[:2] if self.number == 0 else FORMATS[2:]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths in tokens that rows are drawn from; longer rows hold more demonstrations."""
        return ((64,), (64, 128), (128,), (128, 192))[min(self.number, 3)] + (256, 384, 576)[: max(0, self.number - 3)]

    def groups(self, family: str) -> list[str]:
        names = list(FAMILIES[family])
        return names[: max(2, self._grow(4 if family == "topic" else 2, len(names)))]


@dataclass(frozen=True)
class Episode:
    """Demonstrations of one task: input and label strings, and the class of each."""

    inputs: list[str]
    labels: list[str]
    classes: list[int]
    natural: bool = False
    """Whether the label words are the groups' own names, which can be known without demonstrations."""


def draw_episode(rng: Random, level: Level, num_demonstrations: int, format_name: str) -> Episode:
    """An episode of the given format; any number of demonstrations, classes in random proportions."""
    if format_name in ("bare", "separator"):
        choice = [group for family in FAMILIES for group in level.groups(family)]
        groups = rng.sample(choice, rng.randint(2, 8))
        template = "{text}" if format_name == "bare" else "{text} " + rng.choice(SEPARATORS)

        def draw(group: str) -> str:
            return rng.choice(GROUPS[group][: level.num_words])
    else:
        choice = level.groups(rng.choice(list(FAMILIES)))
        groups = rng.sample(choice, rng.randint(2, min(len(choice), level.num_classes)))
        template = draw_template(rng, FAMILY_OF[groups[0]], format_name == "template", level.num_fillers)

        def draw(group: str) -> str:
            while is_held_out(text := sentence(rng, group, level.num_words, level.num_frames, level.num_fillers)):
                pass
            return text

    natural = rng.random() < NATURAL_SHARE
    labels = groups if natural else draw_labels(rng, groups, LABEL_WORDS[: level.num_label_words])
    classes = [rng.randrange(len(groups)) for _ in range(num_demonstrations)]
    inputs = [fill(template, draw(groups[c])) for c in classes]
    return Episode(inputs, [labels[c] for c in classes], classes, natural)


def draw_labels(rng: Random, groups: list[str], words: tuple[str, ...]) -> list[str]:
    """Different label words for the groups; never a held-out task's mapping, nor any two classes of it together."""
    weights = [COMMON_WEIGHT if index < NUM_COMMON else 1 for index in range(len(words))]
    while True:
        labels: list[str] = []
        while len(labels) < len(groups):
            word = rng.choices(words, weights)[0]
            labels += [word] if word not in labels else []
        pairs = set(zip(groups, labels, strict=True))
        if all(len(pairs & task.mapping) < 2 for task in HELD_OUT.values()):
            return labels


def draw_template(rng: Random, family: str, named: bool, num_words: int) -> str:
    """A template of the family, never a held-out one; without names only a mark stands before the label."""
    while True:
        end = f"{rng.choice(SUFFIXES[:num_words])}:" if named else rng.choice((":", "->", "="))
        if family == "relation":
            template = f"{{premise}} {rng.choice(BRIDGES[:num_words])}: {{hypothesis}} {end}"
        else:
            template = f"{rng.choice(PREFIXES[:num_words])}: {{text}} {end}" if named else f"{{text}} {end}"
        if template not in HELD_OUT_TEMPLATES:
            return template


def fill(template: str, text: str) -> str:
    """The template with a sentence, or with the two halves of "premise | hypothesis"."""
    premise, _, hypothesis = text.partition(" | ")
    return template.format(text=text, premise=premise, hypothesis=hypothesis)
