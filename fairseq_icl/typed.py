"""Files and configurations with a declared form: pydantic checks them, and a mistake is one line for the user."""

import json
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from fairseq_icl.errors import UserError
from fairseq_icl.files import reason_of
from fairseq_icl.settings import nearest, shown

WORDS = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "list_type": "must be a list",
    "string_type": "must be a text",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "missing": "is missing",
    "string_pattern_mismatch": "must be a text that is not empty",
}
"""What we say for pydantic's kinds of errors; the others in pydantic's own words."""


class Typed(BaseModel):
    """A mapping of a file or a configuration: unknown keys are refused, texts are not taken for numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Kind = TypeVar("Kind", bound=BaseModel)


def validated(kind: type[Kind], content: Any, place: str = "", remedy: str = "") -> Kind:
    """`content` as a `kind`; a UserError names place, key, what is wrong and the remedy."""
    try:
        return kind.model_validate(content)
    except (ValidationError, RecursionError) as error:
        raise UserError(": ".join(filter(None, (place, _told(kind, error)))) + (remedy and f"; {remedy}")) from error


def _told(kind: type[BaseModel], error: ValidationError | RecursionError) -> str:
    """The first of pydantic's complaints in our words."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    errors = error.errors(include_url=False)
    first = min(errors, key=lambda one: one["type"] != "extra_forbidden")  # a misspelt key is not a missing one
    where = [str(part) for part in first["loc"] if str(part).isidentifier() or isinstance(part, int)]
    key = ".".join(where)
    if first["type"] == "extra_forbidden":
        known, unknown = _fields(kind, where[:-1]), first["loc"][-1]
        return f"{key or shown(unknown)}: unknown key" + (f"; {nearest(unknown, known)}" if known else "")
    if first["type"] == "missing":
        return f"{key}: is missing"
    if first["type"] == "value_error":  # of a check of our own
        return f"{key}: {first['ctx']['error']}" if key else str(first["ctx"]["error"])
    complaint = WORDS.get(first["type"]) or first["msg"][0].lower() + first["msg"][1:]
    return f"{key}={shown(first['input'])}: {complaint}" if key else complaint


def _fields(kind: Any, path: list[str]) -> list[str]:
    """The keys that the mapping at `path` may have."""
    for part in path:
        field = getattr(kind, "model_fields", {}).get(part)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))  # itself, or of X | None
        kind = next((one for one in kinds if hasattr(one, "model_fields")), None)
    return [field.alias or name for name, field in getattr(kind, "model_fields", {}).items()]


def read_json(path: Path, remedy: str = "") -> Any:
    """The content of a JSON file; a UserError if it cannot be read."""
    try:
        if not path.is_file() and path.exists():  # a pipe or a device would never end
            raise OSError("not a file")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problem = f"{path}: damaged, or not JSON ({reason_of(error)})"
        raise UserError(problem + (remedy and f"; {remedy}")) from error


def read_typed(kind: type[Kind], path: Path, remedy: str = "") -> Kind:
    """A JSON file of the declared form."""
    return validated(kind, read_json(path, remedy), f"{path}: damaged", remedy)
