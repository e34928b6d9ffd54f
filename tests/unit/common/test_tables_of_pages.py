"""Tables that programs write into pages say once what neighbouring rows share."""

from tests import tables

PAGE = "before\n<!-- a -->\n<!-- b -->\nafter\n"


def test_neighbours_that_differ_in_their_name_alone_are_one_row() -> None:
    rows = [["1", "x", "y"], ["2", "x", "y"], ["3", "x", ""], ["4", "x", "y"]]
    page = tables.with_table(PAGE, "<!-- a -->", "<!-- b -->", ["name", "p", "q"], rows)
    assert "| 1, 2 | x | y |\n| 3 | x |  |\n| 4 | x | y |\n" in page
    assert tables.with_table(page, "<!-- a -->", "<!-- b -->", ["name", "p", "q"], rows) == page
