"""What counts as an action, in either format."""

import pytest

from tether.envs.searchqa.prompt import SearchAction, parse


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("search[River Takoma]", SearchAction("search", "River Takoma")),
        ("finish[Mount Likunu]", SearchAction("finish", "Mount Likunu")),
        ("  SEARCH [ two   words\n here ] \n", SearchAction("search", "two words here")),
        ("Finish[a [b] c]", SearchAction("finish", "a [b] c")),
        ("search[f(x)[0]]", SearchAction("search", "f(x)[0]")),
        ("finish[x] or finish[y]", SearchAction("finish", "x] or finish[y")),  # from the first bracket to the last
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
def test_brackets(answer: str, action: SearchAction | None) -> None:
    assert parse(answer, "brackets") == action


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("<search> River Takoma </search>", SearchAction("search", "River Takoma")),
        ("<answer> Mount Likunu </answer>", SearchAction("finish", "Mount Likunu")),
        ("<search>a</search><answer>b</answer>", SearchAction("search", "a")),  # the first tag decides
        ("<answer>b</answer><search>a</search>", SearchAction("finish", "b")),
        ("so <Search>a\nb</Search> then", SearchAction("search", "a b")),
        ("<search> a </search> b </search>", SearchAction("search", "a")),
        ("<search> </search>", None),
        ("<search> a </answer>", None),
        ("<search> a", None),
        ("search[a]", None),
        ("a", None),
        ("", None),
    ],
)
def test_tags(answer: str, action: SearchAction | None) -> None:
    assert parse(answer, "tags") == action
