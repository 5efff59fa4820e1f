"""Curvature ranks as processes: the bits of inline K-FAC, also when one is killed, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from roles_for_tests import assert_bit_equal, inversions, last_state, said, train_with_roles
from runs_for_tests import events, make_run

from weft.chaos.storm import survival_overrides
from weft.errors import ConfigError, PlanError
from weft.launch.environment import RankInfo
from weft.launch.role_ranks import job_rank
from weft.run_file import Run, load_run
from weft.step.options import refuse_options

PLAN = ["plan.data=2", "plan.exact=false", "train.evaluate_every=12"]  # ranks 0 and 1 train, the others invert


def kfac(mode: str, every: int = 3) -> str:
    return f'train.kfac={{mode="{mode}", damping=1e-2, inverse_every={every}}}'


@pytest.fixture(scope="module")
def inline(run_file: Path) -> Run:
    """Two training ranks, which invert factors themselves, after updates 0, 3, 6 and 9."""
    return train_with_roles(run_file, "kfac-inline", *PLAN, kfac("inline"))


@pytest.mark.processes
def test_a_killed_curvature_rank_changes_no_bit_and_comes_back(run_file: Path, inline: Run) -> None:
    """Rank 2 dies when it is asked a second time; training waits in step 8 until it is back."""
    options, kill = [*PLAN, kfac("sub-grid"), "roles.curvature=2"], {"rank": 2, "after": 1}
    run = train_with_roles(run_file, "kfac-killed", *options, kill=kill, waits_for_return=True)
    assert_bit_equal(run, inline)
    done = Counter(inversions(run))
    assert (done[0] + done[2], done[3]) == (4, 4)
    assert done[0] in (1, 2)  # update 3, and 6 if rank 2 is not yet back
    assert "lost the connection to curvature 0" in said(run)
    assert "training rank 0 inverts its factors, with the same result" in said(run)
    assert "curvature 0 is back" in said(run)
    logged = [(event["of_update"], event["used_at_update"]) for event in events(run.folder, "kfac")]
    assert logged == [(0, 0), (3, 3), (6, 6), (9, 9)]


@pytest.mark.processes
def test_an_asynchronous_run_ends_and_logs_its_lags(run_file: Path, inline: Run) -> None:
    run = train_with_roles(run_file, "kfac-async", *PLAN, kfac("sub-grid-async"), "roles.curvature=1")
    logged = [(event["of_update"], event["used_at_update"]) for event in events(run.folder, "kfac")]
    assert logged
    assert all(of_update < used_at and of_update % 3 == 0 for of_update, used_at in logged)
    assert set(inversions(run)) == {2}
    assert last_state(run).keys() == last_state(inline).keys()
    with pytest.raises(AssertionError):
        assert_bit_equal(run, inline)


def test_curvature_ranks_follow_the_other_roles(run_file: Path) -> None:
    run = load_run(run_file, [*PLAN, kfac("sub-grid"), "roles={loader=1, curvature=2}"])
    names = [job_rank(RankInfo(rank, 5, rank, 5, 1, "weft"), run.roles.counts).name for rank in range(5)]
    assert names[2:] == ["loader 0 (rank 2)", "curvature 0 (rank 3)", "curvature 1 (rank 4)"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([kfac("sub-grid")], r"mode = 'sub-grid' .* roles\.curvature = 0; give e\.g\. roles\.curvature = 1"),
        ([kfac("sub-grid-async")], r"mode = 'sub-grid-async' .* roles\.curvature = 0"),
        ([kfac("inline"), "roles.curvature=1"], r"roles\.curvature = 1 .* train\.kfac\.mode = 'inline'"),
        (["roles.curvature=2"], r"roles\.curvature = 2 .* train\.kfac is not given"),
        ([kfac("sub-grid"), "roles.curvature=-1"], r"roles\.curvature = -1"),
    ],
)
def test_refused_run_files(run_file: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_run(run_file, [*PLAN, *overrides])


def test_what_depends_on_time_is_refused_where_bits_matter(run_file: Path) -> None:
    options = [*PLAN, kfac("sub-grid-async"), "roles.curvature=1"]
    with pytest.raises(PlanError, match=r"'sub-grid-async' .* train\.deterministic = true; use 'sub-grid'"):
        refuse_options(make_run(run_file, "run", *options, "train.deterministic=true"))
    with pytest.raises(ConfigError, match=r"bit by bit.*use 'sub-grid'"):
        survival_overrides(load_run(run_file, options), ["role"])
    assert survival_overrides(load_run(run_file, [*PLAN, kfac("sub-grid"), "roles.curvature=1"]), ["role"])
