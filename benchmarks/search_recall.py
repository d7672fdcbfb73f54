"""How often the built-in search finds the documents that hold the answer, with the question itself as the query.

    python benchmarks/search_recall.py HOTPOTQA_OR_MUSIQUE_FILE [--corpus FILE]
    python benchmarks/search_recall.py --world 2000

Recall at k: the share of a question's gold titles among the titles of the first k documents, averaged over the questions; `all` is the
share of questions with every gold title among them. Without --corpus the documents are the paragraphs that come with the questions.
"""

import argparse
import time
from collections.abc import Sequence

from tether.core.enums import Split
from tether.envs.searchqa import corpus
from tether.envs.searchqa.corpus import Question
from tether.envs.searchqa.dataset import load_questions
from tether.envs.searchqa.index import SearchIndex, open_index

DEPTHS = (2, 5, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="?", help="HotpotQA or MuSiQue file")
    parser.add_argument("--corpus", help="file of documents")
    parser.add_argument("--world", type=int, metavar="N", help="the first N generated test questions about the built-in encyclopedia")
    chosen = parser.parse_args()
    if (chosen.questions is None) == (chosen.world is None):
        parser.error("give a file of questions, or --world N")
    if chosen.world is not None:
        questions, index = _world(chosen.world)
    else:
        loaded = load_questions(chosen.questions, "error")
        questions = loaded.questions
        index = open_index(corpus.of_file(chosen.corpus, "error") if chosen.corpus else corpus.of_documents(loaded.documents))
    known = [question for question in questions if question.gold_titles]
    if not known:
        parser.error("no question tells its gold titles")
    print(f"{len(known)} questions, {len(index)} documents")
    for kind in sorted({question.kind for question in known} - {""}):
        _report(kind, index, [question for question in known if question.kind == kind])
    _report("all", index, known)


def _world(number: int) -> tuple[Sequence[Question], SearchIndex]:
    from tether.envs.searchqa.dataset import world_corpus
    from tether.envs.searchqa.encyclopedia import world_questions

    make = world_questions()
    return [make(seed, Split.TEST) for seed in range(number)], open_index(world_corpus())


def _report(name: str, index: SearchIndex, questions: Sequence[Question]) -> None:
    began = time.perf_counter()
    found = [[hit.document.title for hit in index.search(question.text, max(DEPTHS))] for question in questions]
    seconds = time.perf_counter() - began
    line = f"{name:12s} {len(questions):6d} questions"
    for depth in DEPTHS:
        shares = [
            len(set(question.gold_titles) & set(titles[:depth])) / len(set(question.gold_titles))
            for question, titles in zip(questions, found, strict=True)
        ]
        line += f"   recall@{depth} {sum(shares) / len(shares):.3f} (all {sum(share == 1 for share in shares) / len(shares):.3f})"
    print(f"{line}   {len(questions) / seconds:.0f} queries/s")


if __name__ == "__main__":
    main()
