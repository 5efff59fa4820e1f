"""The table [roles]: what is refused, in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs_for_tests import make_run, write_run_file

from weft.errors import ConfigError
from weft.run_file import run_from_json


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["roles.loader=-1"], "roles.loader = -1; it must be at least 0"),
        (["roles.depth=0"], "roles.depth = 0; it must be at least 1"),
        (["roles.validator=2", "train.evaluate_every=5"], "roles.validator = 2; it must be at most 1"),
        (["roles.validator=1"], "evaluates every train.evaluate_every steps, which is not given; give it"),
        (["roles.validator=1", "train.evaluate_every=5", "data.held_out=0"], "data.held_out = 0 leaves nothing"),
        (["roles.loader=1", "plan.pipe={degree=2, shadow=true}"], "plan.pipe.shadow = true forms the world anew"),
        (["roles.loaders=1"], "unknown key 'roles.loaders'; did you mean 'loader'?"),
        (["roles=2"], "'roles' = 2 but it expects a table"),
    ],
)
def test_what_is_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_run(write_run_file(tmp_path), "refused", *overrides)
    assert words in str(error.value)


def test_roles_are_ranks_beside_those_of_the_plan(tmp_path: Path) -> None:
    options = ["plan.data=2", "roles.loader=3", "roles.validator=1", "train.evaluate_every=5"]
    run = make_run(write_run_file(tmp_path), "roles", *options)
    assert (run.plan.num_ranks, run.num_ranks) == (2, 6)
    assert "loader = 3" in run.to_toml()
    assert run_from_json(run.to_json()) == run
