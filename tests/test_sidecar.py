"""Sidecars: what is written is what is read, and a file that does not fit its dataset is refused precisely."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrasp.core.errors import DatasetError, MissingSidecar, SidecarError
from regrasp.core.provenance import Provenance, digest
from regrasp.data import sidecar as sidecar_module
from regrasp.data.columns import read_blocks
from regrasp.data.dataset import Dataset, open_dataset
from regrasp.data.rlinf import mixture_with, read_mixture, write_stats
from regrasp.data.sidecar import (
    SCHEMAS,
    SidecarWriter,
    coded,
    existing_is_same,
    open_sidecar,
    read_provenance,
    sidecar_path,
)
from regrasp.data.storage import Transaction
from tests.datasets import EpisodeSpec, edit_parquet, write_dataset

EPISODES = [EpisodeSpec(5, task="fold"), EpisodeSpec(3, task="pour", index=4), EpisodeSpec(4, task="fold", index=7)]
KEYS = [(episode, frame) for episode, length in ((0, 5), (4, 3), (7, 4)) for frame in range(length)]
V30_FILE = "data/chunk-000/file-000.parquet"


def opened(path: Path, **options: Any) -> Dataset:
    return open_dataset(write_dataset(path / "a", **{"episodes": EPISODES, **options}))


def value(episode: int, frame: int) -> float:
    return -(episode + frame / 8)


def write_plain(dataset: Dataset, keys: list[tuple[int, int]], row_groups: int = 1000, **columns: Any) -> Path:
    """A values file as other tools write it: without provenance."""
    path = sidecar_path(dataset, "values", "x")
    table = {"episode_index": pa.array([e for e, _ in keys], pa.int64())}
    table["frame_index"] = pa.array([f for _, f in keys], pa.int64())
    table["value"] = pa.array([value(*key) for key in keys], pa.float32())
    pq.write_table(pa.table(table | columns), path, row_group_size=row_groups)
    return path


def write_ours(dataset: Dataset, tag: str = "x", notes: dict[str, Any] | None = None, **provenance: Any) -> Path:
    """A values file of Regrasp's, without the episodes that ``notes`` exclude."""
    excluded = (notes or {}).get("excluded", [])
    index = dataset.index()
    path = sidecar_path(dataset, "values", tag)
    made = {"stage": "value predict", "config": {}, "fingerprint": index.fingerprint, "created": "2026-11-30"}
    with Transaction() as transaction:
        writer = SidecarWriter(transaction, path, "values")
        for position in np.flatnonzero(~np.isin(index.episode_index, excluded)):
            episode, frame = index.keys(np.array([position]))
            values = np.array([value(*key) for key in zip(episode.tolist(), frame.tolist(), strict=True)])
            writer.write({"episode_index": episode, "frame_index": frame, "value": values})
        writer.close(Provenance(**{**made, "notes": notes or {}, **provenance}))
        transaction.commit()
    return path


def read(dataset: Dataset, positions: list[int], tag: str = "x") -> list[float]:
    stream = open_sidecar(dataset, "values", tag, reader="advantages").stream(["value"], np.array(positions))
    return stream.take(int(dataset.index().length[positions].sum()))["value"].tolist()


def expected(episodes: list[int]) -> list[float]:
    return [np.float32(value(*key)) for key in KEYS if key[0] in episodes]


def test_what_is_written_is_what_is_read(tmp_path: Path):
    dataset = opened(tmp_path)
    write_ours(dataset)
    assert read(dataset, [0, 1, 2]) == expected([0, 4, 7])
    assert read(dataset, [0, 2]) == expected([0, 7])
    assert read(dataset, [1]) == expected([4])


def columns_of(kind: str) -> dict[str, Any]:
    """Twelve rows of every column of a kind."""
    keys = {"episode_index": np.array([e for e, _ in KEYS]), "frame_index": np.array([f for _, f in KEYS])}
    made: dict[str, Any] = {}
    for place, field in enumerate(SCHEMAS[kind]):
        if field.name in keys:
            made[field.name] = keys[field.name]
        elif pa.types.is_string(field.type):
            made[field.name] = coded(np.arange(12) % 3, ["", "été", f"text {place}"])
        elif pa.types.is_boolean(field.type):
            made[field.name] = np.arange(12) % 3 == 0
        elif pa.types.is_integer(field.type):
            made[field.name] = np.arange(12) + place
        else:
            made[field.name] = np.arange(12) / 8 + place
    return made


@pytest.mark.parametrize("kind", SCHEMAS)
def test_any_parquet_reader_finds_the_documented_columns(tmp_path: Path, kind: Any):
    columns = columns_of(kind)
    with Transaction() as transaction:
        writer = SidecarWriter(transaction, tmp_path / "a.parquet", kind)
        for part in (slice(0, 5), slice(5, 12)):
            writer.write({name: values[part] for name, values in columns.items()})
        writer.close(Provenance(stage="x", config={}, fingerprint="f"), {"extra": "kept"})
        transaction.commit()
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.schema.remove_metadata().equals(SCHEMAS[kind])
    for name, values in columns.items():
        assert table[name].to_pylist() == (values.to_pylist() if isinstance(values, pa.Array) else values.tolist())
    assert table.schema.metadata[b"extra"] == b"kept"
    first = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0).column(0)
    assert first.compression == "ZSTD"


def test_provenance_survives_the_file(tmp_path: Path):
    dataset = opened(tmp_path)
    made = {
        "config": {"gamma": 0.9, "scale": {"été": [-1, 0]}},
        "inputs": {"returns": "abc"},
        "scale": {"scope": "task"},
    }
    path = write_ours(dataset, **made, notes={"tags": {"returns": "base"}}, statistics={"mean": -0.5})
    found = read_provenance(path)
    assert found is not None
    assert (found.config, found.inputs, found.scale) == tuple(made.values())
    assert (found.notes, found.statistics) == ({"tags": {"returns": "base"}}, {"mean": -0.5})
    assert (found.stage, found.created, found.version) == ("value predict", "2026-11-30", "0.1.0")
    stored = json.loads((pq.read_schema(path).metadata or {})[b"regrasp"])
    assert stored["id"] == found.id


def test_the_id_tells_whether_making_it_again_would_give_the_same():
    first = Provenance(stage="returns", config={"a": 1, "b": 2}, fingerprint="f", inputs={"x": "1"})
    same = Provenance(stage="returns", config={"b": 2, "a": 1}, fingerprint="f", inputs={"x": "1"}, created="today")
    assert first.id == same.id
    for change in ({"stage": "values"}, {"config": {"a": 1}}, {"fingerprint": "g"}, {"inputs": {}}):
        assert Provenance(**{**first.__dict__, **change}).id != first.id


def test_provenance_of_a_newer_version_is_read_as_far_as_it_is_known():
    text = json.dumps({"stage": "s", "config": {}, "fingerprint": "f", "mood": "good", "id": "1"})
    assert Provenance.from_json(text) == Provenance(stage="s", config={}, fingerprint="f")


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.booleans(), max_size=4))
def test_a_digest_does_not_mind_the_order_of_keys(value: dict[str, Any]):
    assert digest(value) == digest(dict(reversed(value.items())))
    assert len(digest(value)) == 32


def test_a_file_without_provenance_has_none_and_is_known_by_its_content(tmp_path: Path):
    dataset = opened(tmp_path)
    path = write_plain(dataset, KEYS)
    assert read_provenance(path) is None
    first = open_sidecar(dataset, "values", "x", reader="advantages")
    before = first.id
    assert (first.provenance, first.excluded) == (None, set())
    write_plain(dataset, KEYS, value=pa.array([0.5] * 12, pa.float32()))
    second = open_sidecar(dataset, "values", "x", reader="advantages")
    assert second.id != before
    assert open_sidecar(dataset, "values", "x", reader="advantages").id == second.id


@pytest.mark.parametrize("text", [b"{", b"[]", b"7", b'{"stage": "x"}', b"\xff"])
def test_a_damaged_provenance_is_refused(tmp_path: Path, text: bytes):
    dataset = opened(tmp_path)
    path = write_plain(dataset, KEYS)
    edit_parquet(path, lambda table: table.replace_schema_metadata({b"regrasp": text}))
    with pytest.raises(SidecarError, match=r"values_x.parquet' holds a provenance that cannot be read .* Mend: "):
        open_sidecar(dataset, "values", "x", reader="advantages")


ORDERS = {
    "sorted": KEYS,
    "reversed": KEYS[::-1],
    "episodes out of order": KEYS[5:] + KEYS[:5],
    "one pair swapped at the end": [*KEYS[:-2], KEYS[-1], KEYS[-2]],
    "shuffled": [KEYS[row] for row in np.random.default_rng(0).permutation(12)],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("row_groups", [1, 4, 1000])
@pytest.mark.parametrize("options", [{}, {"layout": "v2.1"}, {"shuffle_rows": True}])
def test_files_in_any_order_are_accepted(
    tmp_path: Path, order: str, row_groups: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sidecar_module, "read_blocks", lambda path, names: read_blocks(path, names, rows=4))
    dataset = opened(tmp_path, **options)
    write_plain(dataset, ORDERS[order], row_groups)
    assert read(dataset, [0, 1, 2]) == expected([0, 4, 7])
    assert read(dataset, [0, 2]) == expected([0, 7])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 12])
def test_a_sorted_file_is_never_held_whole(tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sidecar_module, "read_blocks", lambda path, names: read_blocks(path, names, rows=rows))
    monkeypatch.setattr(sidecar_module, "_read_sorted", None)
    dataset = opened(tmp_path)
    write_plain(dataset, KEYS, row_groups=1)
    assert read(dataset, [0, 1, 2]) == expected([0, 4, 7])
    assert read(dataset, [1]) == expected([4])


@pytest.mark.parametrize("kind", [pa.int32(), pa.float64(), pa.list_(pa.int64(), 1)])
def test_keys_may_have_any_whole_type(tmp_path: Path, kind: pa.DataType):
    dataset = opened(tmp_path)
    is_list = pa.types.is_fixed_size_list(kind)
    numbers = pa.array([[e] if is_list else e for e, _ in KEYS], kind)
    write_plain(dataset, KEYS, episode_index=numbers)
    assert read(dataset, [0, 1, 2]) == expected([0, 4, 7])


DIFFERENCES = [
    (KEYS[:5] + KEYS[8:], "the dataset holds episodes that it lacks (4)"),
    (KEYS[:8], "the dataset holds episodes that it lacks (7)"),
    (KEYS[:-1], "the dataset holds another number of frames in episode 7 (4 frames, 3 in the sidecar)"),
    ([*KEYS, (7, 4)], "the dataset holds another number of frames in episode 7 (4 frames, 5 in the sidecar)"),
    ([*KEYS, (8, 0), (9, 0)], "the dataset holds none of its episodes 8, 9"),
    ([(7, f + 1) if e == 7 else (e, f) for e, f in KEYS], "the dataset holds other frame numbers in episode 7"),
    ([(3, f) if e == 4 else (e, f) for e, f in KEYS], "episodes that it lacks (4); none of its episodes 3"),
    ([*KEYS[:-1], KEYS[0]], "in episode 0 (5 frames, 6 in the sidecar), 7 (4 frames, 3 in the sidecar)"),
    ([*KEYS[:1], *KEYS[2:3], *KEYS[2:]], "the dataset holds other frame numbers in episode 0"),
    ([], "the dataset holds episodes that it lacks (0, 4, 7)"),
]


@pytest.mark.parametrize("row_groups", [1, 1000])
@pytest.mark.parametrize(("keys", "said"), DIFFERENCES)
def test_rows_that_are_not_the_datasets_are_refused_before_any_is_given(
    tmp_path: Path, keys: list[tuple[int, int]], said: str, row_groups: int
):
    dataset = opened(tmp_path)
    path = write_plain(dataset, keys, row_groups)
    with pytest.raises(SidecarError) as found:
        read(dataset, [0, 1, 2])
    assert str(found.value).startswith(f"'{path}' does not have the rows of '{dataset.path}': ")
    assert said in str(found.value)
    assert str(found.value).endswith("Mend: make it again with `regrasp value predict … --tag x --overwrite`.")


def test_rows_beyond_the_last_block_that_is_taken_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # A reader takes the rows that it needs and never comes to the block after them.
    monkeypatch.setattr(sidecar_module, "read_blocks", lambda path, names: read_blocks(path, names, rows=12))
    dataset = opened(tmp_path)
    write_plain(dataset, [*KEYS, (9, 0)], row_groups=12)
    with pytest.raises(SidecarError, match="none of its episodes 9"):
        read(dataset, [0, 1, 2])


def test_episodes_that_were_left_out_on_purpose_are_not_missed(tmp_path: Path):
    dataset = opened(tmp_path)
    write_ours(dataset, notes={"excluded": [4]})
    assert open_sidecar(dataset, "values", "x", reader="advantages").excluded == {4}
    assert read(dataset, [0, 2]) == expected([0, 7])
    assert read(dataset, [2]) == expected([7])


def test_an_episode_that_was_left_out_cannot_be_read(tmp_path: Path):
    dataset = opened(tmp_path)
    write_ours(dataset, notes={"excluded": [4]})
    with pytest.raises(SidecarError, match=r"leaves out the episodes 4 of .*, which are needed\. Mend: "):
        read(dataset, [0, 1, 2])


def test_an_episode_that_was_said_to_be_left_out_and_is_there_is_refused(tmp_path: Path):
    dataset = opened(tmp_path)
    path = write_plain(dataset, KEYS)
    made = Provenance(stage="s", config={}, fingerprint=dataset.index().fingerprint, notes={"excluded": [4]})
    edit_parquet(path, lambda table: table.replace_schema_metadata({"regrasp": made.to_json()}))
    with pytest.raises(SidecarError, match=r"does not have the rows of .*: the dataset holds rows of other episodes"):
        read(dataset, [0])


@pytest.mark.parametrize("tags", [[], ["base"], ["base", "fail300"]])
def test_a_missing_sidecar_is_said_with_those_that_are_there(tmp_path: Path, tags: list[str]):
    dataset = opened(tmp_path)
    for tag in tags:
        write_ours(dataset, tag)
    with pytest.raises(MissingSidecar) as found:
        open_sidecar(dataset, "values", "fail30", reader="advantages")
    message = str(found.value)
    assert message.startswith(f"'{dataset.path}' has no values tagged 'fail30', which `regrasp advantages` reads. ")
    assert f"Found: {', '.join(tags) or 'no values at all'}." in message
    assert ("Did you mean 'fail300'?" in message) == ("fail300" in tags)
    assert message.endswith("Mend: regrasp value predict … --tag fail30")
    assert isinstance(found.value, FileNotFoundError)


def test_the_empty_tag_is_the_file_that_rlinf_writes_without_one(tmp_path: Path):
    dataset = opened(tmp_path)
    assert sidecar_path(dataset, "advantages", "") == dataset.sidecar_dir / "advantages.parquet"
    assert sidecar_path(dataset, "advantages", "b") == dataset.sidecar_dir / "advantages_b.parquet"


def test_a_sidecar_without_a_needed_column_is_refused(tmp_path: Path):
    dataset = opened(tmp_path)
    edit_parquet(write_plain(dataset, KEYS), lambda table: table.drop_columns(["value", "frame_index"]))
    with pytest.raises(SidecarError, match=r"lacks the columns frame_index, value\. Mend: .* --tag x --overwrite"):
        open_sidecar(dataset, "values", "x", reader="advantages")


def test_prompts_and_dataset_names_are_not_needed(tmp_path: Path):
    dataset = opened(tmp_path)
    path = sidecar_path(dataset, "returns", "x")
    columns = {name: values for name, values in columns_of("returns").items() if name != "prompt"}
    pq.write_table(pa.table(columns), path)
    assert open_sidecar(dataset, "returns", "x", reader="advantages").path == path


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more"])
def test_a_damaged_sidecar_is_refused(tmp_path: Path, content: bytes):
    dataset = opened(tmp_path)
    sidecar_path(dataset, "values", "x").write_bytes(content)
    with pytest.raises(DatasetError, match=r"values_x.parquet' .* Mend: "):
        open_sidecar(dataset, "values", "x", reader="advantages")


def moved(table: pa.Table) -> pa.Table:
    times = pa.array([time + 0.5 for time in table["timestamp"].to_pylist()], pa.float32())
    return table.set_column(table.column_names.index("timestamp"), "timestamp", times)


def cut(table: pa.Table) -> pa.Table:
    return table.slice(1)  # without frame 0 of episode 0


def renumbered(table: pa.Table) -> pa.Table:
    frames = pa.array([frame + (frame > 2) for frame in table["frame_index"].to_pylist()])
    return table.set_column(table.column_names.index("frame_index"), "frame_index", frames)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"episodes": EPISODES[:2]}, "none of its episodes 7"),
        ({"episodes": [*EPISODES, EpisodeSpec(2, index=9)]}, "episodes that it lacks (9)"),
        ({"episodes": [EpisodeSpec(6, task="fold"), *EPISODES[1:]]}, "in episode 0 (6 frames, 5 in the sidecar)"),
        (cut, "another number of frames in episode 0 (4 frames, 5 in the sidecar)"),
        (renumbered, "other frame numbers in episode 0, 7"),
        (moved, "the same frames, but other timestamps or task texts"),
        ({"episodes": [EpisodeSpec(5, task="folds"), *EPISODES[1:]]}, "the same frames, but other timestamps or task"),
    ],
)
def test_a_sidecar_of_another_version_of_the_dataset_says_how_they_differ(tmp_path: Path, change: Any, said: str):
    dataset = opened(tmp_path)
    path = write_ours(dataset)
    content = path.read_bytes()
    if callable(change):
        edit_parquet(dataset.path / V30_FILE, change)
        dataset = open_dataset(dataset.path)
    else:
        dataset = opened(tmp_path / "changed", **change)
        path = sidecar_path(dataset, "values", "x")
        path.write_bytes(content)
    with pytest.raises(SidecarError) as found:
        open_sidecar(dataset, "values", "x", reader="advantages")
    begin = f"'{path}' was written on 2026-11-30 from another version of '{dataset.path}': the dataset now holds "
    assert str(found.value).startswith(begin)
    assert said in str(found.value)
    assert str(found.value).endswith("Mend: make it again with `regrasp value predict … --tag x --overwrite`.")


def test_a_sidecar_of_one_layout_serves_the_other(tmp_path: Path):
    old, new = opened(tmp_path / "old", layout="v2.1"), opened(tmp_path / "new")
    sidecar_path(new, "values", "x").write_bytes(write_ours(old).read_bytes())
    assert read(new, [0, 1, 2]) == expected([0, 4, 7])


MADE = Provenance(stage="returns", config={"gamma": 1.0, "scale": {"fold": [-9, 0], "pour": [-5, 0]}}, fingerprint="f")


def exists(path: Path, made: Provenance | None) -> Path:
    metadata = {} if made is None else {"regrasp": made.to_json()}
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata(metadata), path / "x.parquet")
    return path / "x.parquet"


def with_changes(**changes: Any) -> Provenance:
    return Provenance(**{**MADE.__dict__, **changes})


def test_a_tag_that_is_free_or_the_same_is_no_conflict(tmp_path: Path):
    assert existing_is_same(tmp_path / "none.parquet", MADE, overwrite=False) is False
    path = exists(tmp_path, with_changes(created="earlier", statistics={"mean": 1}))
    assert existing_is_same(path, MADE, overwrite=False) is True
    assert existing_is_same(path, MADE, overwrite=True) is True  # nothing to do either way


@pytest.mark.parametrize(
    ("old", "said"),
    [
        (with_changes(config={"gamma": 0.9, "scale": MADE.config["scale"]}), "gamma was 0.9 and is now 1.0"),
        (
            with_changes(config={"gamma": 1.0, "scale": {"fold": [-9, 0]}}),
            "scale of 'pour' was None and is now [-5, 0]",
        ),
        (
            with_changes(config={"gamma": 1.0, "scale": {**MADE.config["scale"], "stir": [-1, 0]}}),
            "scale of 'stir' was [-1, 0] and is now None",
        ),
        (with_changes(config={}), "gamma was None and is now 1.0; scale was None and is now {"),
        (with_changes(fingerprint="g"), "the dataset has changed"),
        (with_changes(inputs={"returns": "other"}), "its inputs have changed"),
        (with_changes(stage="relabel"), "it was written by `regrasp relabel`"),
        (None, "it was not written by Regrasp, or is damaged"),
    ],
)
def test_a_tag_with_another_content_is_refused_unless_it_may_be_replaced(
    tmp_path: Path, old: Provenance | None, said: str
):
    path = exists(tmp_path, old)
    with pytest.raises(SidecarError, match=re.escape(f"would not be the same: {said}")) as found:
        existing_is_same(path, MADE, overwrite=False)
    assert "Mend: choose another --tag, or replace it with --overwrite." in str(found.value)
    assert existing_is_same(path, MADE, overwrite=True) is False


def test_a_damaged_file_may_be_replaced(tmp_path: Path):
    path = tmp_path / "x.parquet"
    path.write_bytes(b"")
    with pytest.raises(SidecarError, match="or is damaged"):
        existing_is_same(path, MADE, overwrite=False)
    assert existing_is_same(path, MADE, overwrite=True) is False


def test_statistics_join_those_that_are_there(tmp_path: Path):
    dataset = opened(tmp_path)
    file = dataset.path / "meta/stats.json"
    before = json.loads(file.read_text())
    with Transaction() as transaction:
        write_stats(transaction, dataset, {"return": {"mean": -0.5}})
        transaction.commit()
    assert json.loads(file.read_text()) == before | {"return": {"mean": -0.5}}


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_statistics_that_cannot_be_read_are_not_replaced(tmp_path: Path, content: bytes):
    dataset = opened(tmp_path)
    (dataset.path / "meta/stats.json").write_bytes(content)
    with pytest.raises(DatasetError, match=r"stats.json' .* Mend: restore it, or leave --update-meta off"):
        write_stats(Transaction(), dataset, {})


def test_a_mixture_keeps_the_tags_of_other_runs(tmp_path: Path):
    dataset = opened(tmp_path)
    file = dataset.sidecar_dir / "mixture_config.yaml"
    assert read_mixture(dataset) == {}
    file.write_bytes(mixture_with({"mine": 1}, {"global_return_min": -9.0}, "a", {"unified_threshold": 0.5}))
    file.write_bytes(mixture_with(read_mixture(dataset), {"global_return_min": -8.0}, "b", {"unified_threshold": 0.25}))
    assert read_mixture(dataset) == {
        "mine": 1,
        "global_return_min": -8.0,
        "tags": {"a": {"unified_threshold": 0.5}, "b": {"unified_threshold": 0.25}},
    }


@pytest.mark.parametrize("content", ["{", "[1]", "tags: [1]", "text"])
def test_a_mixture_that_cannot_be_read_is_not_replaced(tmp_path: Path, content: str):
    dataset = opened(tmp_path)
    (dataset.sidecar_dir / "mixture_config.yaml").write_text(content)
    with pytest.raises(DatasetError, match=r"mixture_config.yaml' .* Mend: restore or remove it"):
        read_mixture(dataset)
