"""The demo corpus' vocabulary: groups of words, label words, template words. Written for this package.

A group is a set of words that behave alike: a classification task asks which group the telling word of a sentence comes
from. Groups of one family can stand in the same sentences. The order matters: training starts with the first groups
of each family and the first words of each group, and widens from there.
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FAMILIES: dict[str, dict[str, str]] = {
    "topic": {
        "sport": "goal coach team match league striker referee stadium tennis race medal trophy",
        "money": "bank market price profit loan tax wage stock budget investor merger debt",
        "computing": "computer software laptop server keyboard browser code network robot chip data screen",
        "politics": "president minister election parliament senator vote treaty mayor embassy campaign envoy governor",
        "animals": "dog cat horse rabbit tiger lion goat sheep wolf fox bear mouse",
        "food": "bread cheese soup apple rice pasta butter cake salad honey onion pepper",
        "music": "guitar piano violin drum melody singer chorus orchestra concert album rhythm flute",
        "weather": "rain snow storm wind cloud thunder frost fog sunshine hail breeze drought",
        "space": "planet rocket comet orbit telescope galaxy moon satellite astronaut meteor crater gravity",
        "health": "doctor nurse hospital fever vaccine medicine surgeon clinic patient cough pill virus",
        "travel": "airport hotel passport luggage ticket tourist flight cruise suitcase hostel tour visa",
        "school": "teacher pupil lesson exam homework classroom college essay textbook lecture diploma student",
        "clothes": "shirt coat hat scarf glove shoe dress sock jacket belt skirt sweater",
        "tools": "hammer saw drill nail wrench shovel ladder screw pliers axe chisel bolt",
        "plants": "rose tulip oak fern moss daisy cactus ivy lily willow pine orchid",
        "sea": "whale shark coral tide wave anchor sailor harbour dolphin reef crab island",
        "law": "judge court lawyer jury verdict trial prison witness crime police arrest sentence",
        "kitchen": "spoon fork plate oven kettle pan bowl cup stove fridge napkin mug",
        "farm": "tractor barn wheat harvest field plough hay corn fence orchard cattle farmer",
        "art": "painting canvas sculpture gallery portrait brush sketch statue museum easel palette fresco",
    },
    "quality": {
        "positive": "wonderful superb delightful brilliant charming great lovely splendid amazing fine perfect nice",
        "negative": "terrible awful dreadful boring horrible dull poor nasty ugly disappointing weak miserable",
        "large": "huge giant enormous vast massive tall wide broad immense towering bulky big",
        "small": "tiny little narrow slim short compact miniature thin slight petite minor wee",
        "hot": "warm scorching boiling burning roasting sizzling blazing tropical steaming toasty sunny fiery",
        "cold": "chilly icy freezing frosty frozen snowy wintry arctic cool polar shivering glacial",
    },
    "stance": {
        "subjective": "think feel believe suppose hope guess imagine doubt wish prefer fancy admire",
        "objective": "measured recorded opened counted weighed built founded located printed numbered dated registered",
    },
    "relation": {
        "affirmed": "indeed certainly surely clearly truly definitely really always",
        "denied": "never not hardly scarcely barely rarely seldom nowhere",
        "open": "perhaps maybe possibly probably supposedly allegedly apparently presumably",
    },
}

GROUPS: dict[str, tuple[str, ...]] = {
    name: _words(words) for family in FAMILIES.values() for name, words in family.items()
}
"""Group name -> its words."""

LABEL_WORDS: tuple[str, ...] = _words(
    """copper velvet amber cobalt alpha beta gamma delta left right north south marble ivory crimson indigo red green
    blue yellow one two three four sigma omega east west up down high low odd even first last silver bronze scarlet
    olive true false yes no five six seven eight"""
)
"""Arbitrary label words: any of them may stand for any group, so only the demonstrations tell which does."""

NUM_COMMON = 12
"""The first so many label words are drawn more often than the others."""

SUBJECTS: tuple[str, ...] = _words("film book room song story house place letter plan idea game garden")
PERSONS: tuple[str, ...] = _words("anna peter maria david laura simon clara james helen oscar")
VERBS: tuple[str, ...] = _words("likes owns sees knows keeps needs paints visits")

PREFIXES: tuple[str, ...] = _words("Review Sentence Input Text Article Item Case Line Note Passage")
SUFFIXES: tuple[str, ...] = _words("Sentiment Label Type Answer Class Topic Kind Group Mark Result")
BRIDGES: tuple[str, ...] = _words("Question Claim Then Statement Hypothesis")
"""What stands before a text, before its label, and between the two sentences of a pair."""

SEPARATORS: tuple[str, ...] = (":", "=", "->", "is", "means", "|")
"""What stands between a bare word and its label in the simplest formats."""
