"""Tables as they are written and read again."""

from adpo.experiments.tables import Lines, markdown, read

WRITTEN = [
    Lines("one", ["a", "b"], [["1", "2"], ["", "x, y"]]),
    Lines("two | three", ["only"], [["4 ± 1 %"], ["[-1, +1]"]]),
]


def test_what_is_written_is_read():
    assert read(markdown(WRITTEN)) == WRITTEN


def test_links_and_stress_are_their_text():
    (found,) = read("words\n\n| a | b |\n|---|---|\n| [one](file 'name') | **two** |\n\nmore words\n")
    assert found == Lines("", ["a", "b"], [["one", "two"]])
