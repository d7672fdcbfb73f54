"""Evaluate several models on the same instances, compare them in pairs, and write a leaderboard.

    python compare_models.py tiny http://localhost:8000#my-model --env frozen_lake --prompts 64 --out results

A model is a name that Tether loads, a run folder, or the address of an OpenAI-compatible chat endpoint. What an endpoint said is kept in the
folder: after an interruption the same command continues and asks nothing twice.
"""

import argparse
import itertools
from pathlib import Path

import tether
from tether.runs.evaluations import boards, read_results
from tether.runs.pages import difference_words, write_leaderboard


def main(models: list[str], env: str, prompts: int, out: Path, samples: int = 1) -> list[tether.Evaluation]:
    """Evaluate the models and print what can be said about them."""
    results = []
    for model in models:
        result = tether.evaluate(model, env, prompts=prompts, samples=samples, out=out, options={"instructions": "plain"})
        low, high = result.intervals["success"] or (0.0, 1.0)
        print(f"{model}: success {result.metrics['success']:.1%} ({low:.1%} to {high:.1%}), {result.tokens['completion']} tokens written")
        results.append(result)
    for first, second in itertools.combinations(results, 2):
        difference = tether.compare(first.record, second.record)
        if difference is not None:
            print(difference_words(difference))
    print(f"leaderboard: {write_leaderboard(boards(read_results(out)), out / 'leaderboard.html')}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--env", default="frozen_lake")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results"))
    given = parser.parse_args()
    main(given.models, given.env, given.prompts, given.out, given.samples)
