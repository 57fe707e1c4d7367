"""Every kind of bad input to the tabular stages: one clear paragraph, exit code 2, and not one file touched."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.datasets import EpisodeSpec, edit_info, edit_parquet, write_dataset
from tests.stage_runs import refused, regrasp, snapshot, succeeds, write_values

LABEL = ("--returns", "base", "--values", "base", "--tag", "x")
Words = list[object]
CASES: dict[str, tuple[Callable[[Path], Words], tuple[str, ...]]] = {}


def case(*named: str) -> Callable[[Callable[[Path], Words]], Callable[[Path], Words]]:
    """Register what arranges a case and gives the command, and what the paragraph has to name."""

    def register(arrange: Callable[[Path], Words]) -> Callable[[Path], Words]:
        CASES[arrange.__name__] = (arrange, named)
        return arrange

    return register


def returns(*datasets: Path) -> Words:
    return ["returns", "--rollouts", *datasets, "--tag", "x"]


def labelled(root: Path, **options: object) -> Path:
    """A dataset with returns and values."""
    dataset = write_dataset(root / "data", **options)
    write_values(dataset, "base")
    succeeds("returns", "--rollouts", dataset, "--tag", "base")
    return dataset


def first_file(dataset: Path) -> Path:
    return min(dataset.glob("data/*/*.parquet"))


def truncate(path: Path, kept: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])


# the dataset


@case("no_such", "no such path", "meta/info.json")
def no_such_path(root: Path) -> Words:
    return returns(root / "no_such")


@case("readme.txt", "meta/info.json")
def a_file(root: Path) -> Words:
    (root / "readme.txt").write_text("hello")
    return returns(root / "readme.txt")


@case("photos", "meta/info.json")
def not_a_lerobot_dataset(root: Path) -> Words:
    (root / "photos").mkdir()
    return returns(root / "photos")


@case("info.json", "JSON")
def broken_info(root: Path) -> Words:
    dataset = write_dataset(root / "data")
    truncate(dataset / "meta/info.json", 0.5)
    return returns(dataset)


@case("v9.0", "v2.1", "v3.0")
def unknown_version(root: Path) -> Words:
    dataset = write_dataset(root / "data")
    edit_info(dataset, codebase_version="v9.0")
    return returns(dataset)


@case("codebase_version")
def no_version(root: Path) -> Words:
    dataset = write_dataset(root / "data")
    edit_info(dataset, codebase_version=None)
    return returns(dataset)


@case("file-000.parquet", "truncated")
def truncated_parquet(root: Path) -> Words:
    dataset = write_dataset(root / "data")
    truncate(first_file(dataset), 0.6)
    return returns(dataset)


@case("file-000.parquet", "truncated")
def parquet_with_a_hole(root: Path) -> Words:
    dataset = write_dataset(root / "data", episodes=[EpisodeSpec(3000)])
    content = bytearray(first_file(dataset).read_bytes())
    end = len(content) - 8 - int.from_bytes(content[-8:-4], "little")  # where the footer begins
    content[4:end] = bytes(end - 4)
    first_file(dataset).write_bytes(content)
    return returns(dataset)


@case("episode_000001.parquet", "0 bytes")
def zero_byte_parquet(root: Path) -> Words:
    dataset = write_dataset(root / "data", layout="v2.1")
    (dataset / "data/chunk-000/episode_000001.parquet").write_bytes(b"")
    return returns(dataset)


@case("episode_000001.parquet", "does not exist")
def missing_parquet(root: Path) -> Words:
    dataset = write_dataset(root / "data", layout="v2.1")
    (dataset / "data/chunk-000/episode_000001.parquet").unlink()
    return returns(dataset)


@case("meta/episodes", "truncated")
def truncated_metadata(root: Path) -> Words:
    dataset = write_dataset(root / "data")
    truncate(next(dataset.glob("meta/episodes/*/*.parquet")), 0.5)
    return returns(dataset)


@case("tasks.parquet", "0 bytes")
def zero_byte_tasks(root: Path) -> Words:
    dataset = write_dataset(root / "data")
    (dataset / "meta/tasks.parquet").write_bytes(b"")
    return returns(dataset)


@case("without any frame", "1")
def an_episode_without_frames(root: Path) -> Words:
    dataset = write_dataset(root / "data", episodes=[EpisodeSpec(4), EpisodeSpec(5), EpisodeSpec(3)])
    edit_parquet(first_file(dataset), lambda table: table.filter(pc.not_equal(table["episode_index"], 1)))
    return returns(dataset)


@case("episode 0", "frame 3", "more than once")
def repeated_frame_numbers(root: Path) -> Words:
    dataset = write_dataset(root / "data", episodes=[EpisodeSpec(6)])
    edit_parquet(first_file(dataset), lambda table: pa.concat_tables([table.slice(0, 4), table.slice(3)]))
    return returns(dataset)


@case("no frames")
def no_episodes(root: Path) -> Words:
    dataset = write_dataset(root / "data")
    edit_parquet(first_file(dataset), lambda table: table.slice(0, 0))
    for path in dataset.glob("meta/episodes/*/*.parquet"):
        edit_parquet(path, lambda table: table.slice(0, 0))
    return returns(dataset)


@case("episode 1", "task_index 1", "meta/tasks")
def a_task_index_without_text(root: Path) -> Words:
    dataset = write_dataset(root / "data", episodes=[EpisodeSpec(4), EpisodeSpec(5, task="other")])
    edit_parquet(dataset / "meta/tasks.parquet", lambda table: table.slice(0, 1))
    return returns(dataset)


@case("'same'", "rename")
def two_datasets_of_one_name(root: Path) -> Words:
    return returns(write_dataset(root / "a/same"), write_dataset(root / "b/same"))


@case("one folder")
def one_dataset_twice(root: Path) -> Words:
    dataset = write_dataset(root / "data")
    return ["returns", "--demos", dataset, "--rollouts", dataset, "--tag", "x"]


@case("--rollouts")
def no_dataset(root: Path) -> Words:
    return ["returns", "--tag", "x"]


# outcomes


@case("1 of 2 episodes", "is_success is null", "--outcomes")
def a_null_outcome(root: Path) -> Words:
    episodes = [EpisodeSpec(4), EpisodeSpec(5, success=None)]
    return returns(write_dataset(root / "data", episodes=episodes, success_column="is_success"))


@case("2 of 2 episodes", "is_success", "not a true/false", "--outcomes")
def a_list_valued_outcome(root: Path) -> Words:
    return returns(write_dataset(root / "data", success_column="is_success", success_type="list"))


@case("2 of 2 episodes", "no episode_success, next.success or is_success", "--unknown exclude")
def no_outcome_at_all(root: Path) -> Words:
    return returns(write_dataset(root / "data", success_column=None))


@case("'unknown'", "--outcomes")
def an_unknown_outcome(root: Path) -> Words:
    episodes = [EpisodeSpec(4), EpisodeSpec(5, success=None)]
    options = {"success_column": "episode_success", "success_type": "string"}
    return returns(write_dataset(root / "data", episodes=episodes, **options))


@case("no episode", "known outcome")
def nothing_left_after_exclusion(root: Path) -> Words:
    return [*returns(write_dataset(root / "data", success_column=None)), "--unknown", "exclude"]


def outcome_file(root: Path, text: str | bytes, name: str = "ends.csv") -> Words:
    dataset = write_dataset(root / "data")
    (root / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return [*returns(dataset), "--outcomes", root / name]


@case("missing.csv", "no outcome file")
def a_missing_outcome_file(root: Path) -> Words:
    return [*returns(write_dataset(root / "data")), "--outcomes", root / "missing.csv"]


@case("episode_index", "ends.csv")
def an_outcome_file_without_its_columns(root: Path) -> Words:
    return outcome_file(root, "episode;ok\n0;1\n")


@case("'maybe'", "line 3")
def an_outcome_that_is_no_word(root: Path) -> Words:
    return outcome_file(root, "episode_index,outcome\n0,success\n1,maybe\n")


@case("7", "does not have")
def an_outcome_of_a_stranger(root: Path) -> Words:
    return outcome_file(root, "episode_index,outcome\n7,success\n")


@case("two different outcomes")
def two_outcomes_of_one_episode(root: Path) -> Words:
    return outcome_file(root, "episode_index,outcome\n0,success\n0,failure\n")


@case("ends.csv", "csv")
def an_outcome_file_that_is_no_text(root: Path) -> Words:
    return outcome_file(root, b"PK\x03\x04\xff\xfe\x00")


@case("ends.parquet", "truncated")
def a_truncated_outcome_file(root: Path) -> Words:
    return outcome_file(root, b"PAR1 no", "ends.parquet")


# settings


@case("--gamma", "[0, 1]", "1.5")
def gamma_out_of_range(root: Path) -> Words:
    return [*returns(write_dataset(root / "data")), "--gamma", 1.5]


@case("--gamma", "nan")
def gamma_not_a_number(root: Path) -> Words:
    return [*returns(write_dataset(root / "data")), "--gamma", "nan"]


@case("--failure-penalty", "-3")
def a_negative_penalty(root: Path) -> Words:
    return [*returns(write_dataset(root / "data")), "--failure-penalty", -3]


@case("--failure-penalty", "1e+39")
def a_penalty_beyond_float32(root: Path) -> Words:
    return [*returns(write_dataset(root / "data")), "--failure-penalty", "1e39"]


@case("--lookahead", "at least 1", "0")
def lookahead_out_of_range(root: Path) -> Words:
    return ["advantages", "--rollouts", labelled(root), *LABEL, "--lookahead", 0]


@case("--positive-fraction", "between 0 and 1", "1.0")
def a_fraction_of_everything(root: Path) -> Words:
    return ["advantages", "--rollouts", labelled(root), *LABEL, "--positive-fraction", 1]


@case("--positive-fraction", "0.0")
def a_fraction_of_nothing(root: Path) -> Words:
    return [*relabelled(root), "--positive-fraction", 0]


@case("--chunk-rows", "0")
def chunks_of_nothing(root: Path) -> Words:
    return ["advantages", "--rollouts", labelled(root), *LABEL, "--chunk-rows", 0]


@case("is 0", "penalty")
def returns_that_are_all_zero(root: Path) -> Words:
    return returns(write_dataset(root / "data", episodes=[EpisodeSpec(1)]))


@case("gamma 1", "--gamma is 0.5")
def another_gamma_than_the_returns(root: Path) -> Words:
    return ["advantages", "--rollouts", labelled(root), *LABEL, "--gamma", 0.5]


@case("--scale global", "scaled per task")
def another_scale_than_the_returns(root: Path) -> Words:
    return ["advantages", "--rollouts", labelled(root), *LABEL, "--scale", "global"]


@case("returns_base.parquet", "gamma was 1.0 and is now 0.5", "--overwrite")
def an_existing_tag_with_another_config(root: Path) -> Words:
    return ["returns", "--rollouts", labelled(root), "--tag", "base", "--gamma", 0.5]


@case("advantages_x.parquet", "not written by Regrasp", "--overwrite")
def an_existing_tag_of_another_tool(root: Path) -> Words:
    dataset = labelled(root)
    (dataset / "meta/advantages_x.parquet").write_bytes((dataset / "meta/values_base.parquet").read_bytes())
    return ["advantages", "--rollouts", dataset, *LABEL]


# sidecars


@case("no returns tagged 'bsae'", "Found: base", "Did you mean 'base'?", "regrasp returns")
def returns_of_another_tag(root: Path) -> Words:
    return ["advantages", "--rollouts", labelled(root), "--returns", "bsae", "--values", "base", "--tag", "x"]


@case("no values tagged", "no values at all", "regrasp value predict")
def no_values(root: Path) -> Words:
    dataset = labelled(root)
    (dataset / "meta/values_base.parquet").unlink()
    return ["advantages", "--rollouts", dataset, *LABEL]


@case("another version", "none of its episodes 2", "regrasp returns", "--overwrite")
def returns_of_another_version_of_the_dataset(root: Path) -> Words:
    dataset = labelled(root, episodes=[EpisodeSpec(4), EpisodeSpec(5), EpisodeSpec(3)])
    edit_parquet(first_file(dataset), lambda table: table.filter(pc.less(table["episode_index"], 2)))
    for path in dataset.glob("meta/episodes/*/*.parquet"):
        edit_parquet(path, lambda table: table.slice(0, 2))
    write_values(dataset, "base")
    return ["advantages", "--rollouts", dataset, *LABEL]


@case("another version", "task texts")
def returns_of_other_tasks(root: Path) -> Words:
    dataset = labelled(root)

    def rename(table: pa.Table) -> pa.Table:
        return table.set_column(table.schema.get_field_index("task"), "task", pa.array(["something else"]))

    edit_parquet(dataset / "meta/tasks.parquet", rename)
    return ["advantages", "--rollouts", dataset, *LABEL]


@case("values_base.parquet", "another number of frames in episode 1 (9 frames, 6 in the sidecar)", "regrasp value")
def values_with_missing_rows(root: Path) -> Words:
    dataset = labelled(root)
    edit_parquet(dataset / "meta/values_base.parquet", lambda table: table.slice(0, table.num_rows - 3))
    return ["advantages", "--rollouts", dataset, *LABEL]


@case("values_base.parquet", "does not have the rows")
def values_with_repeated_rows(root: Path) -> Words:
    dataset = labelled(root)
    edit_parquet(dataset / "meta/values_base.parquet", lambda table: table.take([0, *range(table.num_rows - 1)]))
    return ["advantages", "--rollouts", dataset, *LABEL]


@case("values_base.parquet", "lacks the columns value")
def values_without_their_column(root: Path) -> Words:
    dataset = labelled(root)
    edit_parquet(
        dataset / "meta/values_base.parquet", lambda table: table.rename_columns(["episode_index", "frame_index", "v"])
    )
    return ["advantages", "--rollouts", dataset, *LABEL]


@case("values_base.parquet", "truncated")
def truncated_values(root: Path) -> Words:
    dataset = labelled(root)
    truncate(dataset / "meta/values_base.parquet", 0.7)
    return ["advantages", "--rollouts", dataset, *LABEL]


@case("returns_base.parquet", "0 bytes")
def zero_byte_returns(root: Path) -> Words:
    dataset = labelled(root)
    (dataset / "meta/returns_base.parquet").write_bytes(b"")
    return ["advantages", "--rollouts", dataset, *LABEL]


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, number: float) -> None:
    dataset = labelled(tmp_path)

    def spoil(table: pa.Table) -> pa.Table:
        value = table["value"].to_numpy().copy()
        value[15] = number
        return table.set_column(2, "value", [value])

    edit_parquet(dataset / "meta/values_base.parquet", spoil)
    before = snapshot(tmp_path)
    said = refused("advantages", "--rollouts", dataset, *LABEL)
    assert "episode 1, frame 3" in said
    assert str(number) in said
    assert snapshot(tmp_path) == before


@case("made with 'data' as rollout", "now given as demo")
def returns_of_the_same_data_as_something_else(root: Path) -> Words:
    return ["advantages", "--demos", labelled(root), *LABEL]


@case("--pool rollouts")
def a_pool_of_no_dataset(root: Path) -> Words:
    dataset = write_dataset(root / "data")
    write_values(dataset, "base")
    succeeds("returns", "--demos", dataset, "--tag", "base")
    return ["advantages", "--demos", dataset, *LABEL, "--pool", "rollouts"]


@case("--correction-column takeover", "Did you mean 'my_takeover'?")
def a_column_of_corrections_that_is_not_there(root: Path) -> Words:
    episodes = [EpisodeSpec(9, interventions=((1, 2),)), EpisodeSpec(5, success=False)]
    dataset = labelled(root, episodes=episodes, intervention_column="my_takeover")
    return ["advantages", "--rollouts", dataset, *LABEL, "--correction-column", "takeover"]


@case("'action'", "corrections")
def a_column_of_corrections_that_is_no_flag(root: Path) -> Words:
    return ["advantages", "--rollouts", labelled(root), *LABEL, "--correction-column", "action"]


@case("mixture_config.yaml", "YAML")
def a_broken_mixture_file(root: Path) -> Words:
    dataset = labelled(root)
    (dataset / "meta/mixture_config.yaml").write_text("tags: [")
    return ["advantages", "--rollouts", dataset, *LABEL]


def relabelled(root: Path) -> Words:
    dataset = labelled(root)
    succeeds("advantages", "--rollouts", dataset, *LABEL)
    return ["relabel", "--rollouts", dataset, "--source", "x", "--tag", "y"]


@case("no advantages tagged 'z'", "Found: x")
def relabelling_of_another_tag(root: Path) -> Words:
    words = relabelled(root)
    return [*words[:-4], "--source", "z", "--tag", "y"]


@case("no returns tagged 'base'", "regrasp returns")
def relabelling_without_the_returns_that_it_needs(root: Path) -> Words:
    words = relabelled(root)
    (root / "data/meta/returns_base.parquet").unlink()
    return [*words, "--lookahead", 2]


@case("advantages_x.parquet", "does not have the rows")
def relabelling_of_missing_rows(root: Path) -> Words:
    words = relabelled(root)
    path = root / "data/meta/advantages_x.parquet"
    kept = pq.read_metadata(path).metadata
    edit_parquet(path, lambda table: table.slice(2).replace_schema_metadata(kept))
    return words


@case("--lookahead", "-1")
def relabelling_out_of_range(root: Path) -> Words:
    return [*relabelled(root), "--lookahead", "-1"]


@pytest.mark.parametrize("name", CASES)
def test_bad_input_gives_one_paragraph_and_leaves_every_file_alone(tmp_path: Path, name: str) -> None:
    arrange, named = CASES[name]
    words = arrange(tmp_path)
    before = snapshot(tmp_path)
    said = refused(*words)
    assert snapshot(tmp_path) == before
    for part in named:
        assert part.lower() in said.lower()
    # a setting out of range is mended by the range that the paragraph states
    assert "Mend: " in said or said.startswith("ConfigError: ")


@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
@pytest.mark.parametrize("broken", ["missing", "empty"])
def test_tabular_stages_go_on_without_a_video_that_inspect_names(tmp_path: Path, layout: str, broken: str) -> None:
    dataset = write_dataset(tmp_path / "data", cameras={"observation.images.top": (24, 24)}, layout=layout)
    video = min(dataset.rglob("*.mp4"))
    video.unlink() if broken == "missing" else video.write_bytes(b"")
    done = regrasp("inspect", dataset)
    assert done.code == 2
    assert video.name in done.out
    assert "value predict" in done.out
    assert "blocks returns" not in done.out
    write_values(dataset, "base")
    succeeds("returns", "--rollouts", dataset, "--tag", "base")
    succeeds("advantages", "--rollouts", dataset, *LABEL)


def test_tabular_stages_do_not_read_a_state_that_is_not_finite(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data", state=lambda episode, frame, size: np.full(size, np.nan))
    succeeds("returns", "--rollouts", dataset, "--tag", "base")


@contextlib.contextmanager
def ordinary_user() -> Iterator[Path]:
    """A folder that anyone may enter, while this process has no more rights than an ordinary user."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            if root:
                os.seteuid(0)


def test_a_read_only_folder_is_named_and_sidecars_mend_it(tmp_path: Path) -> None:
    succeeds(
        "returns", "--rollouts", write_dataset(tmp_path / "warm"), "--tag", "x"
    )  # loads what a user has no right to
    with ordinary_user() as folder:
        dataset = write_dataset(folder / "data")
        (dataset / "meta").chmod(0o555)
        before = snapshot(folder)
        said = refused("returns", "--rollouts", dataset, "--tag", "x")
        assert str(dataset / "meta") in said
        assert "--sidecars" in said
        assert snapshot(folder) == before
        succeeds("returns", "--rollouts", dataset, "--tag", "x", "--sidecars", folder / "beside")
        assert snapshot(dataset) == {path: content for path, content in before.items() if path != str(dataset)}
        succeeds("returns", "--rollouts", dataset, "--tag", "y", "--dry-run")
        (dataset / "meta").chmod(0o755)


def test_a_folder_of_sidecars_that_is_a_file_is_named(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data")
    (tmp_path / "beside").write_text("")
    before = snapshot(tmp_path)
    assert "beside" in refused("returns", "--rollouts", dataset, "--tag", "x", "--sidecars", tmp_path / "beside")
    assert snapshot(tmp_path) == before


def test_metadata_without_a_feature_is_no_surprise(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data")
    info = json.loads((dataset / "meta/info.json").read_text())
    edit_info(dataset, features={name: value for name, value in info["features"].items() if name != "next.success"})
    succeeds("returns", "--rollouts", dataset, "--tag", "x")
