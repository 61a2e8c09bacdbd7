"""The dataset catalogue: one YAML file per dataset, read into a checked `DatasetSpec`, which renders rows as texts.

docs/adding_a_dataset.md describes the keys. Everything a user can get wrong in a YAML file is found here, before any
data are read, and reported with the file's name.
"""

import difflib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fairseq_icl.errors import UserError
from fairseq_icl.files import read_yaml
from fairseq_icl.settings import nearest

if TYPE_CHECKING:
    from fairseq_icl.prompts.readers import Row

ENTRY_POINT_GROUP = "fairseq_icl.datasets"
FOLDER = Path(__file__).parent / "datasets"
PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}", re.ASCII)
KEYS: tuple[str, ...] = (
    "name",
    "version",
    "source",
    "fields",
    "cut",
    "template",
    "label",
    "label_words",
    "label_names",
    "options",
)
KEYS += ("splits", "hub", "rows", "papers", "note")
HUB_KEYS = ("repo", "revision", "files", "sha256")
ROW_KEYS = ("count", "sha256", "single")
NOT_OF_PROMPTS = ("hub", "rows", "papers", "note", "source")
"""Keys that do not decide what prompts look like."""
SHA256 = re.compile(r"[0-9a-f]{64}")
OPTION_KEYS = ("from", "label", "names")


@dataclass(frozen=True)
class DatasetSpec:
    """What a dataset's YAML file says: where texts and labels stand in a row, and how a row becomes a prompt."""

    name: str
    version: int
    source: str
    fields: tuple[str, ...]
    """Text fields that every row must have."""
    template: str
    """The input text, with `{field}` for a field's text and `{option}` for the option's text."""
    label: str
    """The field that holds the gold label."""
    label_words: tuple[str, ...] = ()
    """One word a class; empty where every row brings its own options."""
    label_names: tuple[str, ...] = ()
    """The classes' names as the data files may spell them; a file may always use 0..C-1 as well."""
    options_from: str | tuple[str, ...] = ()
    """Where a row's own options stand: one field holding a list, or one field an option."""
    options_label: str = "{option}"
    """The text to be scored for an option."""
    options_names: str = ""
    """The field with the options' names (A, B, C...) that the gold label refers to."""
    cut: Mapping[str, str] = field(default_factory=dict)
    """Fields cut in two at a mark: {"sentence": "_"} makes sentence_before and sentence_after."""
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "valid": "validation"})
    """The names that the Hugging Face version gives to our splits `train` and `valid`."""
    hub: Mapping[str, Any] = field(default_factory=dict)
    """Where the Hugging Face hub has the files: repo, revision, files and, where known, sha256 by split."""
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The rows that the papers used, by split: count and, where known, sha256 (see `rows`) or that of single ones."""
    papers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Published settings a paper: k, seeds, learning_rate; empty beyond the papers' six datasets."""
    note: str = ""

    @property
    def has_classes(self) -> bool:
        """Whether all rows share the same label words (classification), not options of their own."""
        return bool(self.label_words)

    @property
    def columns(self) -> tuple[str, ...]:
        """The top-level fields that have to be read, in a fixed order and each once."""
        options = (self.options_from,) if isinstance(self.options_from, str) else self.options_from
        paths = (*self.fields, *options, self.options_names, self.label)
        return tuple(dict.fromkeys(path.split(".")[0] for path in paths if path))

    @property
    def fingerprint(self) -> str:
        """Hash of all that decides what prompts look like; published settings and notes are not part of it."""
        described = {name: value for name, value in asdict(self).items() if name not in NOT_OF_PROMPTS}
        return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()

    def render(self, row: "Row") -> tuple[tuple[str, str], ...]:
        """(input text, label text) of every option of a row.

        A label text is a word or an option preceded by exactly one space, as the authors do.
        """
        options = []
        for option in row.options:
            values = {**row.texts, "option": option}
            options.append((fill(self.template, values), " " + fill(self.options_label, values).strip()))
        return tuple(options)


def fill(template: str, values: Mapping[str, str]) -> str:
    """The template with every `{name}` replaced by its value, once: braces inside a value stay as they are."""
    return PLACEHOLDER.sub(lambda found: values[found[1]], template)


@cache
def folders() -> tuple[Path, ...]:
    """Folders of the catalogue: the package's own, then those of installed packages.

    A package offers a folder of YAML files by an entry point of the group `fairseq_icl.datasets` that names a path.
    """
    return (FOLDER, *(Path(point.load()) for point in entry_points(group=ENTRY_POINT_GROUP)))


def dataset_names() -> list[str]:
    """Names of the catalogue's datasets, in alphabetical order."""
    return sorted({path.stem for folder in folders() for path in folder.glob("*.yaml")})


def find_spec(name: str, folder: str | Path) -> DatasetSpec:
    """A dataset whose YAML lies beside its data (FOLDER/NAME.yaml), else one of the catalogue or a path."""
    beside = Path(folder) / f"{name}.yaml"
    return load_spec(str(beside) if beside.is_file() else name)


def load_spec(name_or_path: str) -> DatasetSpec:
    """The specification of a dataset of the catalogue, or of the user's own YAML file."""
    if name_or_path in dataset_names():
        path = next(path for folder in folders() if (path := folder / f"{name_or_path}.yaml").is_file())
    elif name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
    else:
        close = difflib.get_close_matches(name_or_path.lower(), dataset_names(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"the catalogue has {', '.join(dataset_names())};"
        raise UserError(f"dataset {name_or_path}: unknown; {hint} A dataset of your own is a path to a .yaml")
    return parse_spec(read_yaml(path), str(path), path.stem)


def parse_spec(data: Any, place: str, name: str) -> DatasetSpec:
    """The checked specification in a YAML file's data; `place` is named in errors, `name` is the default name."""
    check = _Checker(place)
    check.known_keys(data, KEYS, "")
    options = data.get("options", {})
    if "options" in data:
        check.known_keys(options, OPTION_KEYS, "options.")
    spec = DatasetSpec(
        name=check.text(data, "name", name),
        version=check.version(data),
        source=check.text(data, "source"),
        fields=check.texts(data, "fields"),
        template=check.text(data, "template"),
        label=check.text(data, "label", "label"),
        label_words=check.texts(data, "label_words", ()),
        label_names=check.texts(data, "label_names", ()),
        options_from=check.text_or_texts(options, "from", () if "options" not in data else None),
        options_label=check.text(options, "label", "{option}"),
        options_names=check.text(options, "names", ""),
        cut=check.mapping(data, "cut", str),
        splits={"train": "train", "valid": "validation"} | check.mapping(data, "splits", str),
        hub=_hub(data.get("hub", {}), check),
        rows=_rows(data.get("rows", {}), check),
        papers=check.mapping(data, "papers", dict),
        note=check.text(data, "note", ""),
    )
    _check_together(spec, check)
    return spec


def _hub(data: Any, check: "_Checker") -> dict[str, Any]:
    """The key `hub`, checked; empty where it is left out."""
    if data == {}:
        return {}
    check.known_keys(data, HUB_KEYS, "hub.")
    hub: dict[str, Any] = {key: check.text(data, key) for key in ("repo", "revision")}
    hub["files"], hub["sha256"] = check.mapping(data, "files", str), check.mapping(data, "sha256", str)
    if set(hub["files"]) != {"train", "valid"}:
        check.fail("hub.files must name the file of train and that of valid")
    for path in hub["files"].values():
        if Path(path).is_absolute() or ".." in Path(path).parts or not Path(path).suffix:
            check.fail(f"hub.files: {path!r} is not the path of a file in the repository")
    if unknown := set(hub["sha256"]) - set(hub["files"]):
        check.fail(f"hub.sha256.{min(unknown)}: only train and valid are used")
    check.hashes("hub.sha256", hub["sha256"].values())
    return hub


def _rows(data: Any, check: "_Checker") -> dict[str, dict[str, Any]]:
    """The key `rows`, checked."""
    check.known_keys(data, ("train", "valid"), "rows.")
    for split, known in data.items():
        check.known_keys(known, ROW_KEYS, f"rows.{split}.")
        count, single = known.get("count"), known.get("single", {})
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            check.fail(f"rows.{split}.count must be the number of rows")
        if not isinstance(single, dict) or not all(type(row) is int and 0 <= row < count for row in single):
            check.fail(f"rows.{split}.single must be a mapping from numbers of rows (from 0) to their sha256")
        sums = [known["sha256"]] if "sha256" in known else []
        check.hashes(f"rows.{split}", [*sums, *single.values()])
    return {split: dict(known) for split, known in data.items()}


def _check_together(spec: DatasetSpec, check: "_Checker") -> None:
    """What the keys must fulfil together."""
    for file_name in (spec.name, *spec.splits.values()):
        if re.search(r"[/\\\x00]", file_name):
            check.fail(f"{file_name!r} is part of file names and must not hold / or \\")
    if spec.has_classes == bool(spec.options_from):
        check.fail("give either label_words (the same for all rows) or options (of each row)")
    if spec.has_classes and len(spec.label_words) < 2:
        check.fail("label_words must hold at least two words")
    if isinstance(spec.options_from, tuple) and len(spec.options_from) == 1:
        check.fail("options.from must name a list field, or at least two fields")
    if spec.label_names and isinstance(spec.options_from, str) and spec.options_from:
        check.fail("label_names needs a fixed number of options; with a list field use options.names")
    number = len(spec.label_words) or len(spec.options_from)
    if spec.label_names and len(spec.label_names) != number:
        check.fail(f"label_names has {len(spec.label_names)} entries for {number} labels")
    for words in (spec.label_words, spec.label_names):
        word, number = next(iter(Counter(words).most_common(1)), ("", 0))
        if number > 1:
            check.fail(f"label {word!r} stands twice in label_words or label_names")
    if unknown := set(spec.splits) - {"train", "valid"}:
        check.fail(f"splits.{min(unknown)}: only train and valid are used")
    if unknown := set(spec.cut) - set(spec.fields):
        check.fail(f"cut.{min(unknown)}: not among fields")
    known = {*spec.fields, *(f"{name}_{part}" for name in spec.cut for part in ("before", "after"))}
    known |= {"option"} if spec.options_from else set()
    for key, template in (("template", spec.template), ("options.label", spec.options_label)):
        allowed = known | {"option"} if key == "options.label" else known
        for placeholder in PLACEHOLDER.findall(template):
            if placeholder not in allowed:
                check.fail(f"{key} uses {{{placeholder}}}, which is not among fields ({', '.join(sorted(allowed))})")
        if stray := re.search(r"[{}]", PLACEHOLDER.sub("", template)):
            check.fail(f"{key} has a {stray[0]} that belongs to no {{field}}; write {{name}} without spaces")
    if not PLACEHOLDER.search(spec.template):
        check.fail(f"template names no field, so all inputs would be alike; use {{{spec.fields[0]}}}")


class _Checker:
    """Reads single keys of one YAML file and names file, key and remedy when one is wrong."""

    def __init__(self, place: str) -> None:
        self.place = place

    def fail(self, what: str) -> NoReturn:
        raise UserError(f"{self.place}: {what}; see docs/adding_a_dataset.md")

    def known_keys(self, data: Any, known: tuple[str, ...], prefix: str) -> None:
        if not isinstance(data, dict):
            self.fail(f"{prefix.rstrip('.') or 'the file'} must be a mapping (key: value lines)")
        for key in data:
            if key not in known:
                self.fail(f"unknown key {prefix}{key}; {nearest(str(key), known)}")

    def text(self, data: dict[str, Any], key: str, default: str | None = None) -> str:
        value = data.get(key, default)
        if not isinstance(value, str) or (default is None and not value.strip()):
            self.fail(f"{key} must be a text" + ("" if key in data else " and is missing"))
        return value

    def texts(self, data: dict[str, Any], key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        value = data.get(key, default)
        if default is not None and key not in data:
            return default
        if not isinstance(value, list) or not value or not all(isinstance(x, str) and x.strip() for x in value):
            self.fail(f"{key} must be a list of texts (quote words such as Yes, No, True and numbers)")
        return tuple(value)

    def text_or_texts(self, data: dict[str, Any], key: str, default: tuple[str, ...] | None) -> str | tuple[str, ...]:
        if isinstance(data.get(key), str):
            return self.text(data, key)
        return self.texts(data, key, default)

    def mapping(self, data: dict[str, Any], key: str, kind: type) -> dict[str, Any]:
        value = data.get(key, {})
        if not isinstance(value, dict) or not all(
            isinstance(k, str) and isinstance(v, kind) and v for k, v in value.items()
        ):
            self.fail(f"{key} must be a mapping from names to {'texts' if kind is str else 'mappings'}")
        return value

    def hashes(self, key: str, values: Iterable[Any]) -> None:
        for value in values:
            if not isinstance(value, str) or not SHA256.fullmatch(value):
                self.fail(f"{key}: {str(value)[:80]!r} is not a sha256 of 64 lower-case hexadecimal digits")

    def version(self, data: dict[str, Any]) -> int:
        value = data.get("version")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.fail("version must be a whole number from 1, raised whenever the template or the labels change")
        return value
