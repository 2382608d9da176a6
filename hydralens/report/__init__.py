"""The report: one self-contained HTML page that a person can read, the answer first."""

from hydralens.report.page import run_figures, write_report
from hydralens.report.result import RunResult

__all__ = ["RunResult", "run_figures", "write_report"]
