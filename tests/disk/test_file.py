"""The file of experts: what it holds, what a kill or a full disk leaves, and which files are refused."""

import contextlib
import fcntl
import os
import random
import shutil
import threading
from itertools import count

import pytest
import torch
from support.disk import files_of
from support.experts_on_disk import EXPERTS, LAYERS, draw, layers, write

from torch_moe_mps.disk import file as module
from torch_moe_mps.disk.file import ALIGNMENT, ExpertsFile, written


def read(file: ExpertsFile, layer: int, expert: int) -> list[bytes]:
    views = [memoryview(bytearray(size)) for size in file.layers[layer].sizes]
    file.read(layer, expert, views)
    return [bytes(view) for view in views]


def test_a_block_is_the_tensors_of_one_expert(tmp_path):
    tensors = write(tmp_path / "experts")
    file = ExpertsFile(tmp_path / "experts", "key")
    assert file.layers == layers()
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            expected = [
                bytes(t[expert].reshape(-1).view(torch.uint8).numpy()) for t in tensors[layer].values()
            ]
            assert read(file, layer, expert) == expected
    data = (tmp_path / "experts").read_bytes()
    for blocks in tensors[1].values():
        first = bytes(blocks[3].reshape(-1).view(torch.uint8).numpy())
        assert data.count(first) == 1
    codes = bytes(tensors[1]["codes"][3].view(-1).view(torch.uint8).numpy())
    assert data.index(codes) % ALIGNMENT == 0


@pytest.fixture
def sources(tmp_path) -> list[str]:
    """Two files of a checkpoint."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_bytes(name.encode() * 100_000)
    return sorted(map(str, folder.iterdir()))


class Killed(BaseException):
    """Ends the process: from here on no file is changed."""


def test_a_writer_that_is_killed_at_any_change_is_resumed(tmp_path, sources, monkeypatch):
    """With no complete layer written twice; until then there is no file of that name."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # takes long
    write(tmp_path / "whole", sources=sources)
    expected, added = (tmp_path / "whole").read_bytes(), []
    add = module.NewFile.add
    monkeypatch.setattr(
        module.NewFile, "add", lambda self, n, tensors: (add(self, n, tensors), added.append(n))
    )
    for last in count(1, 7):
        path, changes = tmp_path / str(last), count(1)

        def killed(function, changes=changes, last=last):
            def changed(*args, **kwargs):
                if next(changes) >= last:
                    raise Killed
                return function(*args, **kwargs)

            return changed

        added.clear()
        with monkeypatch.context() as patch:
            for name in ("pwrite", "ftruncate", "fsync", "unlink", "rename"):
                patch.setattr(os, name, killed(getattr(os, name)))
            try:
                write(path, sources=sources)
                break
            except Killed:
                pass
        if not path.exists():
            write(path, sources=sources)
        assert added == [*range(LAYERS)]
        assert path.read_bytes() == expected
        assert {each.name for each in tmp_path.iterdir()} == {"whole", "sources", path.name}
        path.unlink()
    assert last > 60


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    with files_of(200_000), pytest.raises(OSError, match="experts cannot be written: File too large"):
        write(tmp_path / "experts")
    assert not [*tmp_path.iterdir()]
    for name in ("fsync", "rename"):  # what was written may find no room only then
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
            with pytest.raises(OSError, match="experts cannot be written: No space left"):
                write(tmp_path / "experts")
        assert not [*tmp_path.iterdir()]
    usage = lambda path: os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))  # noqa: E731
    monkeypatch.setattr(os, "statvfs", usage)
    with pytest.raises(ValueError, match=r"must have 0.00 GB of free space, got 0.00 GB"):
        write(tmp_path / "experts")
    assert not [*tmp_path.iterdir()]


def test_a_second_writer_waits_for_the_first_one(tmp_path, monkeypatch, capfd):
    """It adds what is left where the first one ended by an error, and else nothing."""
    waits, lock = threading.Event(), fcntl.flock

    def noting(file, how):
        if how == fcntl.LOCK_EX:
            waits.set()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", noting)
    for fails in (True, False):
        second = threading.Thread(target=write, args=(tmp_path / "experts", "key", 1))
        waits.clear()
        with contextlib.suppress(Killed), written(tmp_path / "experts", "key", layers()) as new:
            second.start()
            assert waits.wait(60)
            for number in [*new.left][: 1 if fails else None]:
                new.add(number, draw()[number])
            if fails:
                raise Killed
        second.join(60)
        assert "waiting for a process that writes" in capfd.readouterr().err
        assert [*tmp_path.iterdir()] == [tmp_path / "experts"]
        file = ExpertsFile(tmp_path / "experts", "key")
        for layer in range(LAYERS):
            own = draw(int(fails and layer > 0))[layer].values()
            assert read(file, layer, 5) == [bytes(t[5].reshape(-1).view(torch.uint8).numpy()) for t in own]
        (tmp_path / "experts").unlink()


def test_a_file_that_gets_its_name_while_another_process_opens_it(tmp_path, monkeypatch):
    """It stays as it is, whatever the other one would have written."""
    first, lock = written(tmp_path / "experts", "key", layers()), fcntl.flock
    new = first.__enter__()
    for number in [*new.left]:
        new.add(number, draw()[number])

    def late(*args):
        monkeypatch.setattr(fcntl, "flock", lock)
        first.__exit__(None, None, None)
        return lock(*args)

    monkeypatch.setattr(fcntl, "flock", late)
    write(tmp_path / "experts", "other", seed=1)
    assert [*tmp_path.iterdir()] == [tmp_path / "experts"]
    assert read(ExpertsFile(tmp_path / "experts", "key"), 2, 7)


@pytest.mark.parametrize("changes", ["the key", "a source"])
def test_what_was_begun_for_another_checkpoint_is_begun_anew(tmp_path, sources, changes):
    key = "other" if changes == "the key" else "key"
    with pytest.raises(Killed), written(tmp_path / "experts", key, layers(), sources) as new:
        new.add(0, draw(1)[0])
        raise Killed
    assert len([*tmp_path.iterdir()]) == 2  # resumed by the same command
    if changes == "a source":
        edit(sources[1])
    write(tmp_path / "whole", sources=sources)
    write(tmp_path / "experts", sources=sources)
    assert (tmp_path / "experts").read_bytes() == (tmp_path / "whole").read_bytes()


def edit(source: str) -> None:
    """Changes one byte of a file, whose size stays; a coarse clock would not tell."""
    before = os.stat(source)
    with open(source, "r+b") as file:
        file.seek(77_777)
        file.write(b"x")
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def test_sources_are_compared_where_their_stamps_differ(tmp_path, sources, monkeypatch, capfd):
    """By content: a copy is the same, and is digested once; one byte makes another checkpoint."""
    path, digested = tmp_path / "experts", []
    write(path, sources=sources)
    digest = module._digest_of
    monkeypatch.setattr(module, "_digest_of", lambda source: digested.append(source) or digest(source))
    fingerprint = ExpertsFile(path, "key", sources).fingerprint
    os.chmod(sources[0], 0o400)
    os.chmod(sources[0], 0o600)
    assert ExpertsFile(path, "key", sources).fingerprint == fingerprint
    assert not digested and "comparing" not in capfd.readouterr().err
    shutil.copy(sources[0], tmp_path / "copy")
    (tmp_path / "copy").rename(sources[0])
    for compared in ([sources[0]], []):  # by one process
        assert ExpertsFile(path, "key", sources).fingerprint == fingerprint
        assert digested == compared
        assert capfd.readouterr().err.count(f"comparing files with those of {path}") == len(compared)
        digested.clear()
    for others in (sources[:1], [], [*reversed(sources)]):
        with pytest.raises(ValueError, match="experts has the experts of another checkpoint or format: remo"):
            ExpertsFile(path, "key", others)
    edit(sources[1])
    for _ in range(2):
        with pytest.raises(ValueError, match="experts has the experts of another checkpoint or format: remo"):
            ExpertsFile(path, "key", sources)
    path.unlink()
    write(path, sources=sources)
    assert ExpertsFile(path, "key", sources).fingerprint != fingerprint


def test_a_folder_that_cannot_be_written(tmp_path, sources, monkeypatch):
    """Each process compares what was copied there."""
    path = tmp_path / "experts"
    write(path, sources=sources)
    os.utime(sources[0])
    before, opens = path.read_bytes(), os.open

    def refused(name, flags, *mode):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(30, "Read-only file system")
        return opens(name, flags, *mode)

    monkeypatch.setattr(os, "open", refused)
    assert ExpertsFile(path, "key", sources).layers == layers() and path.read_bytes() == before


def test_a_source_that_changes_while_the_file_is_written(tmp_path, sources):
    """Is an error; the next process begins anew."""
    with (
        pytest.raises(ValueError, match="experts is written from have changed meanwhile: try again"),
        written(tmp_path / "experts", "key", layers(), sources) as new,
    ):
        for number in [*new.left]:
            new.add(number, draw(1)[number])
        edit(sources[0])
    assert not (tmp_path / "experts").exists()
    write(tmp_path / "experts", sources=sources)
    codes = draw()[1]["codes"][3].reshape(-1).view(torch.uint8).numpy()
    assert read(ExpertsFile(tmp_path / "experts", "key", sources), 1, 3)[0] == bytes(codes)


def test_a_flipped_bit_of_the_header(tmp_path, sources):
    """In each byte in front of the blocks' checksums: one line with the file's name, or nothing lost."""
    path, generator = tmp_path / "experts", random.Random(0)
    write(path, sources=sources)
    data = path.read_bytes()
    places = module._Places("key", layers(), len(sources))
    assert 300 < len(places.header) < places.digests + 64 < places.stamps < ALIGNMENT
    with open(path, "r+b") as file:
        for place in range(places.stamps + 2 * module._STAMP.size + 4):
            flipped = data[place] ^ 1 << generator.randrange(8)
            os.pwrite(file.fileno(), bytes([flipped]), place)
            if place < places.stamps:
                with pytest.raises(ValueError, match="experts is damaged or not a file of experts") as error:
                    ExpertsFile(path, "key", sources)
                assert "\n" not in str(error.value) and str(path) in str(error.value)
                os.pwrite(file.fileno(), data[place : place + 1], place)
            else:  # the sources are digested, and stamped again
                assert ExpertsFile(path, "key", sources).layers == layers()
            assert path.read_bytes() == data


def test_files_that_are_refused(tmp_path):
    path = tmp_path / "experts"
    write(path)
    data = path.read_bytes()
    with pytest.raises(ValueError, match="experts has the experts of another checkpoint or format"):
        ExpertsFile(path, "other")
    for length in (0, 10, 30, 300):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match="experts is damaged or not a file of experts: remove it"):
            ExpertsFile(path)
    for length in (len(data) - 1, len(data) // 2):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=f"experts must have {len(data):,} bytes, got {length:,}"):
            ExpertsFile(path)
    path.write_bytes(b"x" * len(data))
    with pytest.raises(ValueError, match="not a file of experts"):
        ExpertsFile(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match="experts must be a file of experts, got a folder"):
        ExpertsFile(path)


def test_tensors_of_another_layout_are_refused(tmp_path):
    tensors = draw()[0]
    with written(tmp_path / "experts", "key", layers()) as new:
        with pytest.raises(
            ValueError, match=r"layers.0.experts.codes must be \(torch.int32, \(8, 12, 40\)\)"
        ):
            new.add(0, tensors | {"codes": tensors["codes"][1:]})
        for number in [*new.left]:
            new.add(number, draw()[number])
    assert ExpertsFile(tmp_path / "experts").key == "key"
