"""Problems about numbers themselves: sequences, consecutive numbers, percentages of change, and the unknown x of MetaMath."""

from fractions import Fraction

from tether.envs.metamathqa.kinds.story import ProblemDraft, Story, draft, money, show


def sequences(story: Story) -> ProblemDraft:
    """Rows that grow by a constant, or a number that keeps doubling."""
    person = story.person()
    if story.between(0, 2):
        first, more, rows = story.between(6, 30), story.between(2, 8), story.between(5, 25)
        last = first + more * (rows - 1)
        total = rows * (first + last) // 2
        question = story.choose(
            [
                f"A theater has {rows} rows. The first row has {first} seats, and each row has {more} seats more than the one in front of it. "
                "How many seats are there in all?",
                f"{person.name} saves stamps: {first} in the first week, and every week {more} more than the week before. "
                f"How many stamps does {person.they} have after {rows} weeks?",
            ]
        )
        steps = [f"{first} + {more} * ({rows} - 1) = {last}", f"({first} + {last}) * {rows} / 2 = {total}"]
        return draft(question, total, steps, form="rows", first=first, more=more, rows=rows)
    start, factor, hours = story.between(2, 20), story.choose([2, 3]), story.between(3, 8)
    word = {2: "doubles", 3: "triples"}[factor]
    question = (
        f"A culture starts with {start} bacteria, and their number {word} every hour. How many bacteria are there after {hours} hours?"
    )
    product = " * ".join([str(factor)] * hours)
    steps = [f"{product} = {factor**hours}", f"{start} * {factor**hours} = {start * factor**hours}"]
    return draft(question, start * factor**hours, steps, form=word, start=start, hours=hours)


def consecutive(story: Story) -> ProblemDraft | None:
    """Consecutive numbers from their sum."""
    count, gap = story.between(3, 7), story.choose([1, 2])
    first = story.between(3, 90)
    numbers = [first + gap * place for place in range(count)]
    kind = "whole" if gap == 1 else "even" if first % 2 == 0 else "odd"
    want, answer = story.choose([("largest", numbers[-1]), ("smallest", numbers[0])])
    total = sum(numbers)
    question = story.choose(
        [
            f"The sum of {count} consecutive {kind} numbers is {total}. What is the {want} of them?",
            f"{count} houses in a row have consecutive {kind} numbers that add up to {total}. What is the {want} of the house numbers?",
        ]
    )
    spread = Fraction(gap * (count - 1), 2)
    sign = "+" if want == "largest" else "-"
    steps = [f"{total} / {count} = {show(Fraction(total, count))}", f"{show(Fraction(total, count))} {sign} {show(spread)} = {answer}"]
    return draft(question, answer, steps, form=f"{kind} {want}", count=count, total=total)


def percent_change(story: Story) -> ProblemDraft | None:
    """Up by a percentage, down by another, forwards or backwards."""
    start, up, down = story.between(80, 4000, 20), story.between(5, 60, 5), story.between(5, 50, 5)
    raised = Fraction(start * (100 + up), 100)
    end = raised * (100 - down) / 100
    if raised.denominator > 1 or end.denominator > 1:
        return None
    steps = [f"{start} * (100 + {up}) / 100 = {raised}", f"{raised} * (100 - {down}) / 100 = {end}"]
    town = story.choose(["Aldermere", "Birchfield", "Castleton", "Dunmore", "Eastvale"])
    if story.between(0, 1):
        question = (
            f"The village of {town} had {start} inhabitants. In the first year their number grew by {up}%, in the second it fell by {down}%. "
            "How many inhabitants does it have now?"
        )
        return draft(question, end, steps, form="forwards", start=start, up=up, down=down)
    question = (
        f"The number of members of the {town} library rose by {up}% last year and fell by {down}% this year; now it is {end}. "
        "How many members were there before the two changes?"
    )
    steps = [f"{end} * 100 / (100 - {down}) = {raised}", f"{raised} * 100 / (100 + {up}) = {start}"]
    return draft(question, start, steps, form="backwards", end=end, up=up, down=down)


def unknown_x(story: Story) -> ProblemDraft | None:
    """A question with x in it and its answer: what was x? The manner of MetaMath's backward questions."""
    person = story.person()
    form = story.choose(["packs", "wages", "reading"])
    if form == "packs":
        own, packs, each, given = story.between(3, 40), story.between(2, 9), story.between(4, 15), story.between(2, 20)
        result = own + packs * each - given
        told = (
            f"{person.name} has x marbles. {person.they.capitalize()} buys {packs} packs of {each} marbles and gives {given} marbles to a friend. "
            f"How many marbles does {person.they} have now?"
        )
        steps = [f"{packs} * {each} = {packs * each}", f"{result} + {given} - {packs * each} = {own}"]
        return draft(_backward(told, result), own, steps, form=form, packs=packs, each=each, given=given, result=result)
    if form == "wages":
        wage, days, hours, tax = story.between(9, 30), story.between(3, 6), story.between(4, 9), story.between(10, 60, 5)
        result = wage * days * hours - tax
        told = (
            f"{person.name} earns x dollars an hour and works {hours} hours a day on {days} days a week. Every week {money(tax)} is kept back for "
            f"lunches. How many dollars does {person.they} take home a week?"
        )
        steps = [
            f"{result} + {tax} = {result + tax}",
            f"{days} * {hours} = {days * hours}",
            f"{result + tax} / {days * hours} = {wage}",
        ]
        return draft(_backward(told, result), wage, steps, form=form, hours=hours, days=days, tax=tax, result=result)
    pages, daily, days = story.between(120, 480), story.between(8, 30), story.between(3, 12)
    result = pages - 2 * daily * days
    if result <= 0:
        return None
    told = (
        f"A book has x pages. {person.name} reads {daily} pages in the morning and as many in the evening, for {days} days. "
        f"How many pages are left to read?"
    )
    steps = [f"2 * {daily} * {days} = {2 * daily * days}", f"{result} + {2 * daily * days} = {pages}"]
    return draft(_backward(told, result), pages, steps, form=form, daily=daily, days=days, result=result)


def _backward(told: str, result: int) -> str:
    return f"{told} If we know the answer to the above question is {result}, what is the value of the unknown variable x?"
