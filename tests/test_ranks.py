"""Scoring on several processes: the same to the bit as on one, and only what is missing is measured again."""

import os
import subprocess
import sys

import pytest

from tests.planted import save_planted

SMALL = ["--capability", "retrieval", "--pairs", "2", "--tokens", "150", "--device", "cpu", "--quiet"]
KEPT = ("head_scores.csv", "scores.json", "effects.safetensors")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return save_planted(tmp_path_factory.mktemp("planted"))


def score(planted, out, *more, ranks: int = 1) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "hydralens.score", str(planted), "--out", str(out), *SMALL, *more]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_two_ranks_leave_the_files_of_one(planted, tmp_path):
    score(planted, tmp_path / "one", "--method", "restriction")
    score(planted, tmp_path / "two", "--method", "restriction", ranks=2)
    for name in KEPT:
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name
    assert not (tmp_path / "two" / "shards").exists()


PROGRAM = """
import os, sys
from hydralens import scoring
patch, done = scoring.activation_patch, []
def watched(model, probe, **options):
    done.append(probe.label)
    if sys.argv[2] == "die" and os.environ["RANK"] == "1" and len(done) == 4:
        os._exit(1)
    return patch(model, probe, **options)
scoring.activation_patch = watched
import hydralens as hl
from hydralens.ranks import all_ranks
from tests.planted import planted_model
probes = hl.probes.retrieval(planted_model(), 2, 150, shapes=("niah_single_2", "niah_multikey_1"))
with all_ranks("cpu") as ranks:
    scores = scoring.score_heads(planted_model(), probes, method="direct", shards=sys.argv[1])
if ranks.first:
    scores.save(sys.argv[3])
print(f"measured {len(done)}", flush=True)
"""


def test_a_killed_rank_costs_only_what_it_had_not_finished(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)

    def launch(how: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "program.py")]
        command += [str(tmp_path / "shards"), how, str(tmp_path / "out")]
        return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}, capture_output=True, text=True)

    assert launch("die").returncode != 0
    left = len(list((tmp_path / "shards").glob("*.safetensors")))
    assert 3 <= left < 12  # six probes of two pairs
    again = launch("live")
    assert again.returncode == 0, again.stderr[-3000:]
    measured = sum(int(line.split()[-1]) for line in again.stdout.splitlines() if "measured" in line)
    assert measured == 12 - left and (tmp_path / "out" / "scores.json").exists()
