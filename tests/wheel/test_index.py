# SPDX-License-Identifier: Apache-2.0
"""Downloads: whole and verified, or absent and explained."""

import hashlib
import io
import os
import zipfile

import pytest

from tools.index import FetchError, fetch, fetch_members

NAME = "thing-1.0-py3-none-any.whl"
CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def served(index):
    index.files[NAME] = CONTENT
    return index


def left_behind(cache):
    return sorted(path.name for path in (cache / "downloads").iterdir() if path.suffix != ".lock")


def three_lines(error) -> bool:
    lines = str(error.value).splitlines()
    return len(lines) == 3 and lines[2].startswith("  next: ")


def test_a_download_is_kept_and_used_again(served, cache):
    path = fetch("thing", NAME, SHA256)
    assert path == cache / "downloads" / NAME and path.read_bytes() == CONTENT
    asked = len(served.requests)
    assert fetch("thing", NAME, SHA256) == path
    assert len(served.requests) == asked


def test_a_damaged_copy_is_reported_and_fetched_again(served, capsys):
    path = fetch("thing", NAME, SHA256)
    path.write_bytes(CONTENT[:-1] + b"x")
    capsys.readouterr()
    assert fetch("thing", NAME, SHA256).read_bytes() == CONTENT
    told = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert len(told) == 1 and str(path) in told[0]


def test_a_file_of_another_hash_is_refused(served, cache):
    with pytest.raises(FetchError, match="not the file that was pinned") as error:
        fetch("thing", NAME, "0" * 64)
    assert three_lines(error) and SHA256 in str(error.value)
    assert left_behind(cache) == []


def test_a_transfer_that_breaks_off_leaves_nothing(served, cache):
    served.cut.add(NAME)
    with pytest.raises(FetchError, match="did not deliver thing") as error:
        fetch("thing", NAME, SHA256)
    assert three_lines(error) and left_behind(cache) == []
    served.cut.clear()
    assert fetch("thing", NAME, SHA256).read_bytes() == CONTENT


def test_the_rest_of_a_killed_download_does_not_count(served, cache):
    (cache / "downloads").mkdir(parents=True)
    (cache / "downloads" / f"{NAME}.part").write_bytes(CONTENT[:1000])
    assert fetch("thing", NAME, SHA256).read_bytes() == CONTENT
    assert left_behind(cache) == [NAME]


def test_an_unreachable_index_is_named_in_three_lines(index):
    index.close()
    with pytest.raises(FetchError, match="did not deliver thing: ConnectionRefused") as error:
        fetch("thing", NAME, SHA256)
    assert three_lines(error)


def test_a_project_or_file_that_the_index_lacks(served):
    with pytest.raises(FetchError, match="no usable page for other"):
        fetch("other", NAME, SHA256)
    with pytest.raises(FetchError, match="lists 1 files of thing, not this one"):
        fetch("thing", "thing-2.0.tar.gz", SHA256)


def test_a_full_disk_is_named_and_nothing_half_written_stays(served, cache):
    (cache / "downloads").mkdir(parents=True)
    (cache / "downloads" / f"{NAME}.part").symlink_to("/dev/full")
    with pytest.raises(FetchError, match="the disk is full") as error:
        fetch("thing", NAME, SHA256)
    assert three_lines(error) and left_behind(cache) == []


def wheel_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def test_members_are_fetched_without_the_rest(index, cache):
    large, wanted = os.urandom(2_000_000), b"#define X 1\n" * 9000
    index.files[NAME] = wheel_of({"large.so": large, "a/x.h": wanted, "more.so": large})
    pins = {"a/x.h": hashlib.sha256(wanted).hexdigest()}
    assert fetch_members("thing", NAME, pins) == {"a/x.h": wanted}
    assert len(index.requests) < 12 and not (cache / "downloads" / NAME).exists()
    with pytest.raises(FetchError, match="a/x.h is not the file that was pinned"):
        fetch_members("thing", NAME, {"a/x.h": "0" * 64})
    with pytest.raises(FetchError, match="did not deliver them: KeyError"):
        fetch_members("thing", NAME, {"b/y.h": "0" * 64})
    index.serves_ranges = False
    with pytest.raises(FetchError, match="whole files only\n.*must serve byte ranges"):
        fetch_members("thing", NAME, pins)
