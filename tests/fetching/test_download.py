"""A file comes whole or not at all, and a cut costs nothing but time."""

import hashlib
import json
from pathlib import Path

import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.fetching.download import GIT, checksum_of, download
from tests.fetching.loopback_hub import LoopbackHub, git_hash

CONTENT = bytes(range(256)) * 4000  # about a megabyte
SHA256 = hashlib.sha256(CONTENT).hexdigest()
PATH = "/models/model.tar.gz"


def fetch(hub: LoopbackHub, folder: Path, **options) -> Path:
    place = folder / "sub" / "model.tar.gz"
    download(hub.url + PATH, place, quiet=True, **options)
    return place


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_file_comes_whole_and_leaves_nothing_beside_it(hub, tmp_path):
    hub.files[PATH] = CONTENT
    place = fetch(hub, tmp_path, size=len(CONTENT), checksum=SHA256)
    assert place.read_bytes() == CONTENT
    assert names(tmp_path) == ["model.tar.gz"]


def test_after_a_cut_the_rest_alone_is_asked_for(hub, tmp_path):
    hub.files[PATH], hub.cuts[PATH] = CONTENT, [1000, 300_000]
    assert fetch(hub, tmp_path, checksum=SHA256).read_bytes() == CONTENT
    assert hub.ranges(PATH) == ["", "bytes=1000-", "bytes=301000-"]


def test_the_next_call_goes_on_where_an_earlier_one_gave_up(hub, tmp_path):
    hub.files[PATH], hub.cuts[PATH] = CONTENT, [5000, *[0] * 10]
    with pytest.raises(UserError, match="the connection was closed too early"):
        fetch(hub, tmp_path)
    assert names(tmp_path) == ["model.tar.gz.part", "model.tar.gz.part.json"]
    hub.cuts.clear()
    assert fetch(hub, tmp_path).read_bytes() == CONTENT
    assert hub.ranges(PATH)[-1] == "bytes=5000-"
    assert names(tmp_path) == ["model.tar.gz"]


def test_a_part_of_another_version_is_not_gone_on_with(hub, tmp_path):
    hub.files[PATH], hub.cuts[PATH] = CONTENT[::-1], [5000, *[0] * 10]
    with pytest.raises(UserError):
        fetch(hub, tmp_path)
    hub.cuts.clear()
    hub.files[PATH] = CONTENT
    assert fetch(hub, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("said", ["no JSON", "[]", '{"url": 3}', '{"url": "http://elsewhere", "version": "x"}'])
def test_a_part_that_nothing_is_known_of_is_no_use(hub, tmp_path, said):
    hub.files[PATH] = CONTENT
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model.tar.gz.part").write_bytes(b"something else")
    (tmp_path / "sub" / "model.tar.gz.part.json").write_text(said)
    assert fetch(hub, tmp_path).read_bytes() == CONTENT


def test_more_than_there_is_starts_from_the_beginning(hub, tmp_path):
    hub.files[PATH] = CONTENT
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model.tar.gz.part").write_bytes(CONTENT + b"x")
    version = {"url": hub.url + PATH, "version": f'"{git_hash(CONTENT)}"'}
    (tmp_path / "sub" / "model.tar.gz.part.json").write_text(json.dumps(version))
    assert fetch(hub, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("checksum", [SHA256, GIT + git_hash(CONTENT)])
def test_a_wrong_checksum_leaves_nothing(hub, tmp_path, checksum):
    hub.files[PATH], hub.altered[PATH] = CONTENT, CONTENT[:-1] + b"?"
    with pytest.raises(UserError, match=f"checksum .* expected {checksum[:16]}.*give the command again"):
        fetch(hub, tmp_path, checksum=checksum)
    assert "model.tar.gz" not in names(tmp_path)
    hub.altered.clear()
    place = fetch(hub, tmp_path, checksum=checksum)
    assert checksum_of(place, checksum) == checksum


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "the server says 404 Not Found.; check the address"), ({"size": 1 << 60}, "GB are free; free some space")],
)
def test_what_cannot_be_is_one_line(hub, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        fetch(hub, tmp_path, **options)


def test_another_size_than_announced_is_refused(hub, tmp_path):
    hub.files[PATH] = CONTENT
    with pytest.raises(UserError, match="1,024,000 bytes are offered where 12 were announced"):
        fetch(hub, tmp_path, size=12)


def test_only_addresses_of_the_network_are_fetched(tmp_path):
    with pytest.raises(UserError, match="not an address"):
        download(f"file://{__file__}", tmp_path / "x")


def test_a_folder_that_is_a_file_is_one_line(hub, tmp_path):
    hub.files[PATH] = CONTENT
    (tmp_path / "sub").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        fetch(hub, tmp_path)
