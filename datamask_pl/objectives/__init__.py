"""What is maximised: one class per term, configurable from YAML by name or class path.

`base` says what a term is, `ground_set` what it is evaluated on, `joint` adds the terms up. The formulas are in
`functional.terms`; the classes here share the work among ranks and keep what is derived from a block. A new term is a
new file here, with its formula in `functional.terms` and its name in `joint`.
"""

from datamask_pl.objectives.base import ClosedFormObjective, Expectation, Objective
from datamask_pl.objectives.disf import DiSF
from datamask_pl.objectives.facility_location import FacilityLocation
from datamask_pl.objectives.joint import DiversityName
from datamask_pl.objectives.pairwise import PairwiseSimilarity
from datamask_pl.objectives.quality import Quality

__all__ = [
    "ClosedFormObjective",
    "DiSF",
    "DiversityName",
    "Expectation",
    "FacilityLocation",
    "Objective",
    "PairwiseSimilarity",
    "Quality",
]
