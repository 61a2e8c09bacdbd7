"""The dataset catalogue: one YAML file per dataset, read into a checked `DatasetSpec`, which renders rows as texts.

docs/adding_a_dataset.md describes the keys. Everything a user can get wrong in a YAML file is found here, before any
data are read, and reported with the file's name.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fairseq_icl.errors import UserError
from fairseq_icl.files import read_yaml
from fairseq_icl.typed import Typed, validated

if TYPE_CHECKING:
    from fairseq_icl.prompts.readers import Row

FOLDER = Path(__file__).parent / "datasets"
PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}", re.ASCII)
Split = Literal["train", "valid"]
HUB_SPLITS: dict[Split, str] = {"train": "train", "valid": "validation"}


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(x, str) and x.strip() for x in value):
        raise ValueError("must be a list of texts (quote words such as Yes, No, True and numbers)")
    if any("\ud800" <= character <= "\udfff" for text in value for character in text):
        raise ValueError("holds half a character; write it as it is, not as \\ud83d\\ude00")
    return tuple(value)


def _hash(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError(f"{str(value)[:80]!r} is not a sha256 of 64 lower-case hexadecimal digits")
    return value


def _file_in_repository(value: str) -> str:
    if Path(value).is_absolute() or ".." in Path(value).parts or not Path(value).suffix:
        raise ValueError(f"{value!r} is not the path of a file in the repository")
    return value


Text = Annotated[str, Field(pattern=r"\S")]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
OneOrMore = Annotated[
    str | tuple[str, ...], BeforeValidator(lambda x: x if isinstance(x, str) and x.strip() else _texts(x))
]
Hash = Annotated[str, BeforeValidator(_hash)]
FileInRepository = Annotated[Text, AfterValidator(_file_in_repository)]


class Options(Typed):
    """Options that every row brings itself."""

    source: OneOrMore = Field(alias="from")  # one field holding a list, or one field an option; () if rows have none
    label: str = "{option}"  # the text to be scored for an option
    names: str = ""  # the field with the options' names (A, B, C...) that the gold label refers to


class Hub(Typed):
    """Where the Hugging Face hub has the files."""

    repo: Text
    revision: Text
    files: dict[Split, FileInRepository]
    sha256: dict[Split, Hash] = Field({})


class KnownRows(Typed):
    """The rows of a split that the papers used: how many, and the hash of all, or of single ones by their number."""

    count: Annotated[int, Field(ge=1)]
    sha256: Hash | None = None
    single: dict[Annotated[int, Field(ge=0)], Hash] = Field({})


class DatasetSpec(Typed):
    """What a dataset's YAML file says: where texts and labels stand in a row, and how a row becomes a prompt."""

    name: str
    version: Annotated[int, Field(ge=1)]  # raised whenever the template or the labels change
    source: Text
    fields: Texts  # text fields that every row must have
    template: Text  # the input text, with `{field}` for a field's text and `{option}` for the option's text
    label: str = "label"  # the field that holds the gold label
    label_words: Texts = ()  # one word a class; empty where every row brings its own options
    label_names: Texts = ()  # the classes' names as the data files may spell them; a file may always use 0..C-1 as well
    options: Options = Options.model_construct(source=())
    cut: dict[str, Text] = Field({})  # {"sentence": "_"} cuts it at the mark into sentence_before and sentence_after
    splits: Annotated[dict[Split, Text], AfterValidator(lambda given: HUB_SPLITS | given)] = Field(HUB_SPLITS)
    """The names that the Hugging Face version gives to our splits `train` and `valid`."""
    hub: Hub | None = None
    rows: dict[Split, KnownRows] = Field({})
    papers: dict[str, dict[str, Any]] = Field({})  # published settings: k, seeds, learning_rate; six datasets have some
    note: str = ""

    @property
    def has_classes(self) -> bool:
        """Whether all rows share the same label words (classification), not options of their own."""
        return bool(self.label_words)

    @property
    def columns(self) -> tuple[str, ...]:
        """The top-level fields that have to be read, in a fixed order and each once."""
        source = self.options.source
        paths = (*self.fields, *((source,) if isinstance(source, str) else source), self.options.names, self.label)
        return tuple(dict.fromkeys(path.split(".")[0] for path in paths if path))

    @property
    def fingerprint(self) -> str:
        """Hash of all that decides what prompts look like; published settings and notes are not part of it."""
        described = self.model_dump(exclude={"hub", "rows", "papers", "note", "source", "options"})
        described |= {f"options_{key}": value for key, value in self.options.model_dump(by_alias=True).items()}
        return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()

    @model_validator(mode="after")
    def _fits_together(self) -> "DatasetSpec":
        source = self.options.source
        if self.hub and len(self.hub.files) < len(HUB_SPLITS):
            raise ValueError("hub: files must name the file of train and that of valid")
        for split, known_rows in self.rows.items():
            if any(row >= known_rows.count for row in known_rows.single):
                raise ValueError(
                    f"rows.{split}: single must be a mapping from numbers of rows (from 0) to their sha256"
                )
        for file_name in (self.name, *self.splits.values()):
            if re.search(r"[/\\\x00]|^[.=+@-]", file_name):
                raise ValueError(f"{file_name!r} is part of file names and tables: no / or \\, none of . = + - @ first")
        if self.has_classes == bool(source):
            raise ValueError("give either label_words (the same for all rows) or options (of each row)")
        if self.has_classes and len(self.label_words) < 2:
            raise ValueError("label_words must hold at least two words")
        if isinstance(source, tuple) and len(source) == 1:
            raise ValueError("options.from must name a list field, or at least two fields")
        if self.label_names and isinstance(source, str) and source:
            raise ValueError("label_names needs a fixed number of options; with a list field use options.names")
        number = len(self.label_words) or len(source)
        if self.label_names and len(self.label_names) != number:
            raise ValueError(f"label_names has {len(self.label_names)} entries for {number} labels")
        for words in (self.label_words, self.label_names):
            if twice := [word for word in words if words.count(word) > 1]:
                raise ValueError(f"label {twice[0]!r} stands twice in label_words or label_names")
        if unknown := set(self.cut) - set(self.fields):
            raise ValueError(f"cut.{min(unknown)}: not among fields")
        known = {*self.fields, *(f"{name}_{part}" for name in self.cut for part in ("before", "after"))}
        known |= {"option"} if source else set()
        for key, template in (("template", self.template), ("options.label", self.options.label)):
            allowed = known | {"option"} if key == "options.label" else known
            for placeholder in PLACEHOLDER.findall(template):
                if placeholder not in allowed:
                    raise ValueError(
                        f"{key} uses {{{placeholder}}}, which is not among fields ({', '.join(sorted(allowed))})"
                    )
            if stray := re.search(r"[{}]", PLACEHOLDER.sub("", template)):
                raise ValueError(f"{key} has a {stray[0]} that belongs to no {{field}}; write {{name}} without spaces")
        if not PLACEHOLDER.search(self.template):
            raise ValueError(f"template names no field, so all inputs would be alike; use {{{self.fields[0]}}}")
        return self

    def render(self, row: "Row") -> tuple[tuple[str, str], ...]:
        """(input text, label text) of every option of a row; a label follows exactly one space, as the authors do."""
        options = ({**row.texts, "option": option} for option in row.options)
        return tuple((fill(self.template, of), " " + fill(self.options.label, of).strip()) for of in options)


def fill(template: str, values: Mapping[str, str]) -> str:
    """The template with every `{name}` replaced by its value, once: braces inside a value stay as they are."""
    return PLACEHOLDER.sub(lambda found: values[found[1]], template)


@cache
def folders() -> tuple[Path, ...]:
    """Folders of the catalogue: the package's own, then those that installed packages name by entry points."""
    return (FOLDER, *(Path(point.load()) for point in entry_points(group="fairseq_icl.datasets")))


def dataset_names(beside: str | Path | None = None) -> list[str]:
    """Names of the catalogue's datasets, and of those whose YAML lies in a folder of data, in alphabetical order."""
    places = (*folders(), *([] if beside is None else [Path(beside)]))
    return sorted({path.stem for folder in places for path in folder.glob("*.yaml")})


def source_of(name: str, folder: str | Path) -> str:
    """What `load_spec` is to be given: the YAML beside the data (FOLDER/NAME.yaml) if there is one, else the name."""
    beside = Path(folder) / f"{name}.yaml"
    return str(beside) if beside.is_file() else name


def find_spec(name: str, folder: str | Path) -> DatasetSpec:
    """A dataset whose YAML lies beside its data (FOLDER/NAME.yaml), else one of the catalogue or a path."""
    return load_spec(source_of(name, folder))


def load_spec(name_or_path: str) -> DatasetSpec:
    """The specification of a dataset of the catalogue, or of the user's own YAML file."""
    names = dataset_names()
    if name_or_path in names:
        path = next(path for folder in folders() if (path := folder / f"{name_or_path}.yaml").is_file())
        return parse_spec(read_yaml(path), str(path), name_or_path)
    if not name_or_path.endswith((".yaml", ".yml")):
        close = difflib.get_close_matches(name_or_path.lower(), names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"the catalogue has {', '.join(names)};"
        raise UserError(f"dataset {name_or_path}: unknown; {hint} A dataset of your own is a path to a .yaml")
    spec = parse_spec(read_yaml(name_or_path), name_or_path, Path(name_or_path).stem)
    if spec.name in names and spec.fingerprint != load_spec(spec.name).fingerprint:
        raise UserError(f"{name_or_path}: {spec.name} is another dataset's name in the catalogue; choose another name")
    return spec


def parse_spec(data: Any, place: str, name: str) -> DatasetSpec:
    """The checked specification in a YAML file's data; `place` is named in errors, `name` is the default name."""
    data = {"name": name} | data if isinstance(data, dict) else data
    return validated(DatasetSpec, data, place, "see docs/adding_a_dataset.md")
