"""Grading of answers: what a text answers (`extraction`), and whether that equals the known result (`grader`)."""

from atroposlib.grading.at_once import last_number_is
from atroposlib.grading.extraction import after_thoughts, extract_boxed, extract_tagged, last_number
from atroposlib.grading.grader import Grader, GraderSettings, Outcome

__all__ = [
    "Grader",
    "GraderSettings",
    "Outcome",
    "after_thoughts",
    "extract_boxed",
    "extract_tagged",
    "last_number",
    "last_number_is",
]
