"""The kinds of word problems: each draws numbers that make sense (whole people, positive change), and `Story.told` puts them into words.

A kind whose numbers make no good problem returns None and is drawn again. The order of the draws is part of every instance: it must not change.
"""

from collections.abc import Callable
from fractions import Fraction
from math import gcd
from typing import Any

from tether.envs.metamathqa.story import Number, ProblemDraft, Story

ProblemKind = Callable[[Story], ProblemDraft | None]
"""Writes a problem; None where the numbers drawn make no good one."""


# --- people, things and prices ---


def ages(story: Story) -> ProblemDraft | None:
    """Ages from a sum in the future, or from two ratios."""
    older, younger = story.people(2)
    if story.between(0, 1):
        age, gap, years = story.between(4, 40), story.between(2, 25), story.between(2, 15)
        return story.told("ages.sum", {"gap": gap, "years": years, "total": 2 * age + gap + 2 * years}, older=older, younger=younger)
    now = story.between(3, 6)
    then = story.between(2, now - 1)
    years = story.between(2, 16)
    age, rest = divmod(years * (then - 1), now - then)
    if rest or not 2 <= age <= 20 or age * now > 75:
        return None
    return story.told("ages.multiple", {"now": now, "then": then, "years": years}, older=older, younger=younger)


def ratios(story: Story) -> ProblemDraft | None:
    """A whole shared in a ratio."""
    one, two, three = story.people(3)
    parts = [story.between(1, 9) for _ in range(3)]
    if len(set(parts)) < 3 or gcd(*parts) > 1:
        return None
    numbers = dict(zip(("first", "second", "third"), parts, strict=True)) | {"total": story.between(2, 30) * sum(parts)}
    thing = story.choose(["marbles", "stickers", "trading cards", "beads", "shells"])
    words: dict[str, Any] = {"one": one, "two": two, "three": three, "thing": thing, "ratio": ":".join(map(str, parts))}
    form = "ratios.share" if story.between(0, 1) else "ratios.difference"
    return story.told(form, numbers, low=min(parts), high=max(parts), **words)


def remainders(story: Story) -> ProblemDraft | None:
    """Packing things into boxes: what is left over, or how many boxes it takes."""
    packer = story.person()
    things, box = story.choose(
        [("eggs", "carton"), ("books", "crate"), ("oranges", "bag"), ("tennis balls", "tube"), ("cookies", "tin"), ("photos", "album")]
    )
    lots, each, broken, size = story.between(3, 15), story.between(8, 40), story.between(1, 9), story.between(4, 24)
    full, rest = divmod(lots * each - broken, size)
    if full < 2 or rest == 0:
        return None
    numbers = {"lots": lots, "each": each, "broken": broken, "size": size}
    words: dict[str, Any] = {"packer": packer, "things": things, "box": box}
    so_far = story.say("remainders.so_far", {**numbers, **words})
    form = "remainders.left_over" if story.between(0, 1) else "remainders.boxes"
    return story.told(form, numbers, so_far=so_far, full=full, room=size - rest, **words)


def combinations(story: Story) -> ProblemDraft:
    """Counting choices."""
    chooser = story.person()
    form = story.choose(["outfits", "handshakes", "offices"])
    if form == "outfits":
        numbers = {"shirts": story.between(3, 9), "trousers": story.between(2, 7), "hats": story.between(2, 6)}
    else:
        numbers = {"people": story.between(5, 24)}
    return story.told(f"combinations.{form}", numbers, chooser=chooser)


def animals(story: Story) -> ProblemDraft:
    """Heads and legs."""
    farmer = story.person()
    birds, beasts = story.choose([("chickens", "rabbits"), ("ducks", "goats"), ("geese", "sheep"), ("turkeys", "cows")])
    two, four = story.between(4, 40), story.between(3, 30)
    return story.told("animals", {"heads": two + four, "legs": 2 * two + 4 * four}, farmer=farmer, birds=birds, beasts=beasts)


_SIMPLE = ((1, 2), (1, 3), (2, 3), (1, 4), (3, 4), (1, 5), (2, 5), (3, 5), (1, 6), (3, 8), (5, 8))


def fractions(story: Story) -> ProblemDraft | None:
    """Parts of a whole, and parts of the rest."""
    owner = story.person()
    (upper, lower), (second_upper, second_lower) = story.choose(_SIMPLE), story.choose(_SIMPLE)
    first, second = Fraction(upper, lower), Fraction(second_upper, second_lower)
    whole = lower * second_lower * story.between(2, 12)
    one, other = story.choose([("rent", "food"), ("a coat", "books"), ("a gift", "a concert ticket"), ("paint", "tools")])
    if whole > 600:
        return None
    if story.between(0, 1):
        return story.told("fractions.forwards", {"first": first, "second": second, "whole": whole}, owner=owner, one=one, other=other)
    left = whole * (1 - first) * (1 - second)
    return story.told("fractions.backwards", {"first": first, "second": second, "left": left}, owner=owner, one=one, other=other)


def discount(story: Story) -> ProblemDraft | None:
    """Some pieces at a percentage off, then a coupon."""
    buyer = story.person()
    item = story.choose(["backpack", "jacket", "lamp", "chair", "headset", "pair of boots", "blanket", "skateboard"])
    price, percent, coupon = story.between(16, 160, 2), story.between(5, 60, 5), story.between(2, 12)
    if price * (100 - percent) <= 100 * coupon:
        return None
    return story.told("discount", {"price": price, "percent": percent, "coupon": coupon}, buyer=buyer, item=item)


def change(story: Story) -> ProblemDraft | None:
    """Change from a note after buying two sorts of things."""
    buyer = story.person()
    first, second = story.choose(
        [("muffin", "carrot"), ("notebook", "marker"), ("apple", "pear"), ("postcard", "stamp"), ("candle", "ribbon")]
    )
    few, many = story.between(2, 9), story.between(2, 9)
    first_price, second_price = Fraction(story.between(2, 14), 4), Fraction(story.between(2, 14), 4)
    note = story.choose([10, 20, 50, 100])
    if not note / 3 < few * first_price + many * second_price < note:
        return None
    numbers: dict[str, Number] = {"few": few, "many": many, "first_price": first_price, "second_price": second_price, "note": note}
    return story.told("change", numbers, buyer=buyer, first=first, second=second)


def profit(story: Story) -> ProblemDraft | None:
    """What is left of sales after the costs."""
    seller = story.person()
    thing = story.choose(["bracelet", "cupcake", "poster", "scarf", "birdhouse", "soap bar"])
    count, cost, fee = story.between(12, 80), story.between(2, 9), story.between(10, 60, 5)
    price = cost + story.between(1, 9)
    if count * (price - cost) <= fee:
        return None
    return story.told("profit", {"count": count, "cost": cost, "price": price, "fee": fee}, seller=seller, thing=thing)


def savings(story: Story) -> ProblemDraft | None:
    """Weeks until something can be bought."""
    saver = story.person()
    goal = story.choose(["bicycle", "guitar", "telescope", "tablet", "tent", "sewing machine"])
    allowance, chores, spent, weeks = story.between(6, 20), story.between(3, 15), story.between(2, 8), story.between(4, 20)
    start = story.between(10, 60)
    weekly = allowance + chores - spent
    if weekly <= 1:
        return None
    numbers = {"price": start + weekly * weeks, "start": start, "allowance": allowance, "chores": chores, "spent": spent}
    return story.told("savings", numbers, saver=saver, goal=goal)


def coins(story: Story) -> ProblemDraft:
    """The worth of a handful of coins."""
    owner = story.person()
    numbers = {"quarters": story.between(3, 25), "dimes": story.between(2, 30), "nickels": story.between(2, 30)}
    return story.told("coins", numbers, owner=owner)


# --- measures and time ---


def areas(story: Story) -> ProblemDraft | None:
    """The fence around a garden, or the tiles of a floor."""
    owner = story.person()
    numbers = {"length": story.between(4, 30), "width": story.between(3, 20)}
    if numbers["length"] <= numbers["width"]:
        return None
    if story.between(0, 1):
        return story.told("areas.fence", numbers | {"gate": story.between(1, 3), "price": story.between(4, 25)}, owner=owner)
    side = story.choose([20, 25, 40, 50])
    if any(100 * length % side for length in numbers.values()):
        return None
    return story.told("areas.tiles", numbers | {"side": side}, owner=owner)


def units(story: Story) -> ProblemDraft:
    """Quantities that change their unit on the way."""
    person = story.person()
    form = story.choose(["bottles", "laps", "typing"])
    if form == "bottles":
        numbers = {"rate": story.between(10, 60, 5), "milliliters": story.choose([200, 250, 330, 500, 750]), "hours": story.between(2, 8)}
    elif form == "laps":
        numbers = {"lap": story.between(250, 900, 50), "laps": story.between(3, 12), "days": story.between(3, 30)}
    else:
        numbers = {"words": story.between(30, 80, 5), "pages": story.between(4, 30), "per_page": story.between(200, 450, 50)}
    return story.told(f"units.{form}", numbers, person=person)


def mixtures(story: Story) -> ProblemDraft | None:
    """Two solutions poured together, or water added to one."""
    chemist = story.person()
    weak, strong = story.between(5, 30, 5), story.between(35, 90, 5)
    much, little = story.between(2, 12), story.between(1, 10)
    words: dict[str, Any] = {"chemist": chemist, "substance": story.choose(["salt", "acid", "sugar", "alcohol"])}
    if story.between(0, 1):
        if Fraction(much * weak + little * strong, much + little).denominator > 8:
            return None
        return story.told("mixtures.mixed", {"much": much, "weak": weak, "little": little, "strong": strong}, **words)
    water = Fraction(much * (strong - weak), weak)
    if water.denominator > 4 or water > 60:
        return None
    return story.told("mixtures.diluted", {"much": much, "strong": strong, "weak": weak}, **words)


def averages(story: Story) -> ProblemDraft | None:
    """The score that is still needed, or the average of two groups."""
    pupil = story.person()
    if story.between(0, 1):
        tests, average, wanted = story.between(3, 9), story.between(60, 90), story.between(65, 95)
        if not average < wanted * (tests + 1) - average * tests <= 100:
            return None
        return story.told("averages.needed", {"tests": tests, "average": average, "wanted": wanted}, pupil=pupil)
    few, many, low, high = story.between(4, 20), story.between(4, 30), story.between(50, 75), story.between(76, 98)
    if Fraction(few * low + many * high, few + many).denominator > 5:
        return None
    return story.told("averages.groups", {"few": few, "low": low, "many": many, "high": high})


def rates(story: Story) -> ProblemDraft:
    """Two legs of a journey: the whole distance, or the average speed."""
    driver = story.person()
    fast, slow = story.between(50, 90, 5), story.between(20, 45, 5)
    fast_hours, slow_hours = story.between(2, 6), story.between(1, 4)
    numbers = {"fast": fast, "fast_hours": fast_hours, "slow": slow, "slow_hours": slow_hours}
    trip = story.say("rates.trip", {**numbers, "driver": driver})
    return story.told("rates.distance" if story.between(0, 2) else "rates.average", numbers, trip=trip)


def catch_up(story: Story) -> ProblemDraft | None:
    """A faster one starts later."""
    early, late = story.people(2)
    slow, head_start = story.between(4, 20), story.between(1, 4)
    fast = slow + story.between(1, 12)
    hours = Fraction(slow * head_start, fast - slow)
    if hours.denominator > 4 or hours > 8:
        return None
    return story.told("catch_up", {"slow": slow, "fast": fast, "head_start": head_start}, early=early, late=late)


def schedules(story: Story) -> ProblemDraft:
    """Lessons with breaks between them, or departures at a fixed interval."""
    if story.between(0, 1):
        lessons = {"lessons": story.between(3, 8), "minutes": story.between(35, 60, 5), "pause": story.between(5, 20, 5)}
        return story.told("schedules.lessons", lessons)
    departures = {"interval": story.choose([6, 10, 12, 15, 20, 30]), "hours": story.between(3, 12), "seats": story.between(20, 60, 5)}
    return story.told("schedules.departures", departures)


def work_together(story: Story) -> ProblemDraft | None:
    """Two that work at once, or one that works against the other."""
    one, other = story.people(2)
    quick, long = story.between(2, 12), story.between(3, 30)
    if quick >= long:
        return None
    numbers = {"quick": quick, "long": long}
    if story.between(0, 1):
        return story.told("work_together.together", numbers, one=one, other=other, rate=Fraction(1, quick) + Fraction(1, long))
    if Fraction(quick * long, long - quick) > 60:
        return None
    return story.told("work_together.against", numbers, rate=Fraction(1, quick) - Fraction(1, long))


# --- numbers themselves ---


def sequences(story: Story) -> ProblemDraft:
    """Rows that grow by a constant, or a number that keeps doubling."""
    person = story.person()
    if story.between(0, 2):
        rows = {"first": story.between(6, 30), "more": story.between(2, 8), "rows": story.between(5, 25)}
        return story.told("sequences.rows", rows, person=person)
    start, factor, hours = story.between(2, 20), story.choose([2, 3]), story.between(3, 8)
    grows = {2: "doubles", 3: "triples"}[factor]
    product = " * ".join([str(factor)] * hours)
    return story.told("sequences.culture", {"start": start, "hours": hours}, form=grows, grows=grows, product=product)


def consecutive(story: Story) -> ProblemDraft:
    """Consecutive numbers from their sum."""
    count, gap = story.between(3, 7), story.choose([1, 2])
    first = story.between(3, 90)
    sort = "whole" if gap == 1 else "even" if first % 2 == 0 else "odd"
    want, sign = story.choose([("largest", "+"), ("smallest", "-")])
    spread = Fraction(gap * (count - 1), 2)
    total = count * first + gap * count * (count - 1) // 2
    numbers = {"count": count, "total": total}
    return story.told("consecutive", numbers, form=f"{sort} {want}", sort=sort, want=want, sign=sign, spread=spread)


def percent_change(story: Story) -> ProblemDraft | None:
    """Up by a percentage, down by another, forwards or backwards."""
    start, up, down = story.between(80, 4000, 20), story.between(5, 60, 5), story.between(5, 50, 5)
    raised = Fraction(start * (100 + up), 100)
    end = raised * (100 - down) / 100
    if raised.denominator > 1 or end.denominator > 1:
        return None
    town = story.choose(["Aldermere", "Birchfield", "Castleton", "Dunmore", "Eastvale"])
    if story.between(0, 1):
        return story.told("percent_change.forwards", {"start": start, "up": up, "down": down}, town=town)
    return story.told("percent_change.backwards", {"end": end, "up": up, "down": down}, town=town)


def unknown_x(story: Story) -> ProblemDraft | None:
    """A question with x in it and its answer: what was x?"""
    person = story.person()
    form = story.choose(["packs", "wages", "reading"])
    if form == "packs":
        own, packs, each, given = story.between(3, 40), story.between(2, 9), story.between(4, 15), story.between(2, 20)
        numbers = {"packs": packs, "each": each, "given": given, "result": own + packs * each - given}
    elif form == "wages":
        wage, days, hours, tax = story.between(9, 30), story.between(3, 6), story.between(4, 9), story.between(10, 60, 5)
        numbers = {"hours": hours, "days": days, "tax": tax, "result": wage * days * hours - tax}
    else:
        pages, daily, days = story.between(120, 480), story.between(8, 30), story.between(3, 12)
        numbers = {"daily": daily, "days": days, "result": pages - 2 * daily * days}
        if numbers["result"] <= 0:
            return None
    return story.told(f"unknown_x.{form}", numbers, person=person)


KINDS: dict[str, ProblemKind] = {
    kind.__name__: kind
    for kind in (
        *(ages, animals, areas, averages, catch_up, change, coins, combinations, consecutive, discount, fractions, mixtures),
        *(percent_change, profit, rates, ratios, remainders, savings, schedules, sequences, units, unknown_x, work_together),
    )
}
"""By name, in this order: it is part of every instance."""
