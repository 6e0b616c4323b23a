"""How fast a preparation is beside its tokenizer's library: python -m tests.data.rate [MEGABYTES]

Source code of the standard library as a parquet file of FineWeb-Edu's schema is prepared with GPT-2 tokens in rows of 8,192.
Prints the bytes a second of the library alone (one thread, the same documents), those of preparations with one and two
processes, each one's ratio to the library, and the most memory that the preparing process had.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tangolm.data import prepare, tokenizer_gpt2

DUMPS = ("CC-MAIN-2013-20",) * 18 + ("CC-MAIN-2023-50", "CC-MAIN-2024-10")


def measure(megabytes: float) -> dict[str, float]:
    encoding = tokenizer_gpt2._encoding()
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    pieces = [
        text[at : at + 5000]
        for text in (f.read_text("utf-8", "replace") for f in files)
        for at in range(0, len(text), 5000)
    ]
    texts, size = [], 0
    for number, piece in enumerate(itertools.cycle(pieces)):
        texts.append(f"{number}\n{piece}")
        size += len(texts[-1].encode())
        if size > megabytes * 1e6:
            break
    start = time.perf_counter()
    for text in texts:
        encoding.encode_ordinary(text)
    library = size / (time.perf_counter() - start)
    found = {"library_bytes_per_second": library}
    with tempfile.TemporaryDirectory() as place:
        urls = [f"http://example.org/{number}" for number in range(len(texts))]
        dumps = [DUMPS[number % len(DUMPS)] for number in range(len(texts))]
        columns = {"text": texts, "url": urls, "dump": dumps}
        pq.write_table(pa.table(columns), Path(place) / "a.parquet", row_group_size=1000)
        for workers in (1, 2):
            start = time.perf_counter()
            prepare("fineweb-edu", Path(place) / "a.parquet", Path(place) / f"out{workers}", workers=workers)
            rate = size / (time.perf_counter() - start)
            found |= {f"{workers}_processes_bytes_per_second": rate, f"{workers}_processes_ratio": rate / library}
    found["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


if __name__ == "__main__":
    found = measure(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
    print(json.dumps({name: round(value, 3) for name, value in found.items()}, indent=1))
    print(f"{os.cpu_count()} cores")
