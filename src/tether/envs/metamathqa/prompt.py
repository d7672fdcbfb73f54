"""What an agent is told about the problems of mathematics: the task, examples of replies, and the paper's frame."""

from tether.envs.wording import Example, in_papers_frame

EXAMPLE = Example(
    "A box holds 12 pencils. Tom has 3 boxes and gives away 8 pencils. How many pencils are left?",
    "3 boxes hold 3 * 12 = 36 pencils. 36 - 8 = 28 are left.",
    "28",
)
REFUSED = "Between the answer tags write only the result: no words, no units, no equals sign. Stop after </answer>."

WORKED = (
    Example(
        "A train travels 150 km in 2 hours. At the same speed, how far does it travel in 5 hours?",
        "The speed is 150 / 2 = 75 km an hour. In 5 hours it travels 5 * 75 = 375 km.",
        "375",
    ),
    Example(
        "Mia reads 2/5 of a book on Monday and 1/4 of it on Tuesday. What part of the book is left? Give an exact number.",
        "She has read 2/5 + 1/4 = 8/20 + 5/20 = 13/20. What is left is 1 - 13/20 = 7/20.",
        "7/20",
    ),
    Example(
        "The sum of a number and twice the number is 51. What is the number?",
        "If the number is x, then x + 2x = 3x = 51, so x = 51 / 3 = 17.",
        "17",
    ),
    Example(
        "A shirt costs 40 dollars. In a sale it is 15% cheaper. What does it cost in the sale, in dollars?",
        "15% of 40 is 0.15 * 40 = 6. The price is 40 - 6 = 34 dollars.",
        "34",
    ),
)


def task(attempts: int) -> str:
    tries = f" You have {attempts} attempts; the reward halves with every one you use." if attempts > 1 else ""
    return (
        f"Solve the mathematics problem. Answer with the result alone: a number such as 72, 3/4 or 2.5, or an expression in LaTeX.{tries}"
    )


def paper(attempts: int) -> str:
    tries = f" You have {attempts} attempts; the reward halves with every one you use." if attempts > 1 else ""
    return in_papers_frame(f"You are solving math problems.{tries}")
