"""Checkpoint folders as a source: real files, and every way in which they can be wrong."""

import json
import os
import struct
import sys

import pytest
import torch
from safetensors.torch import save_file

from vllm_wt.errors import BackendUnavailable, CorruptTransfer, InvalidInfo, ManifestMismatch
from vllm_wt.packing import DTYPES, as_bytes, meta_of
from vllm_wt.source import SafetensorsSource

INDEX = "model.safetensors.index.json"


def write_index(folder, **files):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def sharded(folder):
    """Two files and their index; names that sort against the order of the files."""
    a, b, c = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16), torch.tensor(3)
    save_file({"z": a, "b": b}, folder / "m-1.safetensors")
    save_file({"a": c}, folder / "m-2.safetensors")
    write_index(folder, z="m-1.safetensors", b="m-1.safetensors", a="m-2.safetensors")
    return {"b": b, "z": a, "a": c}


def require_same(source, expected):
    items = list(source)
    assert [name for name, _ in items] == list(expected)
    assert tuple(meta_of(*item) for item in items) == source.manifest().tensors
    for name, tensor in items:
        assert tensor.dtype == expected[name].dtype
        assert tensor.shape == expected[name].shape
        assert torch.equal(as_bytes(tensor), as_bytes(expected[name]))
    assert source.made == set(expected)


def fails(source, kind):
    """The one error that every member gives."""
    texts = set()
    for ask in (source.manifest, lambda: next(iter(source)), lambda: source.made):
        with pytest.raises(kind) as error:
            ask()
        assert type(error.value) is kind
        assert error.value.where
        texts.add(str(error.value))
    assert len(texts) == 1
    return error.value


def test_single_file_of_all_dtypes(tmp_path):
    state = {}
    for name in sorted({*DTYPES} - {"complex128"}):  # safetensors has none of it
        dtype = getattr(torch, name)
        numbers = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
        state[name] = numbers.view(dtype).view(2, 3)
    state |= {"zz_empty": torch.empty(0, 4), "zz_scalar": torch.tensor(2.5)}
    save_file(state, tmp_path / "model.safetensors")
    require_same(SafetensorsSource(tmp_path), state)
    require_same(SafetensorsSource(str(tmp_path)), state)


def test_sharded(tmp_path):
    expected = sharded(tmp_path)
    save_file({"stray": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    require_same(SafetensorsSource(tmp_path), expected)


def test_several_files_without_index(tmp_path):
    expected = sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / "._m-1.safetensors").write_bytes(b"what macOS leaves")
    require_same(SafetensorsSource(tmp_path), expected)


def test_single_file_comes_before_others(tmp_path):
    state = {"w": torch.ones(2)}
    save_file(state, tmp_path / "model.safetensors")
    save_file(state, tmp_path / "adapter_model.safetensors")
    require_same(SafetensorsSource(tmp_path), state)


def test_links_out_of_the_folder_are_those_of_a_cache(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir(), snapshot.mkdir()
    expected = sharded(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../blobs/{path.name}")
    require_same(SafetensorsSource(snapshot), expected)


def test_index_of_files_in_a_folder_within(tmp_path):
    (tmp_path / "shards").mkdir()
    state = {"w": torch.ones(2)}
    save_file(state, tmp_path / "shards" / "m.safetensors")
    write_index(tmp_path, w="./shards/m.safetensors")
    require_same(SafetensorsSource(tmp_path), state)


def test_folder_is_read_anew(tmp_path):
    path = tmp_path / "model.safetensors"
    source = SafetensorsSource(tmp_path)
    for state in ({"w": torch.ones(2)}, {"w": torch.zeros(3), "x": torch.ones(1)}):
        save_file(state, tmp_path / "new")
        (tmp_path / "new").replace(path)
        require_same(source, state)


def test_one_file_at_a_time(tmp_path, monkeypatch):
    import safetensors

    sharded(tmp_path)
    events = []

    class Opened:
        def __init__(self, path, **options):
            self.name, self.file = path.name, safe_open(path, **options)

        def __enter__(self):
            events.append(f"open {self.name}")
            self.file = self.file.__enter__()
            return self

        def __exit__(self, *exc):
            events.append(f"close {self.name}")
            return self.file.__exit__(*exc)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            return self.file.get_slice(name)

        def get_tensor(self, name):
            events.append(name)
            return self.file.get_tensor(name)

    safe_open = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", Opened)
    source = SafetensorsSource(tmp_path)
    headers = [
        f"{do} {name}"
        for name in ("m-1.safetensors", "m-2.safetensors")
        for do in ("open", "close")
    ]
    source.manifest()
    assert events == headers
    events.clear()
    for name, _ in source:
        events.append(f"yielded {name}")
    assert events == [
        *headers,
        "open m-1.safetensors", "b", "yielded b", "z", "yielded z", "close m-1.safetensors",
        "open m-2.safetensors", "a", "yielded a", "close m-2.safetensors",
    ]  # fmt: skip


def test_no_folder(tmp_path):
    error = fails(SafetensorsSource(tmp_path / "none"), InvalidInfo)
    assert error.what == "There is no such checkpoint folder"
    assert error.where == str(tmp_path / "none")
    assert error.got == "nothing"
    assert "folder" in error.cure


def test_file_for_folder(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(1)}, path)
    assert fails(SafetensorsSource(path), InvalidInfo).got == "a file"


def test_no_safetensors(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    error = fails(SafetensorsSource(tmp_path), InvalidInfo)
    assert error.what == "The folder has no safetensors files"
    assert error.where == str(tmp_path)
    assert error.got == "1 other files"
    assert "save_pretrained" in error.cure


def test_two_checkpoints(tmp_path):
    sharded(tmp_path)
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    error = fails(SafetensorsSource(tmp_path), InvalidInfo)
    assert error.what == "The folder has two checkpoints"
    assert error.cure == "remove the older one"


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (b"{", "JSONDecodeError"),
        (b"\xff\xfe\x00", "UnicodeDecodeError"),
        (b"[]", "TypeError"),
        (b"{}", "KeyError('weight_map')"),
        (b'{"weight_map": ["a"]}', "AttributeError"),
        (b'{"weight_map": {"a": 1}}', "TypeError"),
        (b'{"weight_map": {"a": null}}', "TypeError"),
        (b"[" * 100_000, "RecursionError"),
    ],
    ids=["json", "utf-8", "list", "no map", "map", "file", "null", "deep"],
)
def test_index_that_is_none(tmp_path, text, got):
    (tmp_path / INDEX).write_bytes(text)
    error = fails(SafetensorsSource(tmp_path), InvalidInfo)
    assert error.what == "The index is not one of safetensors files"
    assert error.where.endswith(INDEX)
    assert "weight_map" in error.expected
    assert got in error.got


def test_index_that_cannot_be_read(tmp_path):
    (tmp_path / INDEX).symlink_to("gone")
    save_file({"w": torch.ones(1)}, tmp_path / "m.safetensors")
    assert "FileNotFoundError" in fails(SafetensorsSource(tmp_path), InvalidInfo).got


@pytest.mark.parametrize(
    "file",
    ["../out.safetensors", "{}/out.safetensors", "a/../../out.safetensors", "..\\o", "", "."],
)
def test_index_that_leaves_the_folder(tmp_path, file):
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "out.safetensors")
    write_index(folder, w=file.format(tmp_path))
    error = fails(SafetensorsSource(folder), InvalidInfo)
    assert error.what == "The index names a file outside of the folder"
    assert error.where.endswith(INDEX)
    assert "where it comes from" in error.cure


def test_index_that_names_a_missing_file(tmp_path):
    sharded(tmp_path)
    (tmp_path / "m-2.safetensors").unlink()
    error = fails(SafetensorsSource(tmp_path), ManifestMismatch)
    assert error.what == "The index names a file that is missing"
    assert error.expected == "m-2.safetensors, for tensor 'a'"
    assert "incomplete" in error.cure


@pytest.mark.parametrize(
    ("change", "name", "expected", "got"),
    [
        ({"q": "m-1.safetensors"}, "q", "in m-1.safetensors", "in none of the files"),
        ({"z": "m-2.safetensors"}, "z", "in m-2.safetensors", "in m-1.safetensors"),
        ({"z": None}, "z", "not in the checkpoint", "in m-1.safetensors"),
    ],
    ids=["missing", "elsewhere", "not named"],
)
def test_index_and_files_differ(tmp_path, change, name, expected, got):
    sharded(tmp_path)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"] | change
    write_index(tmp_path, **{key: file for key, file in weight_map.items() if file})
    error = fails(SafetensorsSource(tmp_path), ManifestMismatch)
    assert error.what == f"The index and the files disagree on tensor {name!r}"
    assert error.expected == expected
    assert error.got == got
    assert error.cure == "save the checkpoint again"


@pytest.mark.parametrize("index", [True, False])
def test_name_in_two_files(tmp_path, index):
    sharded(tmp_path)
    save_file({"a": torch.tensor(3), "z": torch.ones(1)}, tmp_path / "m-2.safetensors")
    if not index:
        (tmp_path / INDEX).unlink()
    error = fails(SafetensorsSource(tmp_path), ManifestMismatch)
    assert error.what == "Tensor 'z' is in two files"
    assert error.got == "m-1.safetensors and m-2.safetensors"
    assert "another checkpoint" in error.cure


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-1],
        lambda b: b[:40],
        lambda b: b"",
        lambda b: b"garbage" * 9,
        lambda b: b + b"x",
    ],
    ids=["data", "header", "empty", "garbage", "longer"],
)
def test_damaged_file(tmp_path, damage):
    """In the last file, and yet nothing is yielded of the first one."""
    sharded(tmp_path)
    path = tmp_path / "m-2.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    error = fails(SafetensorsSource(tmp_path), CorruptTransfer)
    assert error.what == "A file of the checkpoint cannot be read"
    assert error.where == str(path)
    assert error.got.startswith(f"{path.stat().st_size} bytes; safetensors says: ")
    assert "complete safetensors file" in error.expected
    assert "fetch or save it again" in error.cure


def test_file_that_changes_during_a_pass(tmp_path):
    sharded(tmp_path)
    walk = iter(SafetensorsSource(tmp_path))
    next(walk)
    next(walk)
    save_file({"other": torch.ones(1)}, tmp_path / "m-2.safetensors")  # not open yet
    with pytest.raises(CorruptTransfer, match="cannot be read") as error:
        next(walk)
    assert "unchanged while it is read" in error.value.expected


def _in_place(path, content):
    with path.open("r+b") as file:
        file.write(content)
    before = path.stat().st_mtime_ns
    os.utime(path, ns=(before, before + 1))  # however coarse the clock is


def _renamed(path, content):
    before = path.stat()
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.replace(path)


@pytest.mark.parametrize("write", [_in_place, _renamed, lambda path, _: path.unlink()])
@pytest.mark.parametrize("file", ["m-1.safetensors", "m-2.safetensors"])
def test_file_written_during_a_pass(tmp_path, write, file):
    """With the same names and shapes: nothing else would tell."""
    sharded(tmp_path)
    walk = iter(SafetensorsSource(tmp_path))
    next(walk)
    path = tmp_path / file
    write(path, path.read_bytes())
    with pytest.raises((CorruptTransfer, InvalidInfo)) as error:
        list(walk)
    assert error.value.where == str(path)
    if path.exists():
        assert error.value.what == "A file of the checkpoint was written during the pass"
        assert "after push has returned" in error.value.cure
    sharded(tmp_path)
    assert len(list(SafetensorsSource(tmp_path))) == 3


def test_file_that_cannot_be_opened(tmp_path):
    (tmp_path / "m.safetensors").mkdir()
    error = fails(SafetensorsSource(tmp_path), InvalidInfo)
    assert error.what == "A file of the checkpoint cannot be opened"
    assert error.where == str(tmp_path / "m.safetensors")


def test_dtype_that_torch_has_not(tmp_path):
    header = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"abc")
    error = fails(SafetensorsSource(tmp_path), ManifestMismatch)
    assert error.what == "Tensor 'w' has a dtype that cannot be sent"
    assert error.got == "F6_E2M3"
    assert "BF16" in error.expected
    assert "another dtype" in error.cure


def test_no_tensors(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ManifestMismatch, match="yields no tensors"):
        SafetensorsSource(tmp_path).manifest()


def test_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(BackendUnavailable, match="without safetensors") as error:
        SafetensorsSource(tmp_path)
    assert error.value.cure == "pip install safetensors"
    assert error.value.where == "SafetensorsSource"
