"""Readers of files that people and programs write: recipes, plans, hardware, routes, journals, tables, training data. No torch."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fuzz import made_models as made
from fuzz.mutate import Sample, mutate_json, mutate_lines, mutate_parts, mutate_text
from fuzz.reader import Reader, put

RECIPES = Path(__file__).parents[2] / "recipes"


def texts(*found: str) -> Callable[[Path], list[Sample]]:
    return lambda folder: [(text.encode(),) for text in found]


# --- TOML and plain text


def read_recipe(data: bytes, folder: Path) -> None:
    from windlass.core.recipe.recipe import load_recipe

    load_recipe(put(folder, "recipe.toml", data))


def _recipes(folder: Path) -> list[Sample]:
    return [(path.read_bytes(),) for path in sorted(RECIPES.glob("*.toml"))]


CLUSTER = """[[node]]
name = "big"
count = 2
devices = "8xH100-80GB"
ram = "2TB"
ram_bandwidth = "400GB"
[[node]]
devices = "4xMy-Card"
[network]
bandwidth = "400Gb"
latency_us = 5.0
[device.My-Card]
memory = "48GB"
bandwidth = "1.2TB"
tflops = { bf16 = 180 }
link = "63GB"
kind = "cuda"
"""
HARDWARE = (
    "8xH100-80GB",
    "2x(8xH100-80GB)+1x(4xRTX-4090)@100Gb",
    "cpu:16",
    "4xH200@400Gb,2us",
    "RTX-4090,ram=64GB,disk=7GB/s",
    "2x(cpu:8,ram=32GB)@1Gb",
)


def read_cluster(data: bytes, folder: Path) -> None:
    from windlass.core.hardware.parse import parse_hardware

    parse_hardware(str(put(folder, "cluster.toml", data)))


def read_words(data: bytes, folder: Path) -> None:
    """What is given as one word of a command: hardware, addresses, sizes."""
    from windlass.core.hardware.parse import parse_hardware
    from windlass.core.ranks.address import parse_address, parse_workers
    from windlass.errors import Error
    from windlass.units import parse_bytes, parse_context, parse_count

    text = data.decode("utf-8", "replace")
    if text.strip().lower().endswith(".toml"):
        return
    readers: list[Callable[[str], object]] = [
        parse_hardware, lambda word: parse_address(word, "--at", 80), parse_workers, parse_bytes, parse_context, parse_count
    ]  # fmt: skip
    for read in readers:
        with contextlib.suppress(Error):
            read(text)


HOSTS = (
    "# machines\n10.0.0.7\nada@box2  port=9999 python=/opt/bin/python\n"
    "box3 address=192.168.4.3 interface=eth1 cache='/data/x y'\nnode001 slots=8\n"
)


def read_hostfile(data: bytes, folder: Path) -> None:
    from windlass.tasks.launch.hostfile import load_hostfile

    load_hostfile(put(folder, "hosts", data))


ROUTE = """router = "router.json"
policy = {kind = "budget", usd_per_month = 10.0}
first_token_seconds = 30.0
[breaker]
failures = 3
[cascade]
first = "small"
hold_tokens = 64
[[models]]
name = "small"
at = "http://127.0.0.1:8001"
watts = 30.0
[[models]]
name = "large"
at = "http://gpu:8000#GLM-4.6"
api_key_env = "GPU_KEY"
"""


def read_route(data: bytes, folder: Path) -> None:
    from windlass.tasks.route.operate.settings import read_settings

    read_settings(put(folder, "router.toml", data))


KEYS = """[[key]]
name = "ada"
key = "abcdefgh12345678"
expires = 2030-01-01
requests_per_minute = 5
[[key]]
name = "bob"
sha256 = "0000000000000000000000000000000000000000000000000000000000000000"
"""


def read_key_file(data: bytes, folder: Path) -> None:
    from windlass.errors import Error
    from windlass.tasks.serve.http.api_keys import read_keys

    with contextlib.suppress(Error):
        read_keys(str(put(folder, "keys.toml", data)), {})
    with contextlib.suppress(Error):
        read_keys(str(put(folder, "keys.txt", data)), {})


def _tasks(folder: Path) -> list[Sample]:
    from windlass.tasks.evaluate.tasks.catalog import FOLDER

    return [(path.read_bytes(),) for path in sorted(FOLDER.glob("*.toml"))]


def read_task(data: bytes, folder: Path) -> None:
    from windlass.tasks.evaluate.tasks.task import parse_task

    parse_task(data, "mine.toml")


METRICS = (
    '# HELP a b\n# TYPE a counter\na{x="1",y="q\\"\\n"} 5 1700000000\nb +Inf\nc_bucket{le="0.5"} NaN\n'
    "node_cpu_seconds_total{cpu=\"0\",mode=\"idle\"} 1.5e+06\n"
)  # fmt: skip


def read_metrics(data: bytes, folder: Path) -> None:
    from windlass.core.metrics.exposition import read

    list(read(data.decode("utf-8", "replace")))


QSTAT = (
    "Job Id: 7.server\n    Job_Name = x\n    job_state = R\n    exec_host = n1/0*8+n2/0*8\n"
    "    comment = Not Running: too\n\tlong\n    Exit_status = 1\n"
)
SQUEUE = "7|RUNNING|n[1-2]|2026-01-01T00:00:00|None\n8|PENDING||N/A|(QOSMaxJobs)\nCANCELLED by 0|0:15\n"


def read_scheduler(data: bytes, folder: Path) -> None:
    from windlass.tasks.launch.drive.pbs import parse_job
    from windlass.tasks.launch.drive.slurm import live_state, parse_queue

    text = data.decode("utf-8", "replace")
    parse_job(text)
    if lines := parse_queue(text):
        live_state(lines)


# --- JSON


def _plans(folder: Path) -> list[Sample]:
    from windlass.core.hardware.parse import parse_hardware
    from windlass.core.plan import encode_plan
    from windlass.model.families import rules
    from windlass.model.families.registry import find, spec_of
    from windlass.tasks.plan.inference.assemble import make_plan
    from windlass.tasks.plan.inference.search.request import PlanRequest

    known = find("Qwen3-8B")
    assert known is not None
    spec = spec_of(known)
    return [
        (
            encode_plan(
                make_plan(PlanRequest(spec=spec, rules=rules(spec), hardware=parse_hardware("1xH100-80GB"), context_tokens=4096))
            ),
        )
    ]


def read_plan(data: bytes, folder: Path) -> None:
    from windlass.core.plan import load_plan

    load_plan(data)


REPORTS: list[Any] = [{"version": 1, "runs": [{"reached": 1}], "memory": {"over_plan": 1}}, {"targets": [], "version": 1}]


def read_reports(data: bytes, folder: Path) -> None:
    """What other commands of ours have saved, and people share."""
    from windlass.errors import Error
    from windlass.tasks.bench import report
    from windlass.tasks.bench.served import report as served
    from windlass.tasks.launch.drive.state import exit_of
    from windlass.tasks.launch.node import read_description
    from windlass.tasks.route.decide.router_file import decode_router
    from windlass.tasks.train.checkpoint.manifest import read_manifest

    put(folder, "manifest.json", data)
    put(folder, "exit.json", data)
    readers: list[Callable[[], object]] = [
        lambda: report.read_report(data, "x"), lambda: served.read_report(data, "x"), lambda: decode_router(data, "x"),
        lambda: read_manifest(folder), lambda: exit_of(folder), lambda: read_description(data),
    ]  # fmt: skip
    for read in readers:
        with contextlib.suppress(Error):
            read()


def _report_samples(folder: Path) -> list[Sample]:
    manifest = {"identity": {"model": "m", "spec": "0", "config": {}, "recipe": {}}, "step": 1, "world_size": 1, "version": 1,
                "files": {"a.distcp": {"num_bytes": 1, "sha256": "0"}}}  # fmt: skip
    return [(json.dumps(one).encode(),) for one in [*REPORTS, manifest, {"code": 0, "ended": 1}, _router()]]


def _router() -> dict[str, Any]:
    """The JSON of a router, as small as it can be."""
    import numpy as np

    from windlass.tasks.route.decide.router_file import FORMAT, pack
    from windlass.tasks.route.features.ngrams import BITS

    packed = [msgspec.to_builtins(pack(np.zeros(shape))) for shape in ((2,), (2,), (2, 2), (2, 3))]
    models = [{"name": name, "score": 0.5, "cost": 1.0} for name in ("small", "large")]
    return {
        "format": FORMAT, "models": models, "best": 1, "tolerance": 0.1, "floor": 0.5, "confidence": 0.9, "cost_unit": "calls", "num_prompts": 3,
        "bits": BITS, "penalty": 1.0, "share_of_sources": 0.5, "columns": packed[0], "rarity": packed[1], "mean": [0.0], "deviation": [1.0],
        "bias": [0.0, 0.0], "words": packed[2], "shape": packed[3], "max_novelty": 0.5, "path": [], "mean_chance": 0.5,
    }  # fmt: skip


def read_router(data: bytes, folder: Path) -> None:
    from windlass.tasks.route.decide.router_file import decode_router

    found = decode_router(data, "x")
    for packed in (found.columns, found.rarity, found.words, found.shape):
        packed.array()


ANSWERS = [{"prompt": f"p{number}", "model": model, "score": number % 2, "id": "1", "group": "g", "cost": 0.1, "confidence": {"a": 0.5}}
           for number in range(2) for model in ("small", "large")]  # fmt: skip
DECISION = {"time": 1.0, "variant": "a", "decision": "decided", "model": "small", "reason": "r", "prompt": "p", "score": 1.0, "attempts": [],
            "situation": {"candidates": [{"name": "small", "chance": 0.5, "cost": 1.0}, {"name": "large", "chance": 0.7, "cost": 2.0}], "best": 1,
                          "tolerance": 0.1, "policy": {"kind": "floor"}}, "chosen": "small"}  # fmt: skip


def _answer_samples(folder: Path) -> list[Sample]:
    lines = [json.dumps(one).encode() + b"\n" for one in [*ANSWERS, DECISION]]
    return [tuple(lines)]


def read_answers(data: bytes, folder: Path) -> None:
    from windlass.errors import Error
    from windlass.tasks.route.operate.log import replay
    from windlass.tasks.route.tables.answers import read_file

    with contextlib.suppress(Error):
        read_file(put(folder, "answers.jsonl", data))
    with contextlib.suppress(Error):
        replay(data.splitlines(), "log")


def read_csv(data: bytes, folder: Path) -> None:
    from windlass.tasks.route.tables.answers import read_file

    read_file(put(folder, "answers.csv", data))


ROWS = [
    {
        "question": "q",
        "answer": "1 <<1+1=2>> #### 2",
        "task_id": "t/1",
        "test": "def check(f): pass",
        "entry_point": "f",
        "prompt": "p",
        "text": "t",
        "test_list": ["assert f()"],
        "test_imports": ["import re"],
        "code": "x",
    }
]


def read_rows(data: bytes, folder: Path) -> None:
    """Published test sets. Their rows are of the published form, which their digest makes sure of; here only that they are rows."""
    from windlass.tasks.evaluate.tasks.rows import json_rows

    json_rows(data, "rows")


# --- our own binary files


def _history_samples(folder: Path) -> list[Sample]:
    from windlass.tasks.observe.history.file import MAGIC

    head, value = struct.Struct("<cI"), struct.Struct("<Id")
    parts = [MAGIC]
    for number, name in enumerate(("up", "steps")):
        body = json.dumps([name, [["job", str(number)]]]).encode()
        parts += [b"S", len(body).to_bytes(4, "little"), body]
    for time in range(4):
        body = struct.pack("<d", 1e9 + time) + value.pack(0, 1.0) + value.pack(1, float(time))
        parts += [head.pack(b"V", len(body)), body[:8], body[8:20], body[20:]]
    return [tuple(parts)]


def read_history(data: bytes, folder: Path) -> None:
    from windlass.tasks.observe.history.file import read_history

    read_history(put(folder, "history", data), 1e9 + 60)


def _journal_samples(folder: Path) -> list[Sample]:
    from windlass.model.formats.disk.journal import Journal

    path = folder / "first.journal"
    journal = Journal(path, {"a": 1})
    journal.record("one", {"x": [1, 2]})
    journal.record("two")
    journal.close()
    return [tuple(line + b"\n" for line in path.read_bytes().splitlines())]


def read_journal(data: bytes, folder: Path) -> None:
    from windlass.model.formats.disk.journal import Journal

    Journal(put(folder, "x.journal", data), {"a": 1}).close()


def _tier_samples(folder: Path) -> list[Sample]:
    from windlass.runtime.offload.tiers.file import HEAD, MAGIC

    block = bytes(4096)
    index = {
        "key": "k",
        "entries": {"layers.0": {"offset": 4096, "block_bytes": 4096, "checksums": [zlib.crc32(block)], "forms": []}},
    }
    text = json.dumps(index).encode()
    head = HEAD.pack(MAGIC, 8192, len(text), zlib.crc32(text))
    return [(head[:16], head[16:24], head[24:32], head[32:], bytes(4096 - len(head)), block, text)]


def mutate_tier(random: Any, samples: Sequence[Sample]) -> bytes:
    """Half of them with the index changed as a tree, and its checksum right."""
    from windlass.runtime.offload.tiers.file import HEAD, MAGIC

    if random.random() < 0.4:
        return mutate_parts(random, samples)
    text = mutate_json(random, [(samples[0][-1],)])
    head = HEAD.pack(MAGIC, 8192, len(text), zlib.crc32(text))
    return head + bytes(8192 - len(head)) + text


def read_tier(data: bytes, folder: Path) -> None:
    from windlass.runtime.offload.tiers.file import find_tier, tier_path

    path = tier_path(folder, "k")
    path.write_bytes(data)
    found = find_tier(folder, "k")
    if found is not None:
        found.num_bytes  # noqa: B018


# --- training data


def _shards(folder: Path) -> dict[str, bytes]:
    """The files of one shard, and the manifest."""
    import numpy as np

    from windlass.tasks.train.data.prepare.write_shards import TokenShardWriter, write_manifest
    from windlass.tasks.train.data.shards import ShardManifest

    out = folder / "shards"
    out.mkdir(exist_ok=True)
    writer = TokenShardWriter(out, "one", "train", "uint16")
    for length in (3, 9, 30):
        writer.add(np.arange(length, dtype=np.uint16), [(0, length - 1)])
    shard = writer.finish()
    write_manifest(out, ShardManifest(tokenizer="0" * 64, vocab_size=300, end_token=257, token_type="uint16", shards=(shard,)))
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.is_file()}


def read_shards(folder: Path) -> None:
    import numpy as np

    from windlass.tasks.train.data.rows import PackedRows, gather
    from windlass.tasks.train.data.shards import open_shards, read_manifest

    manifest = read_manifest(folder / "shards")
    shards = open_shards(folder / "shards", manifest, "train")
    for packing in ("cut", "whole"):
        rows = PackedRows(shards, 8, packing)
        numbers, starts, stops = rows.locate(np.arange(min(len(rows), 16)))
        for number in np.unique(numbers):
            chosen = numbers == number
            gather(shards[number], starts[chosen], stops[chosen], 8, manifest.end_token)


def _shard_reader(name: str) -> Reader:
    def samples(folder: Path) -> list[Sample]:
        data = _shards(folder)[name]
        return [(data,)] if name.endswith(".json") else [made.cut_every(data, 8)]

    def read(data: bytes, folder: Path) -> None:
        put(folder / "shards", name, data)
        read_shards(folder)

    return Reader(samples, read, mutate_json if name.endswith(".json") else mutate_parts)


LINES = [
    {"text": "one"}, {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": None}], "tools": []},
    {"text": None, "other": 1}, {"messages": []},
]  # fmt: skip


def _line_samples(folder: Path) -> list[Sample]:
    return [tuple(json.dumps(line).encode() + b"\n" for line in LINES)]


def _documents(name: str, kind: str) -> Callable[[bytes, Path], None]:
    def read(data: bytes, folder: Path) -> None:
        from windlass.tasks.train.data.prepare.documents import read_documents
        from windlass.tasks.train.data.prepare.inputs import FileSpan

        path = str(put(folder, name, data))
        for start, stop in ((0, len(data)), (len(data) // 2, len(data))):
            if not (kind != "jsonl" and start):
                list(read_documents(FileSpan(path=path, kind=kind, start=start, stop=stop, num_bytes=len(data)), None))

    return read


def read_parquet(data: bytes, folder: Path) -> None:
    from windlass.tasks.train.data.prepare.documents import read_documents
    from windlass.tasks.train.data.prepare.inputs import FileSpan
    from windlass.tasks.train.data.prepare.parquet import group_bytes

    path = put(folder, "a.parquet", data)
    groups = len(group_bytes(path))
    list(read_documents(FileSpan(path=str(path), kind="parquet", start=0, stop=groups, num_bytes=len(data)), None))


def _parquet_samples(folder: Path) -> list[Sample]:
    import pyarrow
    import pyarrow.parquet

    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two", None], "n": [1, 2, 3]}), stream)
    return [made.cut_every(stream.getvalue(), 8)]


def _text_samples(folder: Path) -> list[Sample]:
    return [
        ("one\ntwo é\n".encode(),),
        (b"\xff\xfe" + "utf-16 é\n".encode("utf-16-le"),),
        (b"\xef\xbb\xbfx\r\n",),
        (gzip.compress(b"x"),),
    ]


READERS: dict[str, Reader] = {
    "recipe": Reader(_recipes, read_recipe, mutate_text),
    "cluster": Reader(texts(CLUSTER), read_cluster, mutate_text),
    "words": Reader(texts(*HARDWARE, "10.0.0.7:9998", "[fd00::7]:9998,b:1", "1.5GiB", "128k", "7B"), read_words, mutate_text),
    "hostfile": Reader(texts(HOSTS), read_hostfile, mutate_text),
    "route-settings": Reader(texts(ROUTE), read_route, mutate_text),
    "key-file": Reader(texts(KEYS, "# keys\nabcdefgh12345678\n"), read_key_file, mutate_text),
    "task-file": Reader(_tasks, read_task, mutate_text),
    "metrics": Reader(texts(METRICS), read_metrics, mutate_text),
    "scheduler": Reader(texts(QSTAT, SQUEUE), read_scheduler, mutate_text),
    "plan": Reader(_plans, read_plan, mutate_json),
    "reports": Reader(_report_samples, read_reports, mutate_json),
    "router": Reader(lambda folder: [(json.dumps(_router()).encode(),)], read_router, mutate_json),
    "answers": Reader(_answer_samples, read_answers, mutate_lines),
    "answers-csv": Reader(texts('prompt,small,large,group\n"a ""b""",1,0,g\nx,true,0.5,h\n'), read_csv, mutate_text),
    "test-rows": Reader(
        lambda folder: [(json.dumps(ROWS).encode(),), (json.dumps(ROWS[0]).encode() + b"\n",)], read_rows, mutate_json
    ),
    "history": Reader(_history_samples, read_history),
    "journal": Reader(_journal_samples, read_journal, mutate_lines),
    "tier-file": Reader(_tier_samples, read_tier, mutate_tier),
    "shard-manifest": _shard_reader("manifest.json"),
    "shard-documents": _shard_reader("one.documents.bin"),
    "shard-learned": _shard_reader("one.learned.bin"),
    "shard-tokens": _shard_reader("one.tokens.bin"),
    "json-lines": Reader(_line_samples, _documents("a.jsonl", "jsonl"), mutate_lines),
    "json-lines-gzip": Reader(
        lambda folder: [(gzip.compress(b"".join(_line_samples(folder)[0])),)], _documents("a.jsonl.gz", "jsonl")
    ),
    "plain-text": Reader(_text_samples, _documents("a.txt", "text")),
    "parquet": Reader(_parquet_samples, read_parquet),
}
