"""The invented world: its facts hold together, its articles tell them, its questions have one answer each that a searcher can find."""

import os
import random
import re
import subprocess
import sys
from collections import Counter
from functools import lru_cache

import pytest

from tether.core.enums import Split
from tether.envs.searchqa.corpus import Document, of_documents
from tether.envs.searchqa.encyclopedia import SHARES, World, WorldQuestions, in_order, the_world, world_questions
from tether.envs.searchqa.world import COMPARISONS, KINDS, STYLES, UNFIT, WORDS, Entity, Namer

DIGEST = "8dbc978f094ab463f07ee2c942cde5e4"


@pytest.fixture(scope="module")
def world() -> World:
    return the_world()


@lru_cache(maxsize=1)
def _articles() -> dict[str, Document]:
    return {document.title: document for document in the_world().documents()}


@pytest.fixture(scope="module")
def articles() -> dict[str, Document]:
    return _articles()


@pytest.fixture(scope="module")
def questions() -> WorldQuestions:
    return world_questions()


def of_kind(world: World, *kinds: str) -> list[Entity]:
    return [entity for entity in world.entities if entity.kind in kinds]


# --- facts ---


def test_size(world: World) -> None:
    counts = Counter(entity.kind for entity in world.entities)
    assert set(counts) == set(KINDS)
    assert 3000 <= len(world.entities) <= 5000
    assert len(world.named) == len(world.entities)
    assert len({entity.name.lower() for entity in world.entities}) == len(world.entities)


def test_every_name_that_a_fact_gives_is_an_entity_of_the_right_kind(world: World) -> None:
    targets = {
        "realm": "realm", "capital": "town", "first_ruler": "ruler", "river": "river", "source": "mountain", "first_climber": "person",
        "feeder": "river", "birthplace": "town", "deathplace": "town", "teacher": "person", "academy": "academy", "spouse": "person",
        "predecessor": "ruler", "author": "person", "printed_in": "town", "dedicated_to": "person", "painter": "person",
        "hangs_in": "building", "composer": "person", "performed_in": "town", "instrument": "instrument", "inventor": "person",
        "made_in": "town", "builder": "guild", "captain": "person", "home_port": "town", "architect": "person", "town": "town",
        "founder": "person", "seat": "town", "near": "town", "victor": "realm", "loser": "realm", "commander": "person", "reign": "ruler",
        "honours": "person", "leader": "person", "ship": "ship", "reached": "lake", "describer": "person",
    }  # fmt: skip
    for entity in world.entities:
        for relation, value in entity.facts.items():
            if relation in targets:
                assert world.named[str(value)].kind == targets[relation], (entity.name, relation, value)
            elif relation != "famous_for":
                assert value not in world.named, (entity.name, relation, value)


def test_every_relation_has_a_question_and_a_sentence(world: World) -> None:
    for kind in KINDS.values():
        told = {slot for group in kind.groups for slot in re.findall(r"\{(\w+)\}", group[0])}
        assert told - {"name", "he", "He", "his", "His", "him"} == {relation.name for relation in kind.relations}, kind.name
        for group in kind.groups:
            facts = [set(re.findall(r"\{(\w+)\}", wording)) & {relation.name for relation in kind.relations} for wording in group]
            assert all(each == facts[0] for each in facts), (kind.name, group)
    for entity in world.entities:
        assert set(entity.facts) <= {relation.name for relation in KINDS[entity.kind].relations}, entity.name


def test_lives_are_possible(world: World) -> None:
    for person in of_kind(world, "person", "ruler"):
        assert 17 <= person.number("died") - person.number("born") <= 90, person
        assert world.named[person.text("birthplace")].number("founded") < person.number("born"), person
    for person in of_kind(world, "person"):
        if "teacher" in person.facts:
            teacher = world.named[person.text("teacher")]
            assert teacher.number("born") < person.number("born") and teacher.number("died") > person.number("born") + 10
            assert teacher.facts["occupation"] == person.facts["occupation"]
        if "academy" in person.facts:
            assert world.named[person.text("academy")].number("founded") < person.number("born") + 22
        if "spouse" in person.facts:
            spouse = world.named[person.text("spouse")]
            assert spouse.facts["spouse"] == person.name and spouse is not person
            assert max(spouse.number("born"), person.number("born")) + 18 < min(spouse.number("died"), person.number("died"))


def test_rulers_follow_one_another(world: World) -> None:
    for ruler in of_kind(world, "ruler"):
        assert ruler.number("born") < ruler.number("crowned") < ruler.number("died"), ruler
        if "predecessor" in ruler.facts:
            before = world.named[ruler.text("predecessor")]
            assert before.number("died") == ruler.number("crowned") and before.facts["realm"] == ruler.facts["realm"]
        else:
            assert world.named[ruler.text("realm")].facts["first_ruler"] == ruler.name


@pytest.mark.parametrize(
    ("kind", "maker", "year"),
    [
        ("book", "author", "published"), ("painting", "painter", "painted"), ("composition", "composer", "performed"),
        ("instrument", "inventor", "invented"), ("ship", "captain", "launched"), ("building", "architect", "completed"),
        ("guild", "founder", "founded"), ("academy", "founder", "founded"), ("battle", "commander", "fought"),
        ("expedition", "leader", "set_out"), ("species", "describer", "described"), ("mountain", "first_climber", "climbed"),
    ],
)  # fmt: skip
def test_whoever_made_it_was_grown_up_and_alive(kind: str, maker: str, year: str, world: World) -> None:
    for entity in of_kind(world, kind):
        person = world.named[entity.text(maker)]
        assert person.number("born") + 18 < entity.number(year) < person.number("died"), entity


def test_things_are_in_the_order_of_time(world: World) -> None:
    for ship in of_kind(world, "ship"):
        assert world.named[ship.text("builder")].number("founded") < ship.number("launched")
    for expedition in of_kind(world, "expedition"):
        assert 0 < expedition.number("set_out") - world.named[expedition.text("ship")].number("launched") <= 45
    for composition in of_kind(world, "composition"):
        assert world.named[composition.text("instrument")].number("invented") <= composition.number("performed")
    for festival in of_kind(world, "festival"):
        assert world.named[festival.text("honours")].number("died") < festival.number("first_held") <= 1495
    for book in of_kind(world, "book"):
        if "dedicated_to" in book.facts:
            friend = world.named[book.text("dedicated_to")]
            assert friend.number("born") < book.number("published") < friend.number("died") and friend.name != book.facts["author"]


def test_battles_agree_with_the_chronicles(world: World) -> None:
    for battle in of_kind(world, "battle"):
        ruler, commander = world.named[battle.text("reign")], world.named[battle.text("commander")]
        assert ruler.facts["realm"] == battle.facts["victor"] != battle.facts["loser"]
        assert ruler.number("crowned") < battle.number("fought") < ruler.number("died")
        assert world.named[commander.text("birthplace")].facts["realm"] == battle.facts["victor"]
        assert world.named[battle.text("near")].facts["realm"] in (battle.facts["victor"], battle.facts["loser"])


def test_waters_and_capitals_lie_in_their_realm(world: World) -> None:
    for river in of_kind(world, "river"):
        assert world.named[river.text("source")].facts["realm"] == river.facts["realm"]
    for lake in of_kind(world, "lake"):
        assert world.named[lake.text("feeder")].facts["realm"] == lake.facts["realm"]
    for town in of_kind(world, "town"):
        if "river" in town.facts:
            assert world.named[town.text("river")].facts["realm"] == town.facts["realm"]
    for realm in of_kind(world, "realm"):
        capital = world.named[realm.text("capital")]
        inside = [town for town in of_kind(world, "town") if town.facts["realm"] == realm.name]
        assert capital in inside and capital.number("population") == max(town.number("population") for town in inside)


def test_names(world: World) -> None:
    for entity in world.entities:
        assert re.fullmatch(r"[A-Z][A-Za-z' ]+", entity.name), entity.name
        if entity.kind in ("realm", "town", "person", "ruler", "instrument"):
            assert not any(letters in part for part in entity.name.lower().split() for letters in UNFIT), entity.name
    namer = Namer(random.Random(3))
    some = [namer.word(style, "places") for style in STYLES for _ in range(200)]
    assert len(set(some)) == len(some)
    pairs = [namer.pair() for _ in range(2000)]
    assert len(set(pairs)) == 2000


# --- articles ---


def test_articles_tell_every_fact(world: World, articles: dict[str, Document]) -> None:
    for entity in world.entities:
        text = articles[entity.name].text
        assert entity.name in text
        for relation, value in entity.facts.items():
            assert world.value_text(value) in text, (entity.name, relation, value, text)


def test_articles_are_short_and_whole(articles: dict[str, Document]) -> None:
    for document in articles.values():
        assert 40 <= len(document.text.split()) <= 120, document
        assert "{" not in document.text and "  " not in document.text
        assert document.text.endswith((".", '"')) and document.text[0].isupper()


def test_articles_are_varied(articles: dict[str, Document]) -> None:
    texts = [document.text for document in articles.values()]
    assert len(set(texts)) == len(texts)
    shapes = Counter(re.sub(r"[A-Z0-9][\w,']*", "X", document.text.split(". ")[0]) for document in articles.values())
    assert len(shapes) > 150


def test_the_world_is_the_same_everywhere(articles: dict[str, Document]) -> None:
    digest = of_documents(list(articles.values())).digest
    assert digest == DIGEST, "the world has changed: every question and figure in the documents with it"
    code = (
        "from tether.envs.searchqa.dataset import world_corpus; from tether.envs.searchqa.encyclopedia import world_questions;"
        "from tether.core.enums import Split; print(world_corpus().digest); print(world_questions()(7, Split.TRAIN).text)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": "77"}
    )
    assert done.stdout.splitlines() == [digest, world_questions()(7, Split.TRAIN).text]


# --- questions ---


def test_other_ways_to_write_an_answer(world: World, questions: WorldQuestions) -> None:
    def answers(name: str, relation: str) -> tuple[str, ...]:
        entity = world.named[name]
        question = questions.fact(entity, KINDS[entity.kind].relation(relation))
        assert question is not None
        return question.answers

    assert answers("River Takoma", "source") == ("Mount Likunu", "Likunu")
    assert answers("River Takoma", "length") == ("185 kilometres", "185 km", "185")
    assert answers("Leaden Fox", "builder") == ("Patient Oyster Guild", "Patient Oyster", "the Patient Oyster Guild")
    assert answers("Bribard Mewyddock", "famous_for") == ("Northern Ember at Dawn", 'the painting "Northern Ember at Dawn"')
    assert answers("Qeezezh", "population") == ("17,270",)


def test_there_are_tens_of_thousands(questions: WorldQuestions) -> None:
    assert len(questions.facts) > 20_000
    assert len(questions.bridges) > 50_000
    assert len(questions.inverses) > 1_000


def test_every_question_of_one_fact_has_one_answer(world: World, questions: WorldQuestions) -> None:
    """Wordings of two facts must not coincide: a question leads back to its one fact."""
    asked: dict[str, tuple[str, ...]] = {}
    for entity, relation in questions.facts:
        question = questions.fact(entity, relation)
        if question is not None:
            assert asked.setdefault(question.text, question.answers) == question.answers
    assert len(asked) > 24_000


def test_inverse_questions_have_one_answer(world: World, questions: WorldQuestions) -> None:
    for relation, entity in questions.inverses:
        having = [other for other in of_kind(world, entity.kind) if other.facts.get(relation.name) == entity.facts[relation.name]]
        assert having == [entity]


def test_bridges_hide_their_middle_and_their_answer(world: World, questions: WorldQuestions) -> None:
    rng = random.Random(5)
    asked: dict[str, tuple[str, ...]] = {}
    for entity, first, second in rng.sample(questions.bridges, 8000):
        question = questions.bridge(entity, first, second)
        if question is None:
            continue
        middle = world.named[entity.text(first.name)]
        assert question.gold_titles == (entity.name, middle.name)
        assert entity.name in question.text and middle.name not in question.text
        assert all(answer not in question.text for answer in question.answers)
        assert question.answers[0].split(" metres")[0].split(" kilometres")[0] == world.value_text(middle.facts[second.name])
        assert asked.setdefault(question.text, question.answers) == question.answers
    assert len(asked) > 7500


def test_answers_stand_in_the_gold_article(world: World, questions: WorldQuestions, articles: dict[str, Document]) -> None:
    for seed in range(3000):
        question = questions(seed, Split.ALL)
        if question.kind in ("one_hop", "bridge"):
            assert question.answers[0] in articles[question.gold_titles[-1]].text, question
        elif question.kind == "comparison":
            assert question.answers[0] in question.gold_titles
        else:
            assert question.answers in (("yes",), ("no",))
        assert question.text[0].isupper() and question.text.endswith("?") and "{" not in question.text


ORDERS = {
    ("river", "longer"): ("length", 1), ("mountain", "higher"): ("height", 1), ("lake", "deeper"): ("depth", 1),
    ("town", "more inhabitants"): ("population", 1), ("town", "older"): ("founded", -1), ("person", "born"): ("born", -1),
    ("person", "die"): ("died", 1), ("ruler", "throne"): ("crowned", -1), ("ruler", "crowned"): ("crowned", -1),
    ("book", "published"): ("published", -1), ("painting", "older"): ("painted", -1), ("ship", "launched"): ("launched", -1),
    ("ship", "longer"): ("length", 1), ("building", "higher"): ("height", 1), ("instrument", "invented"): ("invented", -1),
    ("guild", "older"): ("founded", -1), ("academy", "older"): ("founded", -1), ("battle", "fought"): ("fought", -1),
    ("festival", "older"): ("first_held", -1),
}  # fmt: skip
"""By kind and words of the question: the fact compared, and whether the greater (1) or the lesser (-1) is meant."""
SAME = {
    ("town", "realm"): "realm", ("river", "realm"): "realm", ("mountain", "realm"): "realm", ("person", "town"): "birthplace",
    ("person", "school"): "academy", ("person", "teacher"): "teacher", ("ruler", "realm"): "realm", ("book", "author"): "author",
    ("ship", "guild"): "builder", ("building", "town"): "town", ("painting", "painter"): "painter", ("festival", "town"): "town",
    ("battle", "realm"): "victor", ("species", "river"): "river",
}  # fmt: skip
"""By kind and the word after "same": the fact that has to agree."""


def test_comparisons_are_right(world: World, questions: WorldQuestions) -> None:
    met = Counter[object]()
    for seed in range(8000):
        question = questions(seed, Split.ALL)
        if question.kind not in ("comparison", "yes_no"):
            continue
        a, b = (world.named[title] for title in question.gold_titles)
        assert a.kind == b.kind and a is not b
        words = question.text.replace(a.name, "A", 1).replace(b.name, "B", 1)
        assert words.index("A") < words.index("B")
        same = re.search(r"same (\w+)", words)
        if same:
            key = (a.kind, same[1])
            yes = a.facts[SAME[key]] == b.facts[SAME[key]]
            met[yes] += 1
        else:
            key = next(key for key in ORDERS if key[0] == a.kind and key[1] in words)
            relation, sign = ORDERS[key]
            yes = sign * a.number(relation) > sign * b.number(relation)
            assert a.number(relation) != b.number(relation)
        expected = (a if yes else b).name if question.kind == "comparison" else "yes" if yes else "no"
        assert question.answers[0] == expected, question
        met[key] += 1
    assert all(met[key] for key in (*ORDERS, *SAME)), "every comparison was met"
    assert met[True] > 50 and met[False] > 50


def test_a_pair_is_asked_about_one_way_round(world: World, questions: WorldQuestions) -> None:
    rivers = of_kind(world, "river")[:20]
    orders = [in_order(a, b, "length") for a in rivers for b in rivers if a is not b]
    assert all(in_order(b, a, "length") == (a, b) for a, b in orders)
    assert 0.3 < sum(a.name < b.name for a, b in orders) / len(orders) < 0.7


def test_a_question_that_gives_itself_away_is_not_asked() -> None:
    author = Entity("person", "Anna Bell", {"birthplace": "Marn", "occupation": "a writer"})
    book = Entity("book", "The Life of Anna Bell", {"author": "Anna Bell"})
    town = Entity("town", "Marn", {"realm": "Marnia"})
    realm = Entity("realm", "Marnia", {"capital": "Marn"})
    small = WorldQuestions(World((author, book, town, realm), {each.name: each for each in (author, book, town, realm)}))
    wrote, born = KINDS["book"].relation("author"), KINDS["person"].relation("birthplace")
    assert small.fact(book, wrote) is None  # the answer stands in the title
    assert small.bridge(book, wrote, born) is None  # so does the middle
    assert small.fact(author, born) is not None
    assert small.bridge(author, born, KINDS["town"].relation("realm")) is not None
    assert small.fact(realm, KINDS["realm"].relation("capital")) is None  # Marn is part of Marnia


def test_shares_of_the_kinds(questions: WorldQuestions) -> None:
    kinds = Counter(questions(seed, Split.TRAIN).kind for seed in range(3000))
    assert sum(SHARES.values()) == pytest.approx(1)
    assert kinds["one_hop"] / 3000 == pytest.approx(SHARES["fact"] + SHARES["inverse"], abs=0.04)
    assert kinds["bridge"] / 3000 == pytest.approx(SHARES["bridge"], abs=0.04)
    assert {comparison.kind for comparison in COMPARISONS} <= set(KINDS)


def test_splits_share_no_question(questions: WorldQuestions) -> None:
    texts = {split: {questions(seed, split).text for seed in range(400)} for split in (Split.TRAIN, Split.VALIDATION, Split.TEST)}
    assert not texts[Split.TRAIN] & texts[Split.TEST] and not texts[Split.TRAIN] & texts[Split.VALIDATION]
    assert not texts[Split.VALIDATION] & texts[Split.TEST]
    assert len(texts[Split.TEST]) > 380
    assert questions(3, Split.TEST) == questions(3, Split.TEST)


def test_plants_do_not_eat(world: World) -> None:
    for species in of_kind(world, "species"):
        assert ("flowers" in species.facts) == (species.facts["sort"] in WORDS["plants"]) != ("diet" in species.facts)
