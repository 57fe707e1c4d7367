"""The least that a stage could cost: read the columns that it needs, and write its ready output.

    python benchmarks/floor.py DATASET column,column,… OUTPUT [--sidecar FILE column,column …] --ready FILE

Prints the CPU seconds of start-up, reading and writing. The output lies in memory when the writing starts; loading
it is not counted. It is written with the encodings of the file that it is read from.
"""

import argparse
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

BLOCK = 1 << 19


def read(file: Path, columns: list[str]) -> int:
    """Read columns of a file and drop them; the rows."""
    with pq.ParquetFile(file, pre_buffer=False) as parquet:
        return parquet.read(columns=columns, use_threads=False).num_rows


def write(table: pa.Table, file: Path) -> None:
    """Write a sidecar as Regrasp does: zstd, delta-packed integers, a dictionary for texts only."""
    text = [field.name for field in table.schema if pa.types.is_dictionary(field.type)]
    whole = [field.name for field in table.schema if pa.types.is_integer(field.type)]
    with pq.ParquetWriter(
        file,
        table.schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=text,
        column_encoding=dict.fromkeys(whole, "DELTA_BINARY_PACKED"),
        store_schema=False,
    ) as writer:
        for start in range(0, table.num_rows, BLOCK):
            writer.write_table(table.slice(start, BLOCK))


def main() -> None:
    """Time the three parts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("columns")
    parser.add_argument("output", type=Path)
    parser.add_argument("--sidecar", nargs=2, action="append", default=[])
    parser.add_argument("--ready", type=Path, required=True)
    options = parser.parse_args()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    started = time.process_time()
    for file in sorted(options.dataset.glob("data/*/*.parquet")):
        read(file, options.columns.split(","))
    for file, columns in options.sidecar:
        read(Path(file), columns.split(","))
    was_read = time.process_time() - started
    schema = pq.read_schema(options.ready)
    text = [field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_dictionary(field.type)]
    with pq.ParquetFile(options.ready, read_dictionary=text) as parquet:
        ready = parquet.read(use_threads=False).combine_chunks()
    loaded = time.process_time()
    write(ready, options.output)
    print(f"{started:.4f} {was_read:.4f} {time.process_time() - loaded:.4f}")


if __name__ == "__main__":
    main()
