"""Worker processes that something else kills: while they start, load a fixture, or run a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support import worker_jobs as jobs

from chairlift.engine.workers.job import Fixture, Job, TooExpensive, WorkerFailed
from chairlift.engine.workers.process import WorkerProcess

WHERE = ["start", "fixture"]


class Deaths(NamedTuple):
    """A process that is killed at its first deaths, and a job for it."""

    process: WorkerProcess
    job: Job
    count: Callable[[], int]


@pytest.fixture
def deaths(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Deaths]:
    """The parameter says where the process is killed, and how many times."""
    where, times = request.param
    counter = tmp_path / "deaths"
    module = tmp_path / "dies_when_imported.py"
    call = f"jobs.die_first({str(counter)!r}, {times})"
    module.write_text(f"from support import worker_jobs as jobs\n{call}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    died = (jobs.die_first, (str(counter), times))
    modules = (*jobs.MODULES, module.stem) if where == "start" else jobs.MODULES
    process = WorkerProcess(modules)
    fixture = Fixture(lambda: died) if where == "fixture" else None
    job = Job(*died) if where == "job" else Job(jobs.identity, () if fixture else ("alive",))
    job = Job(job.function, job.args, fixture=fixture)
    yield Deaths(process, job, lambda: counter.stat().st_size)
    process.close()


@pytest.mark.parametrize("deaths", [(where, 1) for where in WHERE], indirect=True)
def test_a_process_that_is_killed_while_it_loads_is_started_once_more(deaths: Deaths) -> None:
    assert deaths.process.run(deaths.job) == "alive"
    assert deaths.count() == 2


@pytest.mark.parametrize("deaths", [(where, 2) for where in WHERE], indirect=True)
def test_the_second_death_of_a_loading_process_is_the_error(deaths: Deaths) -> None:
    with pytest.raises(WorkerFailed, match="signal 9"):
        deaths.process.run(deaths.job)
    assert deaths.count() == 2
    assert deaths.process.run(deaths.job) == "alive"


@pytest.mark.parametrize("deaths", [("job", 1)], indirect=True)
def test_a_job_that_is_killed_does_not_run_again(deaths: Deaths) -> None:
    with pytest.raises(TooExpensive):
        deaths.process.run(deaths.job)
    assert deaths.count() == 1
    assert deaths.process.run(deaths.job) == "alive"


def test_a_process_that_ends_by_itself_while_it_loads_does_not_start_again() -> None:
    process = WorkerProcess(("no_such_module",))
    with pytest.raises(WorkerFailed, match=r"does not start$"):
        process.run(Job(jobs.identity, (1,)))
    process.close()
