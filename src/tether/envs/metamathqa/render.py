"""What the agent is told: the task, the question, and what became of an answer. The replies are upstream's."""

from tether.envs.metamathqa.generator import Problem

CORRECT = "Correct!"
INCORRECT = "Incorrect."
THINK_AGAIN = "Incorrect. Please think again."
NO_ANSWER = "No answer was given. Please answer the question."


def task(attempts: int) -> str:
    tries = f" You have {attempts} attempts; the reward halves with every one you use." if attempts > 1 else ""
    return (
        f"Solve the mathematics problem. Answer with the result alone: a number such as 72, 3/4 or 2.5, or an expression in LaTeX.{tries}"
    )


def question_text(problem: Problem) -> str:
    return problem.question
