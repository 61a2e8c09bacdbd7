"""An archive's files land in the model's folder, and nowhere else."""

import io
import tarfile
from pathlib import Path

import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.fetching.models import unpack_model


def make_archive(path: Path, *members: tuple[str, bytes | tarfile.TarInfo]) -> Path:
    """A .tar.gz of these members: (name, content), or a ready TarInfo without content."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members:
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def special(kind: bytes, name: str, target: str = "") -> tuple[str, tarfile.TarInfo]:
    """A link, a device or a folder."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return name, info


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("inside", ["", "en_dense_lm/", "./a/b/"])
def test_the_files_beside_the_checkpoint_are_the_models(tmp_path, inside):
    folder = special(tarfile.DIRTYPE, inside or "./")
    files = [(f"{inside}model.pt", b"weights"), (f"{inside}dict.txt", b"words"), (f"{inside}sub/notes", b"")]
    archive = make_archive(tmp_path / "a.tar.gz", folder, *files)
    unpack_model(archive, tmp_path / "model")
    assert everything(tmp_path / "model") == ["dict.txt", "model.pt"]
    assert (tmp_path / "model" / "model.pt").read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (("../evil", b"x"), "leads out of the folder"),
        (("m/../../../evil", b"x"), "leads out of the folder"),
        (("/tmp/evil", b"x"), "leads out of the folder"),
        (special(tarfile.SYMTYPE, "m/dict.txt", "/etc/passwd"), "a link or a device"),
        (special(tarfile.SYMTYPE, "m/sub", ".."), "a link or a device"),
        (special(tarfile.LNKTYPE, "m/dict.txt", "../../secret"), "a link or a device"),
        (special(tarfile.CHRTYPE, "m/zero"), "a link or a device"),
        (special(tarfile.FIFOTYPE, "m/pipe"), "a link or a device"),
    ],
)
def test_a_hostile_archive_is_refused_and_leaves_nothing(tmp_path, member, message):
    outside = tmp_path / "outside"
    archive = make_archive(tmp_path / "a.tar.gz", ("m/model.pt", b"weights"), member, ("m/sub/x", b"x"))
    with pytest.raises(UserError, match=message):
        unpack_model(archive, outside / "model")
    assert everything(outside) == ["model"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not an archive", "not a whole .tar.gz"),
        (b"", "not a whole .tar.gz"),
    ],
)
def test_what_is_no_archive_is_one_line(tmp_path, content, message):
    (tmp_path / "a.tar.gz").write_bytes(content)
    with pytest.raises(UserError, match=message):
        unpack_model(tmp_path / "a.tar.gz", tmp_path / "model")


def test_half_an_archive_is_one_line(tmp_path):
    archive = make_archive(tmp_path / "a.tar.gz", ("m/model.pt", bytes(range(256)) * 1000))
    archive.write_bytes(archive.read_bytes()[:-300])
    with pytest.raises(UserError, match="not a whole"):
        unpack_model(archive, tmp_path / "model")
    assert everything(tmp_path / "model") == []


@pytest.mark.parametrize("names", [("m/dict.txt",), ("a/model.pt", "b/model.pt")])
def test_an_archive_of_no_model_or_of_two_is_refused(tmp_path, names):
    archive = make_archive(tmp_path / "a.tar.gz", *((name, b"x") for name in names))
    with pytest.raises(UserError, match="not an archive of one model"):
        unpack_model(archive, tmp_path / "model")
