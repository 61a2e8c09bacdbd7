"""Files are written whole or not at all; YAML is plain data; the demo is where the package says."""

import hashlib
from pathlib import Path

import pytest

from fairseq_icl import files
from fairseq_icl.errors import UserError
from fairseq_icl.files import read_yaml, sha256_of, write_atomically

BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n"


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "some.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_yaml_is_read_as_plain_data(tmp_path: Path):
    text = "a: [1, 2.5, x, null]\nb: {c: true, d: {c: 'No'}}\n"
    assert read_yaml(yaml_file(tmp_path, text)) == {"a": [1, 2.5, "x", None], "b": {"c": True, "d": {"c": "No"}}}
    assert read_yaml(yaml_file(tmp_path, "")) is None


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "the key 'a' stands twice"),
        ("a:\n  b: 1\n  c: 2\n  b: 1\n", 4, "the key 'b' stands twice"),
        ("- {x: 1}\n- {x: 1, x: 1}\n", 2, "the key 'x' stands twice"),
        (BOMB, 2, r"aliases \(\*name\) are not allowed"),
        ("a: &a [*a]", 1, "aliases"),
        ("a: 1\n<<: *b\n", 2, "aliases"),
        ("a: [1, 2\nb: 3\n", 2, "expected"),
        ("a: !!python/object/apply:os.system ['true']\n", 1, "could not determine a constructor"),
        ("a: 'open\n", 2, "unexpected end of stream"),
        ("? [1, 2]\n: x\n", 1, "unhashable"),
    ],
)
def test_bad_yaml_is_reported_with_file_and_line(tmp_path: Path, text: str, line: int, problem: str):
    path = yaml_file(tmp_path, text)
    with pytest.raises(UserError, match=rf"some\.yaml:{line}: not valid YAML \(.*{problem}"):
        read_yaml(path)


@pytest.mark.parametrize("text", ["[" * 5000, "\x00", "a: 2020-13-45\n", "a: 1" + "0" * 5000 + "\n", "a: 0x\n" * 2])
def test_whatever_trips_the_parser_is_one_line(tmp_path: Path, text: str):
    path = yaml_file(tmp_path, text)
    with pytest.raises(UserError, match=r"some\.yaml.*: not valid YAML"):
        read_yaml(path)


def test_missing_binary_and_huge_files_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"none\.yaml: cannot be read .*; give the path of a YAML file"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(UserError, match=r"bytes\.yaml: cannot be read"):
        read_yaml(tmp_path / "bytes.yaml")
    with pytest.raises(UserError, match="larger than 1 MiB"):
        read_yaml(yaml_file(tmp_path, "#" * (files.MAX_TEXT_BYTES + 1)))


@pytest.mark.parametrize("content", ["text \u00e9", b"bytes", memoryview(b"view")])
def test_text_and_bytes_are_written_whole(tmp_path: Path, content: str | bytes | memoryview):
    path = tmp_path / "new" / "file"
    write_atomically(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else bytes(content))
    assert path.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_writer_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("old")

    def half(unfinished: Path) -> None:
        unfinished.write_text("half")
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        write_atomically(path, half)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("disk\nfull"), OSError("odd")])
def test_a_full_disk_is_one_line(tmp_path: Path, error: Exception):
    def fail(unfinished: Path) -> None:
        raise error

    with pytest.raises(UserError, match=r"file: cannot be written \((No space|disk|odd)[^\n]*\); free some space"):
        write_atomically(tmp_path / "file", fail)
    assert list(tmp_path.iterdir()) == []


def test_hash_is_that_of_the_content(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"weights")
    assert sha256_of(tmp_path / "file") == hashlib.sha256(b"weights").hexdigest()


def test_the_shipped_demo_is_there():
    assert files.DEMO_MODEL.is_file()
    assert (files.DEMO_MODEL.parent / "dict.txt").is_file()
    assert (files.DEMO_DATA / "demo_sentiment.yaml").is_file()
