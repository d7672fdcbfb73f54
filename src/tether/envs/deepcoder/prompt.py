"""What an agent is told about the programming problems: the task, examples of replies, and the paper's frame."""

from tether.envs.wording import Example, in_papers_frame

REFUSED = (
    "Between the answer tags write one ```python code fence with the whole program and nothing else: no explanation, no tests. "
    "Close the fence and stop after </answer>."
)

EXAMPLE = Example(
    "Write `count_even(numbers)`, which returns how many of the numbers are even.",
    "A number is even if its remainder by 2 is 0. I count those.",
    "```python\ndef count_even(numbers):\n    return sum(1 for number in numbers if number % 2 == 0)\n```",
)
WORKED = (
    Example(
        "Write `initials(name)`, which returns the first letter of each word of the name in upper case. "
        "Example: `initials('ada king lovelace')` returns `'AKL'`.",
        "I split the name at spaces and join the first letters in upper case.",
        "```python\ndef initials(name):\n    return ''.join(word[0].upper() for word in name.split())\n```",
    ),
    Example(
        "The first line has a number n, the second has n whole numbers. Print the difference between the largest and the smallest. "
        "Read the input from standard input and print the output to standard output.",
        "I read all numbers and print the maximum minus the minimum.",
        "```python\nn = int(input())\nvalues = list(map(int, input().split()))[:n]\nprint(max(values) - min(values))\n```",
    ),
    Example(
        "Write `first_repeat(text)`, which returns the first character that occurs a second time, or an empty string.",
        "I go through the characters and remember those seen; the first one seen before is the result.",
        "```python\ndef first_repeat(text):\n    seen = set()\n    for character in text:\n        if character in seen:\n"
        "            return character\n        seen.add(character)\n    return ''\n```",
    ),
)

_PAPER = "You are solving a coding task. Provide a complete Python function solution only. Format: <answer>...</answer>"
_AGAIN = " A program that fails is told how, and you may answer again with another one."


def task(max_turns: int) -> str:
    first = (
        "Solve the programming problem in Python 3 with its standard library. "
        "Inside the answer give one whole program in a ```python code fence; it is run on public and hidden tests."
    )
    return f"{first}{_AGAIN}" if max_turns > 1 else first


def paper(max_turns: int) -> str:
    return in_papers_frame(f"{_PAPER}{_AGAIN}" if max_turns > 1 else _PAPER)
