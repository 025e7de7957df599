"""Files are written whole or not at all, and never where a link leads."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from distconv.whole_files import Folder, Stream, atomic_path, open_regular, write_file


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_has_the_new_content_and_nothing_is_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for content in ("one", b"two", memoryview(b"three")):
        write_file(path, content)
    assert path.read_text() == "three"
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.fault(58, 85)
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_what_cannot_be_written_is_named_and_the_old_content_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("good")
    monkeypatch.setattr(os, call, lambda *_, **__: full())
    with pytest.raises(OSError, match=rf"\[Errno 28\] No space left on device: '{path}'"):
        write_file(path, "better")
    assert path.read_text() == "good"
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.fault(78)
def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "plan.json").symlink_to(tmp_path / "theirs")
    write_file(tmp_path / "plan.json", "mine")
    assert not (tmp_path / "plan.json").is_symlink()
    assert [(tmp_path / name).read_text() for name in ("plan.json", "theirs")] == ["mine", "theirs"]


def test_who_may_read_a_file_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.touch(mode=0o600)
    write_file(path, "mine")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_devices_pipes_and_what_the_shell_has_opened_are_written_to(tmp_path: Path) -> None:
    write_file("/dev/null", "nothing")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    while not read and reader.is_alive():
        try:
            write_file(tmp_path / "pipe", "through")
            break
        except OSError as error:  # nobody reads yet
            assert error.errno == errno.ENXIO
    reader.join(10)
    assert read == ["through"]
    with (tmp_path / "out").open("w") as out:
        write_file(f"/dev/fd/{out.fileno()}", "out")
    assert (tmp_path / "out").read_text() == "out"


@pytest.mark.fault(80)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match=f"{path} is not a regular file but a folder, a pipe or a device"):
            open_regular(path)
    (tmp_path / "file").write_text("it")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"it"
    with pytest.raises(OSError, match="it is a symbolic link, which is not followed"):
        open_regular(tmp_path / "link", follow_links=False)


@pytest.mark.fault(78)
def test_a_folder_within_another_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "run").symlink_to("theirs")
    with Folder(tmp_path) as folder:
        with pytest.raises(OSError, match="it is a symbolic link, which is not followed"):
            Folder("run", make=True, within=folder)
        with Folder("mine", make=True, within=folder) as mine:
            mine.write("a", [memoryview(b"b")])
            assert mine.names() == ["a"]
    assert (tmp_path / "mine" / "a").read_text() == "b"


@pytest.mark.fault(86)
def test_a_folder_that_is_held_open_stays_the_same_when_another_takes_its_path(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    with Folder(tmp_path / "run", make=True) as folder:
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").symlink_to("theirs")
        folder.write("a", [memoryview(b"b")])
    assert os.listdir(tmp_path / "moved") == ["a"]
    assert not os.listdir(tmp_path / "theirs")


@pytest.mark.fault(78)
def test_lines_go_to_a_new_file_or_to_the_end_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "new").symlink_to("theirs")
    (tmp_path / "old").symlink_to("theirs")
    with Folder(tmp_path) as folder:
        with folder.create_stream("new", "one\n") as lines:
            lines.write("two\n")
            assert (tmp_path / "new").read_text() == "one\ntwo\n"
        with folder.open_append("new") as lines:
            assert lines.last_byte() == b"\n"
            lines.write("three\n")
        assert (tmp_path / "new").read_text() == "one\ntwo\nthree\n"
        with pytest.raises(OSError, match="it is a symbolic link, which is not followed"):
            folder.open_append("old")
        monkeypatch.setattr(os, "write", full)
        open_before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match=r"No space left on device: .*/new'"):
            folder.create_stream("new", "other")
        assert os.listdir("/proc/self/fd") == open_before
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert sorted(os.listdir(tmp_path)) == ["new", "old", "theirs"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_file_that_others_write_is_whole_or_not_there(tmp_path: Path, fails: bool) -> None:
    path = tmp_path / "data.h5"
    path.write_text("old")

    def make() -> None:
        with atomic_path(path) as partial:
            partial.write_text("new")
            if fails:
                full()

    if fails:
        with pytest.raises(OSError, match="No space left on device"):
            make()
    else:
        make()
    assert path.read_text() == ("old" if fails else "new")
    assert os.listdir(tmp_path) == ["data.h5"]


def test_sync_forces_the_file_of_the_stream_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    path = tmp_path / "log"
    with Stream(path, os.open(path, os.O_WRONLY | os.O_CREAT)) as stream:
        stream.sync()
        assert synced == [stream.fileno()]
