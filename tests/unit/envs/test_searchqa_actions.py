"""What counts as an action, in either format."""

import pytest

from tether.envs.searchqa.render import Action, parse


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("search[River Takoma]", Action("search", "River Takoma")),
        ("finish[Mount Likunu]", Action("finish", "Mount Likunu")),
        ("  SEARCH [ two   words\n here ] \n", Action("search", "two words here")),
        ("Finish[a [b] c]", Action("finish", "a [b] c")),
        ("search[f(x)[0]]", Action("search", "f(x)[0]")),
        ("finish[x] or finish[y]", Action("finish", "x] or finish[y")),  # from the first bracket to the last
        ("search[]", None),
        ("finish[  ]", None),
        ("search[x", None),
        ("search x]", None),
        ("research[x]", None),
        ("search[x] please", None),
        ("Mount Likunu", None),
        ("<search> x </search>", None),
        ("", None),
    ],
)
def test_brackets(answer: str, action: Action | None) -> None:
    assert parse(answer, "brackets") == action


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("<search> River Takoma </search>", Action("search", "River Takoma")),
        ("<answer> Mount Likunu </answer>", Action("finish", "Mount Likunu")),
        ("<search>a</search><answer>b</answer>", Action("search", "a")),  # the first tag decides
        ("<answer>b</answer><search>a</search>", Action("finish", "b")),
        ("so <Search>a\nb</Search> then", Action("search", "a b")),
        ("<search> a </search> b </search>", Action("search", "a")),
        ("<search> </search>", None),
        ("<search> a </answer>", None),
        ("<search> a", None),
        ("search[a]", None),
        ("a", None),
        ("", None),
    ],
)
def test_tags(answer: str, action: Action | None) -> None:
    assert parse(answer, "tags") == action
