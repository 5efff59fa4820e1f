"""Ranks of a launcher that fail alike say it once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.launch.one_speaker import is_first_to_say


def test_one_rank_of_a_host_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ranks = [{"RANK": str(rank), "WORLD_SIZE": "3"} for rank in range(3)]
    assert [is_first_to_say("no such file", environ) for environ in ranks] == [True, False, False]
    assert is_first_to_say("another error", ranks[2])  # which the others do not have
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    assert [is_first_to_say("no such file", environ) for environ in ranks] == [True, False, False]  # started again
    assert [is_first_to_say("no such file", {"HOME": "/"}) for _ in range(2)] == [True, True]
    monkeypatch.setattr("weft.launch.one_speaker.parent_identity", lambda: "another job")
    assert is_first_to_say("no such file", ranks[1])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    assert is_first_to_say("no such file", ranks[1])
