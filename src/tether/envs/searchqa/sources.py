"""Where questions and documents come from by the options, loaded once per process: a trainer builds hundreds of equal environments."""

from functools import lru_cache

from tether.core.errors import BadInput
from tether.envs.dataset import BadRows
from tether.envs.searchqa import corpus
from tether.envs.searchqa.client import Retriever
from tether.envs.searchqa.data import Generator, load_questions
from tether.envs.searchqa.index_store import open_index


@lru_cache(maxsize=8)
def local_sources(data: str | None, documents: str | None, bad_rows: BadRows) -> tuple[Generator, Retriever]:
    """Questions, and an index in this process over the documents they are about."""
    if data is None:
        return questions_alone(None, bad_rows), open_index(world_corpus())
    questions = load_questions(data, bad_rows)
    if documents is not None:
        return questions.pool, open_index(corpus.of_file(documents, bad_rows))
    if not questions.documents:
        raise BadInput(
            f"searchqa: the rows of data='{data}' bring no paragraphs with them, so there is nothing to search; "
            "add corpus (a file of documents) or retriever (an address)"
        )
    return questions.pool, open_index(corpus.of_documents(questions.documents))


@lru_cache(maxsize=8)
def questions_alone(data: str | None, bad_rows: BadRows) -> Generator:
    """Questions whose documents somebody else has."""
    if data is not None:
        return load_questions(data, bad_rows).pool
    from tether.envs.searchqa.world.questions import world_questions

    return world_questions()


def world_corpus() -> corpus.Corpus:
    """The built-in encyclopedia."""
    from tether.envs.searchqa.world.encyclopedia import the_world

    return corpus.of_documents(the_world().documents())
