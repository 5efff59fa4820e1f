"""Fuzzing of checkpoints: spoiled manifests and shards give the clear error and nothing else, whatever is in them.

Each case is read in a forked process that may take little more memory than it has, and in which every action that
would write, rename, remove, connect, run or unpickle is noted: loading does none of them.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mutations_for_tests import MUTATORS, spoil_bytes, spoil_shard, spoil_values

from weft.checkpoint import Checkpoint, Piece, Region, Saver
from weft.checkpoint.manifest import MANIFEST, parse_json, seal
from weft.data.config import DataConfig
from weft.errors import CheckpointError, WeftError
from weft.launch.local_ranks import run_local
from weft.models import DecoderConfig, build
from weft.models.tuning import Tuning
from weft.saved_run import saved_data, saved_model
from weft.schema import to_table
from weft.serve.loading import load_for_generation
from weft.train import resume

pytestmark = pytest.mark.processes

SHARDS = ("rank-00000.safetensors", "rank-00001.safetensors")
ROOM_BYTES = 256 * 2**20  # above what the process has; twenty thousand times the checkpoint
MAX_MESSAGE = 100_000
STATE = {"data": {"fingerprint": "abc", "samples": 16}, "seed": 1, "model": {"architecture": "llama"}, "run": ""}
FORBIDDEN = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
             "shutil.", "subprocess.", "os.system", "os.exec", "socket.", "pickle.", "exec", "marshal.")  # fmt: skip
Values = dict[tuple[str, str], bytes]


@pytest.fixture
def original() -> Iterator[Path]:
    """A checkpoint of two ranks, with an earlier one beside it, where writing is fast."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None, prefix="weft-fuzz-") as folder:
        save(Path(folder) / "checkpoints")
        yield Path(folder) / "checkpoints" / "step-00000002"


def save(folder: Path) -> None:
    tensors = {
        ("parameter", "w"): torch.arange(24.0).reshape(6, 4),
        ("parameter", "scale"): torch.tensor(2.0, dtype=torch.bfloat16),
        ("moment_1", "w"): torch.arange(24.0).reshape(6, 4) / 7,
        ("buffer", "count"): torch.tensor([1, 2, 3]),
        ("buffer", "none"): torch.empty(0, 3, dtype=torch.uint8),
    }
    savers = [Saver(folder, rank, 2, "abcd", timeout_seconds=120) for rank in range(2)]
    for step in (1, 2):
        for rank, saver in enumerate(savers):
            pieces = []
            for (kind, name), tensor in tensors.items():
                half = -(-tensor.numel() // 2)
                region = Region.flat(
                    tuple(tensor.shape), min(rank * half, tensor.numel()), [half, tensor.numel()][rank]
                )
                if region.size or rank == 0:
                    pieces.append(Piece(name, kind, region, tensor.flatten()[region.start : region.stop]))
            saver.save(step, pieces, STATE)
        for saver in savers:
            saver.wait(published=True)


def read_all(path: Path) -> Values:
    """Every tensor's bytes."""
    checkpoint = Checkpoint(path)
    return {
        (entry.kind, entry.name): checkpoint.read(entry.name, entry.kind)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
        for entry in checkpoint.entries()
    }


def watch(noted: list[str]) -> None:
    """Note each forbidden action of this process, from now on until it ends."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        if writes or event.startswith(FORBIDDEN):
            noted.append(f"{event} {arguments}"[:300])

    sys.addaudithook(hook)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def fuzz(original: Path, num_cases: int, seed: int) -> dict[str, Any]:
    """Spoil and read, again and again, in a process of its own; what was found, as plain values."""

    def child(_: int) -> dict[str, Any]:
        expected, before = read_all(original), files_in(original.parent.parent)
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + ROOM_BYTES, used_bytes + ROOM_BYTES))
        noted: list[str] = []
        watch(noted)
        draw = random.Random(seed)
        outcomes: Counter[str] = Counter()
        failures: list[str] = []
        start = time.perf_counter()
        for case in range(num_cases):
            kind, problem = one_case(draw, original, expected, noted)
            outcomes[kind] += 1
            if problem is not None:
                failures.append(f"case {case} of seed {seed}, {kind}: {problem}")
                if len(failures) > 20:
                    break
        return {
            "outcomes": dict(sorted(outcomes.items())),
            "failures": failures,
            "new_files": sorted(set(files_in(original.parent.parent)) ^ set(before)),
            "seconds": time.perf_counter() - start,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    found: dict[str, Any] = run_local(child, 1, timeout_seconds=3000)[0]
    return found


def one_case(draw: random.Random, path: Path, expected: Values, noted: list[str]) -> tuple[str, str | None]:
    """One spoiled file, read and mended; what it was and how it ended, and what is wrong with that."""
    kind, files, is_forged = spoil(draw, path)
    good = {name: (path / name).read_bytes() for name in files}
    if files == good:
        return "unchanged", None
    for name, data in files.items():
        (path / name).write_bytes(data)
    noted.clear()
    problem = None
    try:
        values = read_all(path)
        kind += ", accepted"
        if not is_forged and values != expected:  # who seals a manifest again may say what he likes of the pieces
            problem = "other values were read without an error"
    except CheckpointError as error:
        kind += ", refused"
        text = str(error)
        if not any(name in text for name in (MANIFEST, *SHARDS)) or len(text) > MAX_MESSAGE or "\n" in text:
            problem = f"an unclear message: {text[:300]!r}"
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}"[:500]
    if noted:
        problem = f"loading did {noted[:3]}"
    for name, data in good.items():
        (path / name).write_bytes(data)
    return kind, problem


def spoil(draw: random.Random, path: Path) -> tuple[str, dict[str, bytes], bool]:
    """The kind of damage, the files to write, and whether the manifest was changed and sealed again."""
    manifest = (path / MANIFEST).read_bytes()
    match draw.randrange(10):
        case 0:
            return "manifest, bytes", {MANIFEST: spoil_bytes(draw, manifest)}, False
        case 1 | 2 | 3 | 4:
            text = b"{" + manifest[manifest.index(b",") + 1 :]
            return "manifest, sealed again", {MANIFEST: seal(draw.choice(MUTATORS)(draw, text))}, True
        case kind:
            name = draw.choice(SHARDS)
            shard = spoil_shard(draw, (path / name).read_bytes())
            if kind % 2:
                return "shard", {name: shard}, False
            content = json.loads(manifest)
            del content["sha256"]
            content["files"][name] = max(1, len(shard))  # so that the size does not tell
            return "shard, size in the manifest", {name: shard, MANIFEST: seal(json.dumps(content).encode())}, False


def check(found: dict[str, Any], num_cases: int) -> None:
    assert found["failures"] == []
    assert found["new_files"] == []
    outcomes = found["outcomes"]
    assert sum(outcomes.values()) == num_cases
    refused = sum(count for kind, count in outcomes.items() if kind.endswith("refused"))
    assert refused > 0.9 * num_cases, outcomes
    for kind in ("manifest, bytes", "manifest, sealed again", "shard", "shard, size in the manifest"):
        assert outcomes[f"{kind}, refused"] > num_cases / 20, outcomes
    assert "manifest, bytes, accepted" not in outcomes


def test_spoiled_checkpoints_give_the_clear_error_and_nothing_else(original: Path) -> None:
    check(fuzz(original, 2500, seed=8), 2500)


@pytest.mark.soak
def test_a_hundred_thousand_spoiled_checkpoints(original: Path) -> None:
    found = fuzz(original, 101_000, seed=1)  # some draw no change
    print(json.dumps(found, indent=2))
    check(found, 101_000)


@pytest.mark.parametrize("sabotage", ["allocate", "write", "crash"])
def test_the_fuzzer_sees_what_it_looks_for(original: Path, sabotage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: a loader that allocates, writes or fails otherwise is found."""
    opened = Checkpoint._open_manifest

    def bad(self: Checkpoint) -> Any:
        if sabotage == "allocate":
            torch.empty(16 * ROOM_BYTES, dtype=torch.uint8)  # mimalloc, torch's on ARM, has a GiB in reserve
        elif sabotage == "write":
            (original.parent.parent / "outside").write_text("x")
        else:
            raise KeyError("x")
        return opened(self)

    def once_read(path: Path) -> Values:
        values = read_all(path)
        monkeypatch.setattr(Checkpoint, "_open_manifest", bad)  # the child's own copy: it was forked
        return values

    monkeypatch.setitem(fuzz.__globals__, "read_all", _after_first(once_read, read_all))
    found = fuzz(original, 30, seed=1)
    words = {"allocate": "memory", "write": "loading did", "crash": "KeyError"}[sabotage]
    assert words in found["failures"][0]
    assert bool(found["new_files"]) == (sabotage == "write")


def _after_first(first: Any, then: Any) -> Any:
    calls = iter([first])
    return lambda path: next(calls, then)(path)


def test_a_header_that_claims_an_exabyte_is_refused(original: Path) -> None:
    shard = original / SHARDS[0]
    raw = shard.read_bytes()
    shard.write_bytes(struct.pack("<Q", 2**60) + raw[8:])
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors cannot be used: .*header"):
        Checkpoint(original)
    shutil.rmtree(original)
    with pytest.raises(CheckpointError, match="give a run folder, a checkpoint folder"):
        Checkpoint(original)


# ---------------------------------------------------------------- what a checkpoint says of its run


def test_a_spoiled_state_is_refused_by_those_who_use_it(tmp_path: Path) -> None:
    """The state under a good seal: a model that is not the one held, a run that is none, fields of wrong types."""
    config = DecoderConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    text = 'name = "x"\n[data]\nsource = "stdlib"\nsequence = 8\n'
    table = {key: value for key, value in to_table(config).items() if "expert" not in key}  # as weft once saved it
    state = {**STATE, "model": table, "run": text}
    model = build(config)
    pieces = [Piece(n, "parameter", Region.whole(tuple(p.shape)), p.detach()) for n, p in model.named_parameters()]
    Saver(tmp_path, 0, 1, "abcd").save(2, pieces, state, asynchronous=False)
    checkpoint = Checkpoint(tmp_path / "step-00000002")
    run = SimpleNamespace(
        model=config,
        split=SimpleNamespace(batch=8, samples="sequences"),
        train=SimpleNamespace(seed=1),
        tuning=Tuning(),
        data=DataConfig(source="stdlib", sequence=8),
    )
    data = SimpleNamespace(fingerprint="abc")

    def use() -> None:
        resume._refuse_other_data(checkpoint, data, run)  # type: ignore[arg-type]
        resume._refuse_other_model(checkpoint, run)  # type: ignore[arg-type]
        resume._refuse_other_order(checkpoint, run)  # type: ignore[arg-type]

    use()
    assert load_for_generation(tmp_path, "bytes")[2] == 8
    draw, raw, num_refused = random.Random(3), json.dumps(state).encode(), 0
    for _ in range(1500):
        try:
            checkpoint.state = parse_json(spoil_values(draw, raw))
        except CheckpointError:
            continue
        for reader in (use, lambda: saved_model(checkpoint), lambda: saved_data(checkpoint)):
            try:
                reader()
            except WeftError:
                num_refused += 1
    assert num_refused > 500
    checkpoint.state = {**state, "model": {**state["model"], "hidden_size": 2**60}}  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match="states a model with a size above"):
        saved_model(checkpoint)
    checkpoint.state = {**state, "model": {**state["model"], "num_hidden_layers": 10**4}}  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match="whose parameters are not those that it holds"):
        saved_model(checkpoint)
