"""torchrun on one and on several nodes, and SLURM, which is played by environment variables: always the same mask.

lightning #20391, #10150: SLURM's task count and the trainer's devices differ, and the job hangs. lightning #19762: an
interactive shell is taken for a batch job. lightning #20542, #20806: preemption signals dead-lock.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.fits import QUIET, ROOT, assert_same_mask, files_below, fit, manifest, run, write_shards
from tests.support.ranks import free_port

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
# three blocks of 76 or 77 rows, whose slices two processes share unevenly
ARGS = ("--data.path", "shards", "--data.block_size", "80", "--model.select_ratio", "0.2", "--data.partial", "0.15")
STEPS = ("--model.num_steps", "5")
NUM_MANY = 120
MANY_STEPS = ("--model.num_steps", str(NUM_MANY))
REQUEUE = ("--preemption.requeue", "true")
SCRIPTS = sorted((ROOT / "configs/slurm").glob("*.sbatch"))


def on(*, devices, num_nodes=1):
    return (
        "--trainer.devices", str(devices), "--trainer.num_nodes", str(num_nodes), "--trainer.strategy", "ddp",
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with shards, the masks that one process makes of them, and programs that stand for SLURM's."""
    folder = tmp_path_factory.mktemp("launchers")
    write_shards(folder / "shards", [130, 100])
    for name, steps in {"one": STEPS, "one-many": MANY_STEPS}.items():
        fit(*ARGS, *steps, "--run_name", name, folder=folder)
    write_program(folder / "bin/scontrol", 'echo "$@" >> scontrol.log')
    # what srun does on one node: a process a task, and its own exit code is the highest of theirs
    write_program(
        folder / "bin/srun",
        """
        export SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_NODELIST=127.0.0.1 SLURM_NTASKS=$SLURM_NTASKS_PER_NODE
        pids=
        for rank in $(seq 0 $((SLURM_NTASKS - 1))); do
            SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & pids="$pids $!"
        done
        code=0
        for pid in $pids; do wait $pid || { c=$?; if [ $c -gt $code ]; then code=$c; fi; }; done
        exit $code
        """,
    )
    return folder


def write_program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run_of(folder, name):
    return folder / "runs/datamask" / name


@pytest.mark.slow
class TestTorchrun:
    def test_two_groups_of_one_rank_on_one_node(self, folder):
        args = (*ARGS, *STEPS, "--run_name", "groups", *on(devices=2), "--launch.ranks_per_block", "1")
        code, out, err = run(*args, folder=folder, launcher=(*TORCHRUN, "--standalone", "--nproc-per-node", "2"))
        assert code == 0, err
        assert "3 blocks for 2 groups of 1, 2 processes on cpu" in out
        assert out.count("kept ") == 1
        assert_same_mask(run_of(folder, "groups"), run_of(folder, "one"), num_parts=3)

    @pytest.mark.parametrize(
        ("num_ranks", "options", "words"),
        [
            (2, (), "3 blocks for 2 groups of 2, 4 processes on cpu"),
            (1, ("--launch.ranks_per_block", "2"), "230 samples in 3 blocks, 2 processes on cpu"),
        ],
        ids=["a group a node", "a group of both nodes"],
    )
    def test_two_nodes(self, folder, num_ranks, options, words):
        """Two agents, as on two machines that know the address of the first."""
        name = f"nodes-{num_ranks}"
        args = (*QUIET, *ARGS, *STEPS, "--run_name", name, *on(devices=num_ranks, num_nodes=2), *options)
        rendezvous = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
        agents = [
            [*TORCHRUN, *rendezvous, "--node-rank", node, "--nproc-per-node", str(num_ranks), str(ROOT / "cli.py"),
             "fit", *args]
            for node in "01"
        ]  # fmt: skip
        with started(agents, [clean_environment()] * 2, folder=folder) as processes:
            outputs = [process.communicate(timeout=300) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
        assert words in outputs[0][0]
        assert "blocks" not in outputs[1][0]
        assert_same_mask(run_of(folder, name), run_of(folder, "one"), num_parts=3)

    def test_two_processes_and_one_device_are_told_apart_before_they_wait_for_each_other(self, folder):
        before = files_below(folder)
        started_s = time.monotonic()
        launcher = (*TORCHRUN, "--standalone", "--nproc-per-node", "2")
        code, out, err = run(*ARGS, "--run_name", "refused", folder=folder, launcher=launcher)
        assert code not in (0, None)
        assert time.monotonic() - started_s < 240  # the launcher itself would wait for 300
        # of each process that torchrun did not kill first; what else there is comes from torchrun
        lines = {line.partition(": ")[2] for line in err.splitlines() if line.startswith("error")}
        assert lines == {
            "torchrun started 2 processes, and trainer.devices x trainer.num_nodes is 1 x 1 = 1; make them equal, with "
            "--trainer.strategy ddp."
        }
        assert "datamask_pl/" not in err
        assert not out
        assert files_below(folder) == before


def clean_environment(**variables):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DATAMASK_", "SLURM_"))}
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    return {**env, **paths, **variables}


def slurm_environment(folder, *, num_tasks, **variables):
    """What SLURM says in a job on one node, where its programs are those of the folder."""
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {
        "SLURM_JOB_ID": str(40_000 + free_port() % 10_000), "SLURM_JOB_NAME": "mask", "SLURM_NNODES": "1",
        "SLURM_NTASKS_PER_NODE": str(num_tasks), "MASTER_PORT": str(free_port()), "PATH": path,
    }  # fmt: skip
    return clean_environment(**{**job, **variables})


def task_environments(folder, *, num_tasks=2, **variables):
    """What srun adds for each of its tasks."""
    job = slurm_environment(folder, num_tasks=num_tasks, **variables)
    step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": str(num_tasks), "SLURM_NODELIST": "127.0.0.1", "SLURM_NODEID": "0"}
    return [{**job, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(num_tasks)]


@contextmanager
def started(commands, environments, *, folder):
    processes = [
        subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command, env in zip(commands, environments, strict=True)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def requeued(folder):
    """What was asked of scontrol since this was called last."""
    log = folder / "scontrol.log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


def slurm_command(*args):
    return [sys.executable, str(ROOT / "cli.py"), "fit", *QUIET, *ARGS, *on(devices=2), *REQUEUE, *args]


def wait_until_saved(processes, run_folder, *, num_steps):
    """Waits for a checkpoint beyond so many steps of the whole run, of NUM_MANY a block."""
    deadline_s = time.monotonic() + 300
    while True:
        names = [re.findall(r"\d+", path.stem) for path in (run_folder / "checkpoints").glob("*.ckpt")]
        if any(NUM_MANY * int(block) + int(step) > num_steps for block, step in names):
            return
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.mark.slow
class TestSlurm:
    def test_signals_to_all_tasks_or_one_save_and_requeue_and_the_same_command_goes_on(self, folder):
        """Three lives of one job; then its mask is that of an undisturbed process."""
        command = slurm_command(*MANY_STEPS, "--run_name", "preempted")
        mask = run_of(folder, "preempted")
        for life, signalled in enumerate([(0, 1), (1,)]):
            environments = task_environments(folder)
            with started([command] * 2, environments, folder=folder) as processes:
                wait_until_saved(processes, mask, num_steps=NUM_MANY * life)
                for rank in signalled:
                    processes[rank].send_signal(signal.SIGUSR1)
                outputs = [process.communicate(timeout=300) for process in processes]
            assert [process.returncode for process in processes] == [75, 75], outputs
            assert requeued(folder) == [f"requeue {environments[0]['SLURM_JOB_ID']}"]
            assert outputs[0][1].count("stopped: a signal ended the run, and the current block is saved") == 1
            assert "stopped" not in outputs[1][1]
            assert len(manifest(mask)["blocks"]) < 3
        with started([command] * 2, task_environments(folder), folder=folder) as processes:
            outputs = [process.communicate(timeout=300) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
        assert requeued(folder) == []
        assert_same_mask(mask, run_of(folder, "one-many"), num_parts=3)

    def test_a_group_that_is_told_to_end_has_the_job_requeued_though_rank_0_had_no_more_to_do(self, folder):
        """Rank 0 has one block, the other group two and slower: it is in the second when the signal comes."""
        args = (*MANY_STEPS, "--run_name", "uneven", "--launch.ranks_per_block", "1")
        mask = run_of(folder, "uneven")
        shutil.copytree(run_of(folder, "one-many") / "mask", mask / "mask")
        for block in (0, 1, 2):  # group 0 would solve 0 and 2, and finds them done
            if block == 1:
                (mask / f"mask/part-{block:05d}.parquet").unlink()
        environments = task_environments(folder)
        with started([slurm_command(*args)] * 2, environments, folder=folder) as processes:
            wait_until_saved(processes[1:], mask, num_steps=NUM_MANY)
            for process in processes:
                process.send_signal(signal.SIGUSR1)
            outputs = [process.communicate(timeout=300) for process in processes]
        assert [process.returncode for process in processes] == [75, 75], outputs
        assert requeued(folder) == [f"requeue {environments[0]['SLURM_JOB_ID']}"]
        assert (mask / "checkpoints").is_dir()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
class TestScripts:
    def test_bash_reads_it_and_slurm_all_of_its_options(self, script):
        subprocess.run(["bash", "-n", str(script)], check=True)
        lines = script.read_text().splitlines()
        first_command = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
        assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]
        for option in ("--signal=USR1@", "--requeue", "--open-mode=append", "--ntasks-per-node=", "--gres=gpu:"):
            assert [line for line in lines if line.startswith(f"#SBATCH {option}")], option


@pytest.mark.slow
class TestScriptsAsJobs:
    """The files themselves, by bash."""

    def submit(self, folder, script, **variables):
        for name in ("cli.py", "configs"):
            if not (folder / name).exists():
                (folder / name).symlink_to(ROOT / name)
        options = (*QUIET, *ARGS, *STEPS, "--data.block_by", "rows", "--trainer.logger.init_args.name", "datamask")
        environment = slurm_environment(folder, SLURM_CPUS_PER_TASK="1", **variables)
        command = ["bash", str(ROOT / "configs/slurm" / script), *options]
        with started([command], [environment], folder=folder) as (process,):
            out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return out

    def test_fineweb(self, folder):
        out = self.submit(folder, "fineweb.sbatch", num_tasks=2, SLURM_JOB_NAME="fineweb")
        assert "230 samples in 3 blocks, 2 processes on cpu" in out
        assert_same_mask(run_of(folder, "fineweb"), run_of(folder, "one"), num_parts=3)

    def test_array(self, folder):
        """One task of the array, which has a task for each block and more."""
        job = {"SLURM_JOB_NAME": "array", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
        out = self.submit(folder, "array.sbatch", num_tasks=1, **job)
        assert "77 samples in 1 block of 3 in all" in out
        mask = folder / "runs/fineweb/array-mask"
        assert list(manifest(mask)["blocks"]) == ["1"]
        part, expected = (pq.read_table(path / "part-00001.parquet") for path in (mask, run_of(folder, "one") / "mask"))
        assert part.equals(expected)


class TestOtherThanWhatWasLaunched:
    """In this process: nothing is waited for."""

    @pytest.fixture
    def task(self, folder, monkeypatch):
        monkeypatch.chdir(folder)
        for name, value in task_environments(folder)[0].items():
            if name.startswith("SLURM_"):
                monkeypatch.setenv(name, value)
        return monkeypatch

    def refused(self, folder, capsys, *args):
        before = files_below(folder)
        with pytest.raises(SystemExit) as ended:
            fit(*ARGS, *STEPS, "--run_name", "refused", *args)
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert files_below(folder) == before
        return line

    def test_slurm_started_more_than_the_trainer_was_told(self, folder, task, capsys):
        assert self.refused(folder, capsys) == (
            "error: SLURM_NTASKS says 2 processes, and trainer.devices x trainer.num_nodes is 1 x 1 = 1; make them "
            "equal, with --trainer.strategy ddp. (In an interactive shell, set SLURM_JOB_NAME=interactive to "
            "ignore the SLURM job.)"
        )

    def test_slurm_started_fewer_than_the_trainer_was_told(self, folder, task, capsys):
        line = self.refused(folder, capsys, *on(devices=3))
        assert line.startswith("error: SLURM_NTASKS says 2 processes, and trainer.devices x trainer.num_nodes is 3 x 1")

    def test_tasks_without_tasks_a_node(self, folder, task, capsys):
        task.delenv("SLURM_NTASKS_PER_NODE")
        assert self.refused(folder, capsys) == (
            "error: SLURM_NTASKS is 2, and SLURM_NTASKS_PER_NODE is not set; ask SLURM for --nodes and "
            "--ntasks-per-node instead of --ntasks."
        )

    def test_an_interactive_shell_is_left_alone(self, folder, task):
        task.setenv("SLURM_JOB_NAME", "interactive")
        fit(*ARGS, *STEPS, "--run_name", "interactive")
        assert_same_mask(run_of(folder, "interactive"), run_of(folder, "one"), num_parts=3)
