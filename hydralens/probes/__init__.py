"""What is asked of a model: counterfactual pairs that test retrieval and reasoning from context alone."""

from hydralens.probes.base import Probe
from hydralens.probes.build import Example, make_probe
from hydralens.probes.needles import kv_recall, niah, retrieval
from hydralens.probes.solving import Solved, solve
from hydralens.probes.tasks import addition, comparison, induction, ioi, multiplication, reasoning, variable_tracking

__all__ = [
    "Example",
    "Probe",
    "Solved",
    "addition",
    "comparison",
    "induction",
    "ioi",
    "kv_recall",
    "make_probe",
    "multiplication",
    "niah",
    "reasoning",
    "retrieval",
    "solve",
    "variable_tracking",
]
