"""New knowledge beside a dataset: tagged parquet files, sorted, with their provenance inside."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from regrasp.core.errors import MissingSidecar, SidecarError, listing, nearest
from regrasp.core.provenance import Provenance
from regrasp.data.columns import (
    Block,
    ColumnStream,
    open_parquet,
    read_blocks,
    read_table,
    scalars,
    texts_to_arrow,
    to_arrow,
    to_numpy,
)
from regrasp.data.dataset import Dataset
from regrasp.data.index import EpisodeIndex
from regrasp.data.storage import Transaction

Kind = Literal["outcomes", "returns", "values", "advantages", "progress"]
_METADATA_KEY = b"regrasp"
_ROW_KEYS = ("episode_index", "frame_index")
_KEYS = [("episode_index", pa.int64()), ("frame_index", pa.int64())]
SCHEMAS: dict[str, pa.Schema] = {
    "outcomes": pa.schema([("episode_index", pa.int64()), ("outcome", pa.string()), ("source", pa.string())]),
    "returns": pa.schema([*_KEYS, ("return", pa.float32()), ("reward", pa.float32()), ("prompt", pa.string())]),
    "values": pa.schema([*_KEYS, ("value", pa.float32())]),
    "advantages": pa.schema(
        [
            *_KEYS,
            ("num_valid_rewards", pa.int64()),
            ("advantage_continuous", pa.float64()),
            ("return", pa.float64()),
            ("value_current", pa.float64()),
            ("value_next", pa.float64()),
            ("reward_sum", pa.float64()),
            ("reward_sum_raw", pa.float64()),
            ("dataset_name", pa.string()),
            ("advantage", pa.bool_()),
        ]
    ),
    "progress": pa.schema([("index", pa.int64()), *_KEYS, ("progress_sparse", pa.float32())]),
}
"""The columns of each kind of sidecar; names and meanings are RLinf's, and LeRobot's for progress."""


def sidecar_path(dataset: Dataset, kind: Kind, tag: str) -> Path:
    """Where the sidecar of a tag lies; ``{kind}.parquet`` for the empty tag, as RLinf writes it."""
    return dataset.sidecar_dir / (f"{kind}_{tag}.parquet" if tag else f"{kind}.parquet")


class SidecarWriter:
    """Writes one sidecar in canonical order, block by block, into a transaction."""

    def __init__(self, transaction: Transaction, path: Path, kind: Kind) -> None:
        """Prepare the file that appears at ``path`` when the transaction commits."""
        self.path = path
        schema = SCHEMAS[kind]
        text = [field.name for field in schema if pa.types.is_string(field.type)]
        whole = [field.name for field in schema if pa.types.is_integer(field.type)]
        coded_text = pa.dictionary(pa.int32(), pa.string())
        self._schema = pa.schema([pa.field(f.name, coded_text) if f.name in text else f for f in schema])
        self._writer = pq.ParquetWriter(
            transaction.create(path),
            self._schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=text,  # type: ignore[arg-type] - arrow takes a list of columns too
            column_encoding=dict.fromkeys(whole, "DELTA_BINARY_PACKED"),
            store_schema=False,
        )

    def write(self, columns: Mapping[str, np.ndarray | pa.Array]) -> None:
        """Append rows. A text column is given as (codes, texts) made by ``coded``."""
        arrays = [to_arrow(columns[field.name], field.type) for field in self._schema]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))

    def close(self, provenance: Provenance, extra: Mapping[str, str] | None = None) -> None:
        """Finish the file with its provenance, and with other key-value metadata that a reader expects."""
        self._writer.add_key_value_metadata({_METADATA_KEY.decode(): provenance.to_json(), **(extra or {})})
        self._writer.close()


def coded(codes: np.ndarray, texts: Sequence[str]) -> pa.DictionaryArray:
    """A text column from each row's position in ``texts``."""
    return pa.DictionaryArray.from_arrays(to_arrow(codes, pa.int32()), texts_to_arrow(texts))


def read_provenance(path: Path) -> Provenance | None:
    """The provenance inside a sidecar; None for a file that Regrasp did not write.

    Raises:
        SidecarError: It cannot be read.
    """
    metadata = open_parquet(path).metadata.metadata or {}
    if _METADATA_KEY not in metadata:
        return None
    try:
        return Provenance.from_json(metadata[_METADATA_KEY])
    except (ValueError, TypeError) as error:
        message = f"'{path}' holds a provenance that cannot be read ({error}). Mend: make it again with --overwrite."
        raise SidecarError(message) from None


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """A sidecar that was found to belong to its dataset."""

    dataset: Dataset
    kind: Kind
    tag: str
    path: Path
    provenance: Provenance | None

    @property
    def command(self) -> str:
        """The command that makes a sidecar of this kind."""
        return _COMMANDS[self.kind]

    @cached_property
    def id(self) -> str:
        """What later files record as their input: the provenance's id, or a digest of a file that has none."""
        if self.provenance is not None:
            return self.provenance.id
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    @cached_property
    def excluded(self) -> set[int]:
        """The episodes that were left out on purpose."""
        return set((self.provenance.notes if self.provenance else {}).get("excluded", []))

    def stream(self, columns: Sequence[str], positions: np.ndarray) -> ColumnStream:
        """Columns of the episodes at ``positions`` of the dataset's index, ascending; every row's key is checked.

        Raises:
            SidecarError: It has other rows than the dataset, or an episode at ``positions`` was left out of it.
        """
        numbers = self.dataset.index().episode_index[positions].tolist()
        lacking = [number for number in numbers if number in self.excluded]
        if lacking:
            message = (
                f"'{self.path}' leaves out the episodes {listing(lacking)} of '{self.dataset.path}', which are needed. "
                f"Mend: make it again with `{self.command} … --tag {self.tag} --overwrite`."
            )
            raise SidecarError(message)
        blocks = _checked_blocks(self, list(columns), positions)
        return ColumnStream(blocks, f"'{self.path}'")


_COMMANDS: dict[str, str] = {
    "returns": "regrasp returns",
    "values": "regrasp value predict",
    "advantages": "regrasp advantages",
    "progress": "regrasp progress",
}


def open_sidecar(dataset: Dataset, kind: Kind, tag: str, *, reader: str) -> Sidecar:
    """Find a sidecar and check that it was made from the dataset as it is now.

    Args:
        dataset: The dataset.
        kind: What is wanted.
        tag: Its tag.
        reader: The stage that reads it, for the message.

    Raises:
        MissingSidecar: There is none; the tags that exist are named.
        SidecarError: It was made from another version of the dataset, lacks columns, or cannot be read.
    """
    path = sidecar_path(dataset, kind, tag)
    if not path.is_file():
        found = [p.stem.removeprefix(f"{kind}_") for p in sorted(dataset.sidecar_dir.glob(f"{kind}_*.parquet"))]
        message = (
            f"'{dataset.path}' has no {kind} tagged {tag!r}, which `regrasp {reader}` reads. "
            f"Found: {listing(found) or f'no {kind} at all'}.{nearest(tag, found)} "
            f"Mend: {_COMMANDS[kind]} … --tag {tag}"
        )
        raise MissingSidecar(message)
    missing = [field.name for field in SCHEMAS[kind] if field.name not in open_parquet(path).schema_arrow.names]
    missing = [name for name in missing if name not in {"prompt", "dataset_name"}]
    if missing:
        mend = f"Mend: make it again with `{_COMMANDS[kind]} … --tag {tag} --overwrite`"
        message = f"'{path}' lacks the columns {listing(missing)}. {mend}."
        raise SidecarError(message)
    provenance = read_provenance(path)
    sidecar = Sidecar(dataset=dataset, kind=kind, tag=tag, path=path, provenance=provenance)
    index = dataset.index()
    if provenance is not None and provenance.fingerprint != index.fingerprint:
        raise _stale(sidecar, index)
    return sidecar


def _stale(sidecar: Sidecar, index: EpisodeIndex) -> SidecarError:
    when = f" on {sidecar.provenance.created}" if sidecar.provenance and sidecar.provenance.created else ""
    change = describe_change(index, _read_sorted(sidecar.path, []), sidecar.excluded)
    text = change or "the same frames, but other timestamps or task texts"
    message = (
        f"'{sidecar.path}' was written{when} from another version of '{sidecar.dataset.path}': the dataset now holds "
        f"{text}. Mend: make it again with `{sidecar.command} … --tag {sidecar.tag} --overwrite`."
    )
    return SidecarError(message)


def describe_change(index: EpisodeIndex, rows: Block, excluded: set[int]) -> str | None:
    """How a dataset's frames differ from the rows of a sidecar, in words; None where they are the same.

    Args:
        index: The dataset as it is.
        rows: The sidecar's ``episode_index`` and ``frame_index``, sorted.
        excluded: Episodes that the sidecar left out on purpose.
    """
    numbers, starts, counts = np.unique(rows["episode_index"], return_index=True, return_counts=True)
    before = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    first = dict(zip(numbers.tolist(), starts.tolist(), strict=True))
    now = dict(zip(index.episode_index.tolist(), index.length.tolist(), strict=True))
    added = [n for n in now if n not in before and n not in excluded]
    removed = [n for n in before if n not in now]
    changed = [f"{n} ({now[n]} frames, {before[n]} in the sidecar)" for n in now if n in before and now[n] != before[n]]
    same = [n for n in now if before.get(n) == now[n]]
    frames = {n: rows["frame_index"][first[n] : first[n] + now[n]] for n in same}
    renumbered = [n for n in same if not np.array_equal(frames[n], index.frames(index.position(n)))]
    parts = [
        f"episodes that it lacks ({listing(added)})" if added else "",
        f"none of its episodes {listing(removed)}" if removed else "",
        f"another number of frames in episode {listing(changed, 4)}" if changed else "",
        f"other frame numbers in episode {listing(renumbered)}" if renumbered else "",
    ]
    return "; ".join(part for part in parts if part) or None


def _read_sorted(path: Path, columns: list[str]) -> Block:
    """A whole file in canonical order; for files that are not sorted, and for messages."""
    names = list(dict.fromkeys([*_ROW_KEYS, *columns]))
    block = _block(read_table(path, names), names)
    order = np.lexsort([block["frame_index"], block["episode_index"]])
    return {name: values[order] for name, values in block.items()}


def _block(table: pa.Table, names: list[str]) -> Block:
    keys = {name: scalars(table[name], name, np.int64) for name in _ROW_KEYS}
    return keys | {name: to_numpy(table[name], name) for name in names if name not in keys}


def _checked_blocks(sidecar: Sidecar, columns: list[str], positions: np.ndarray) -> Iterator[Block]:
    """Yield blocks of rows whose keys are the dataset's; a file in another order is sorted first."""
    index = sidecar.dataset.index()
    covered = np.array([p for p in range(len(index.length)) if int(index.episode_index[p]) not in sidecar.excluded])
    wanted = np.isin(covered, positions)
    expected = _ExpectedKeys(index, covered, wanted)
    if open_parquet(sidecar.path).metadata.num_rows != int(index.length[covered].sum()):
        raise _rows_differ(sidecar, index)
    names = list(dict.fromkeys([*_ROW_KEYS, *columns]))
    done = 0
    for table in read_blocks(sidecar.path, names):
        block = _block(table, names)
        keep = expected.matches(block)
        if keep is None:
            break
        done += len(block["episode_index"])
        yield {name: block[name][keep] for name in columns}
    if done == int(index.length[covered].sum()) and expected.finished():
        return
    whole = _read_sorted(sidecar.path, columns)
    episode, frame = index.keys(covered)
    if not (np.array_equal(episode, whole["episode_index"]) and np.array_equal(frame, whole["frame_index"])):
        raise _rows_differ(sidecar, index)
    keep = np.repeat(wanted, index.length[covered])[done:]
    yield {name: whole[name][done:][keep] for name in columns}


@dataclass
class _ExpectedKeys:
    """The keys that a sidecar's rows must have, block by block."""

    index: EpisodeIndex
    covered: np.ndarray
    wanted: np.ndarray
    episode: int = 0
    inside: int = 0

    def matches(self, block: Block) -> np.ndarray | None:
        """Which rows of the next block are wanted, or None where the block is not what comes next."""
        rows = len(block["episode_index"])
        lengths = self.index.length[self.covered]
        ends = np.cumsum(lengths[self.episode :]) - self.inside
        stop = self.episode + int(np.searchsorted(ends, rows, side="left")) + 1
        if rows == 0:
            return np.zeros(0, dtype=bool)
        if not len(ends) or ends[-1] < rows:
            return None
        episode, frame = self.index.keys(self.covered[self.episode : stop])
        span = slice(self.inside, self.inside + rows)
        if not (
            np.array_equal(episode[span], block["episode_index"]) and np.array_equal(frame[span], block["frame_index"])
        ):
            return None
        keep = np.repeat(self.wanted[self.episode : stop], lengths[self.episode : stop])[span]
        complete = int(np.searchsorted(ends, rows, side="right"))
        self.inside = rows - int(ends[complete - 1]) if complete else self.inside + rows
        self.episode += complete
        return keep

    def finished(self) -> bool:
        return self.episode == len(self.covered)


def _rows_differ(sidecar: Sidecar, index: EpisodeIndex) -> SidecarError:
    change = describe_change(index, _read_sorted(sidecar.path, []), sidecar.excluded) or "rows of other episodes"
    message = (
        f"'{sidecar.path}' does not have the rows of '{sidecar.dataset.path}': the dataset holds {change}. "
        f"Mend: make it again with `{sidecar.command} … --tag {sidecar.tag} --overwrite`."
    )
    return SidecarError(message)


def existing_is_same(path: Path, provenance: Provenance, *, overwrite: bool) -> bool:
    """Whether a tag has been written already with the same content.

    Returns:
        True if the file exists and was made from the same config, dataset and inputs.

    Raises:
        SidecarError: It exists with another content and ``overwrite`` is False.
    """
    if not path.is_file():
        return False
    try:
        old = read_provenance(path)
    except ValueError:
        old = None
    if old is not None and old.id == provenance.id:
        return True
    if overwrite:
        return False
    if old is None:
        how = "it was not written by Regrasp, or is damaged"
    else:
        changed = [k for k in provenance.config if old.config.get(k) != provenance.config[k]]
        dataset = "the dataset has changed" if old.fingerprint != provenance.fingerprint else "its inputs have changed"
        stage = f"it was written by `regrasp {old.stage}`" if old.stage != provenance.stage else dataset
        how = "; ".join(_difference(k, old.config.get(k), provenance.config[k]) for k in changed) or stage
    message = (
        f"'{path}' exists already, and would not be the same: {how}. "
        "Mend: choose another --tag, or replace it with --overwrite."
    )
    raise SidecarError(message)


def all_exist_same(made: Iterable[tuple[Path, Provenance]], *, overwrite: bool) -> bool:
    """Whether all files of a run were written already with the same content; see ``existing_is_same``."""
    return all([existing_is_same(path, provenance, overwrite=overwrite) for path, provenance in made])


def _difference(name: str, old: object, new: object) -> str:
    """How one setting changed; of a table, its first entry that did."""
    if isinstance(old, dict) and isinstance(new, dict):
        key = next(key for key in [*new, *old] if old.get(key) != new.get(key))
        return _difference(f"{name} of {key!r}", old.get(key), new.get(key))
    return f"{name} was {old!r} and is now {new!r}"
