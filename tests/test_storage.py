"""Files that appear whole or not at all, whatever kills, full disks, read-only folders and rivals there are."""

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrasp.core.errors import StorageError
from regrasp.core.provenance import Provenance
from regrasp.data.sidecar import SidecarWriter
from regrasp.data.storage import Spool, Transaction, write_bytes_atomic, write_json_atomic
from tests.killed_writers import NAMES

REPOSITORY = Path(__file__).parents[1]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=["nameless", "named"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of preparing a file: without a name, and where the file system has no such files."""
    if request.param == "named":
        ordinary = os.open

        def refuse(path: Any, flags: int, *more: Any, **options: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "Operation not supported")
            return ordinary(path, flags, *more, **options)

        monkeypatch.setattr(os, "open", refuse)
    return request.param


def test_files_of_several_folders_appear_on_commit_and_not_before(tmp_path: Path, way: str):
    with Transaction() as transaction:
        transaction.create(tmp_path / "new/deep/a").write(b"first")
        transaction.create(tmp_path / "b").write(b"second")
        seen = tree(tmp_path)
        published = transaction.commit()
    assert [name for name in seen if not name.endswith(".tmp")] == []
    assert (way == "named") == bool(seen)
    assert published == [tmp_path / "new/deep/a", tmp_path / "b"]
    assert tree(tmp_path) == {"new/deep/a": b"first", "b": b"second"}


@pytest.mark.usefixtures("way")
def test_a_block_that_fails_leaves_everything_as_it_was(tmp_path: Path):
    write_bytes_atomic(tmp_path / "a", b"old")
    with pytest.raises(KeyError), Transaction() as transaction:
        transaction.create(tmp_path / "a").write(b"new")
        transaction.create(tmp_path / "folder/b").write(b"new")
        raise KeyError
    assert tree(tmp_path) == {"a": b"old"}
    assert not (tmp_path / "folder").exists()


@pytest.mark.usefixtures("way")
def test_a_block_that_does_not_commit_leaves_everything_as_it_was(tmp_path: Path):
    with Transaction() as transaction:
        transaction.create(tmp_path / "a").write(b"new")
    assert tree(tmp_path) == {}


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.binary(max_size=50)), max_size=6))
def test_a_folder_holds_what_was_written_last_and_nothing_else(writes: list[tuple[str, bytes]]):
    with tempfile.TemporaryDirectory() as folder:
        for name, content in writes:
            write_bytes_atomic(Path(folder) / name, content)
        assert tree(Path(folder)) == dict(writes)


def test_json_is_written_as_people_read_it(tmp_path: Path):
    write_json_atomic(tmp_path / "a.json", {"été": [1, None]})
    assert (tmp_path / "a.json").read_text() == '{\n  "été": [\n    1,\n    null\n  ]\n}\n'


@pytest.mark.usefixtures("way")
def test_files_have_the_permissions_that_the_user_gives_files(tmp_path: Path):
    before = os.umask(0o022)
    try:
        write_bytes_atomic(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_contents_are_on_disk_before_the_first_name_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []

    def record(name: str) -> None:
        ordinary: Callable[..., Any] = getattr(os, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            done.append(name if name != "fsync" else f"fsync {os.fstat(arguments[0]).st_size == 3}")
            return ordinary(*arguments, **options)

        monkeypatch.setattr(os, name, recorded)

    for name in ("fsync", "link", "replace"):
        record(name)
    with Transaction() as transaction:
        transaction.create(tmp_path / "a").write(b"123")
        transaction.create(tmp_path / "b").write(b"456")
        transaction.commit()
    # Both contents (3 bytes each), then each name followed by its folder.
    assert done == ["fsync True", "fsync True", "link", "fsync False", "link", "fsync False"]


@pytest.mark.usefixtures("way")
def test_a_guard_that_refuses_leaves_what_another_run_has_written(tmp_path: Path):
    def guard() -> None:
        assert (tmp_path / "a").read_bytes() == b"theirs"
        raise ValueError("somebody was faster")

    with pytest.raises(ValueError, match="faster"), Transaction() as transaction:
        transaction.create(tmp_path / "a").write(b"mine")
        write_bytes_atomic(tmp_path / "a", b"theirs")
        transaction.commit(guard)
    assert tree(tmp_path) == {"a": b"theirs"}


@pytest.mark.usefixtures("way")
def test_a_guard_may_write_what_depends_on_the_files_as_they_are(tmp_path: Path):
    write_bytes_atomic(tmp_path / "a", b"1")
    with Transaction() as transaction:
        handle = transaction.create(tmp_path / "a")
        transaction.commit(lambda: handle.write((tmp_path / "a").read_bytes() + b"2"))
    assert tree(tmp_path) == {"a": b"12"}


def test_a_guard_runs_alone(tmp_path: Path):
    """The folder is locked against other processes while a guard looks at it."""
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    found: list[str] = []

    def guard() -> None:
        rival = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
        found.append(rival.stderr.strip().splitlines()[-1])

    with Transaction() as transaction:
        transaction.create(tmp_path / "a").write(b"1")
        transaction.commit(guard)
    assert found == ["BlockingIOError: [Errno 11] Resource temporarily unavailable"]


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    def late(_: int, __: object) -> None:
        raise AssertionError("it waits for itself")  # no OSError, which a missing lock is taken for

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_one_folder_under_two_names_does_not_lock_itself_out(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "alias").symlink_to("folder")
    with within(10), Transaction() as transaction:
        transaction.create(tmp_path / "folder/a").write(b"1")
        transaction.create(tmp_path / "alias/b").write(b"2")
        transaction.commit()
    assert tree(tmp_path / "folder") == {"a": b"1", "b": b"2"}


def test_a_new_folder_that_a_failed_run_takes_away_again_is_made_anew(tmp_path: Path):
    with Transaction() as mine:
        with pytest.raises(KeyError), Transaction() as theirs:
            theirs.create(tmp_path / "new/b")
            mine.create(tmp_path / "new/a").write(b"1")
            raise KeyError
        assert not (tmp_path / "new").exists()
        mine.commit()
    assert tree(tmp_path) == {"new/a": b"1"}


def run(mode: str, folder: Path) -> Any:
    command = [sys.executable, "-m", "tests.killed_writers", mode, str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_kill_at_any_line_leaves_the_old_file_or_the_new_one(tmp_path: Path):
    """kill -9 at each line of storage.py that writing three files executes, over no files and over old ones."""
    states = run("lines", tmp_path)
    assert sum(state["killed"] for state in states) > 200
    passing = 0
    for state in states:
        held = {name: state["state"].pop(name, -1) for name in NAMES}
        before = 0 if state["old"] else -1
        # Published in the order of creation: the new ones come first.
        assert list(held.values()) in [[1] * new + [before] * (3 - new) for new in range(4)]
        # Nothing else, but for the instant between giving a nameless file a passing name and its own.
        assert all(name.endswith(".publish") for name in state["state"])
        passing += len(state["state"])
        assert state["killed"] or list(held.values()) == [1, 1, 1]
        assert state["next"] == dict.fromkeys(NAMES, 2)
    assert passing == 3  # one line for each of three old files


def test_kills_from_outside_leave_whole_files_and_nothing_else(tmp_path: Path):
    for state in run("moments", tmp_path):
        assert sorted(state) == sorted(NAMES)
        assert None not in state.values()


def test_two_writers_of_the_same_files_never_show_a_mixture(tmp_path: Path):
    found = run("both", tmp_path)
    assert found["statuses"] == [0, 0]
    assert set(found["seen"]) <= {0, 1, 2, 3, 4}
    assert len(found["seen"]) > 2
    (version,) = set(found["left"].values())  # of one writer's last transaction, all of it
    assert version in (2, 4)
    assert sorted(found["left"]) == sorted(NAMES)


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A file that grows beyond ``size`` meets EFBIG (Python ignores SIGXFSZ)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_much(folder: Path) -> None:
    with Transaction() as transaction:
        transaction.create(folder / "first").write(b"small")
        transaction.create(folder / "old").write(bytes(1 << 20))
        transaction.commit()


def write_little(folder: Path) -> None:
    """So little that it is first written when it is committed."""
    write_bytes_atomic(folder / "old", bytes(5000))


def write_sidecar(folder: Path) -> None:
    with Transaction() as transaction:
        writer = SidecarWriter(transaction, folder / "old", "values")
        random = np.random.default_rng(0)
        for episode in range(20):
            values = random.random(20_000).astype(np.float32)
            frames = np.arange(20_000)
            writer.write({"episode_index": np.full(20_000, episode), "frame_index": frames, "value": values})
        writer.close(Provenance(stage="value predict", config={}, fingerprint=""))
        transaction.commit()


WRITES = [write_much, write_little, write_sidecar]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("work", WRITES)
def test_a_file_that_may_not_grow_leaves_the_old_one(tmp_path: Path, work: Callable[[Path], None]):
    write_bytes_atomic(tmp_path / "old", b"old")
    limit = 1000 if work is write_little else 100_000
    said = r"No space is left for writing in '.*'; nothing was changed\. Mend: "
    with pytest.raises(StorageError, match=said) as found, files_of_at_most(limit):
        work(tmp_path)
    assert isinstance(found.value, OSError)
    assert tree(tmp_path) == {"old": b"old"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("work", WRITES)
def test_a_full_disk_leaves_the_old_file(small_disk: Path, work: Callable[[Path], None]):
    write_bytes_atomic(small_disk / "old", b"old")
    filler = small_disk / "filler"
    room = 0 if work is write_little else 100_000
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    os.truncate(filler, filler.stat().st_size - room)
    with pytest.raises(StorageError, match="No space is left for writing"):
        work(small_disk)
    filler.unlink()
    assert tree(small_disk) == {"old": b"old"}
    write_bytes_atomic(small_disk / "old", b"new")  # and there is room again
    assert tree(small_disk) == {"old": b"new"}


@pytest.mark.usefixtures("way")
def test_a_read_only_folder_is_refused_with_a_way_out(small_disk: Path):
    (small_disk / "meta").mkdir()
    write_bytes_atomic(small_disk / "meta/old", b"old")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for target in ("meta/old", "meta/new", "newer/new"):
        with pytest.raises(StorageError, match=r"cannot be written \(Read-only .* Mend: .*--sidecars DIR"):
            write_bytes_atomic(small_disk / target, b"new")
    assert tree(small_disk) == {"meta/old": b"old"}


@pytest.mark.usefixtures("way")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write in every folder; the read-only disk stands for it")
def test_a_folder_without_permission_is_refused_with_a_way_out(tmp_path: Path):
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(StorageError, match=r"cannot be written \(Permission denied\).* Mend: .*--sidecars DIR"):
            write_bytes_atomic(tmp_path / "a", b"new")
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.usefixtures("way")
def test_a_file_in_the_way_of_a_folder_is_said(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"a file")
    with pytest.raises(StorageError, match=r"Writing in '.*/a' failed: .*; nothing was changed"):
        write_bytes_atomic(tmp_path / "a/b", b"new")
    assert tree(tmp_path) == {"a": b"a file"}


@pytest.mark.usefixtures("way")
def test_a_folder_in_the_way_of_a_file_is_said(tmp_path: Path):
    (tmp_path / "a").mkdir()
    with pytest.raises(StorageError, match=r"Writing in '.*' failed: Is a directory"):
        write_bytes_atomic(tmp_path / "a", b"new")
    assert tree(tmp_path) == {}


def test_a_spool_gives_back_its_rows_as_often_as_they_are_asked_for():
    spool = Spool()
    spool.add(np.array([0, 2, 0]), np.array([1.5, -2.5, 3.5], dtype=np.float32))
    spool.add(np.array([1]), np.array([0.1]))
    assert spool.counts.tolist() == [2, 1, 1]
    for _ in range(2):
        ((groups, values),) = list(spool.read())
        assert (groups.tolist(), values.tolist()) == ([0, 2, 0, 1], [1.5, -2.5, 3.5, 0.1])
    spool.close()


def test_a_spool_reads_in_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Spool, "_ROWS", 2)
    spool = Spool()
    spool.add(np.array([0, 1, 2, 3, 4]), np.arange(5.0))
    assert [(g.tolist(), v.tolist()) for g, v in spool.read()] == [([0, 1], [0, 1]), ([2, 3], [2, 3]), ([4], [4])]


def test_an_empty_spool_has_nothing():
    spool = Spool()
    assert (spool.counts.tolist(), list(spool.read())) == ([], [])


@pytest.mark.parametrize("rows", [100, 100_000])
def test_a_spool_that_finds_no_room_says_where(rows: int):
    spool = Spool()
    said = f"No space is left for writing in '{tempfile.gettempdir()}'"
    with pytest.raises(StorageError, match=said), files_of_at_most(200):
        spool.add(np.zeros(rows, dtype=np.int64), np.zeros(rows))
