"""Problems of measures and time: areas and fences, units, mixtures, averages; travel, catching up, schedules, working together."""

from fractions import Fraction

from tether.envs.metamathqa.kinds.story import ProblemDraft, Story, draft, money, plural, show


def areas(story: Story) -> ProblemDraft | None:
    """The fence around a garden, or the tiles of a floor."""
    owner = story.person()
    length, width = story.between(4, 30), story.between(3, 20)
    if length <= width:
        return None
    if story.between(0, 1):
        gate, price = story.between(1, 3), story.between(4, 25)
        around = 2 * (length + width)
        cost = (around - gate) * price
        question = story.choose(
            [
                f"{owner.name}'s garden is a rectangle {length} meters long and {width} meters wide. {owner.they.capitalize()} fences it all "
                f"around, except for a gate {plural(gate, 'meter')} wide. A meter of fence costs {money(price)}. How many dollars does the fence cost?",
                f"A rectangular meadow measures {length} meters by {width} meters. It gets a fence on all sides with an opening of {plural(gate, 'meter')} "
                f"left for the cows. At {money(price)} a meter, what does the fence cost in dollars?",
            ]
        )
        steps = [f"2 * ({length} + {width}) = {around}", f"{around} - {gate} = {around - gate}", f"{around - gate} * {price} = {cost}"]
        return draft(question, cost, steps, form="fence", length=length, width=width, gate=gate, price=price)
    side = story.choose([20, 25, 40, 50])
    across, along = Fraction(100 * length, side), Fraction(100 * width, side)
    if across.denominator > 1 or along.denominator > 1:
        return None
    question = (
        f"A hall is {length} meters long and {width} meters wide. {owner.name} covers the floor with square tiles whose sides are {side} "
        "centimeters long. How many tiles does it take?"
    )
    steps = [f"{length} * 100 / {side} = {across}", f"{width} * 100 / {side} = {along}", f"{across} * {along} = {across * along}"]
    return draft(question, across * along, steps, form="tiles", length=length, width=width, side=side)


def units(story: Story) -> ProblemDraft:
    """Quantities that change their unit on the way."""
    person = story.person()
    form = story.choose(["bottles", "laps", "typing"])
    if form == "bottles":
        rate, milliliters, hours = story.between(10, 60, 5), story.choose([200, 250, 330, 500, 750]), story.between(2, 8)
        liters = Fraction(rate * milliliters * 60 * hours, 1000)
        question = (
            f"A machine fills {rate} bottles a minute with {milliliters} milliliters of lemonade each. "
            f"How many liters of lemonade does it use in {hours} hours?"
        )
        steps = [
            f"{rate} * 60 * {hours} = {rate * 60 * hours}",
            f"{rate * 60 * hours} * {milliliters} = {rate * 60 * hours * milliliters}",
            f"{rate * 60 * hours * milliliters} / 1000 = {show(liters)}",
        ]
        return draft(question, liters, steps, form=form, rate=rate, milliliters=milliliters, hours=hours)
    if form == "laps":
        lap, laps, days = story.between(250, 900, 50), story.between(3, 12), story.between(3, 30)
        kilometers = Fraction(lap * laps * days, 1000)
        question = story.choose(
            [
                f"{person.name} runs {laps} laps of {lap} meters every day. How many kilometers is that in {days} days?",
                f"One lap of the park is {lap} meters. {person.name} walks {laps} laps a day for {days} days. How many kilometers does "
                f"{person.they} walk in all?",
            ]
        )
        steps = [
            f"{lap} * {laps} = {lap * laps}",
            f"{lap * laps} * {days} = {lap * laps * days}",
            f"{lap * laps * days} / 1000 = {show(kilometers)}",
        ]
        return draft(question, kilometers, steps, form=form, lap=lap, laps=laps, days=days)
    words, pages, per_page = story.between(30, 80, 5), story.between(4, 30), story.between(200, 450, 50)
    hours_needed = Fraction(pages * per_page, words * 60)
    question = (
        f"{person.name} types {words} words a minute. How many hours does {person.they} need for {pages} pages of {per_page} words each? "
        "Give an exact number."
    )
    steps = [f"{pages} * {per_page} = {pages * per_page}", f"{words} * 60 = {words * 60}"]
    steps.append(f"{pages * per_page} / {words * 60} = {show(hours_needed)}")
    return draft(question, hours_needed, steps, form=form, words=words, pages=pages, per_page=per_page)


def mixtures(story: Story) -> ProblemDraft | None:
    """Two solutions poured together, or water added to one."""
    chemist = story.person()
    weak, strong = story.between(5, 30, 5), story.between(35, 90, 5)
    much, little = story.between(2, 12), story.between(1, 10)
    substance = story.choose(["salt", "acid", "sugar", "alcohol"])
    if story.between(0, 1):
        part = much * weak + little * strong
        percent = Fraction(part, much + little)
        if percent.denominator > 8:
            return None
        question = (
            f"{chemist.name} mixes {much} liters of a {weak}% {substance} solution with {plural(little, 'liter')} of a {strong}% solution. "
            f"What is the percentage of {substance} in the mixture? Give an exact number."
        )
        steps = [
            f"{much} * {weak} + {little} * {strong} = {part}",
            f"{much} + {little} = {much + little}",
            f"{part} / {much + little} = {show(percent)}",
        ]
        return draft(question, percent, steps, form="mixed", much=much, weak=weak, little=little, strong=strong)
    water = Fraction(much * (strong - weak), weak)
    if water.denominator > 4 or water > 60:
        return None
    question = f"How many liters of water must {chemist.name} add to {much} liters of a {strong}% {substance} solution to make it a {weak}% solution? Give an exact number."
    steps = [
        f"{much} * {strong} / {weak} = {show(Fraction(much * strong, weak))}",
        f"{show(Fraction(much * strong, weak))} - {much} = {show(water)}",
    ]
    return draft(question, water, steps, form="diluted", much=much, strong=strong, weak=weak)


def averages(story: Story) -> ProblemDraft | None:
    """The score that is still needed, or the average of two groups."""
    pupil = story.person()
    if story.between(0, 1):
        tests, average, wanted = story.between(3, 9), story.between(60, 90), story.between(65, 95)
        needed = wanted * (tests + 1) - average * tests
        if not average < needed <= 100:
            return None
        question = story.choose(
            [
                f"{pupil.name} has an average of {average} points after {tests} tests. How many points does {pupil.they} need in the next test to "
                f"raise {pupil.their} average to {wanted}?",
                f"After {tests} games {pupil.name}'s mean score is {average}. What must {pupil.they} score in one more game so that the mean of "
                f"all games is {wanted}?",
            ]
        )
        steps = [
            f"{wanted} * ({tests} + 1) = {wanted * (tests + 1)}",
            f"{average} * {tests} = {average * tests}",
            f"{wanted * (tests + 1)} - {average * tests} = {needed}",
        ]
        return draft(question, needed, steps, form="needed", tests=tests, average=average, wanted=wanted)
    few, many, low, high = story.between(4, 20), story.between(4, 30), story.between(50, 75), story.between(76, 98)
    mean = Fraction(few * low + many * high, few + many)
    if mean.denominator > 5:
        return None
    question = (
        f"In a class the {few} pupils who sat the test in the morning scored {low} points on average; the {many} who sat it in the afternoon "
        f"scored {high} on average. What is the average of the whole class? Give an exact number."
    )
    steps = [
        f"{few} * {low} + {many} * {high} = {few * low + many * high}",
        f"{few} + {many} = {few + many}",
        f"{few * low + many * high} / {few + many} = {show(mean)}",
    ]
    return draft(question, mean, steps, form="groups", few=few, low=low, many=many, high=high)


def rates(story: Story) -> ProblemDraft:
    """Two legs of a journey: the whole distance, or the average speed."""
    driver = story.person()
    fast, slow = story.between(50, 90, 5), story.between(20, 45, 5)
    fast_hours, slow_hours = story.between(2, 6), story.between(1, 4)
    distance = fast * fast_hours + slow * slow_hours
    hours = fast_hours + slow_hours
    trip = story.choose(
        [
            f"{driver.name} drives for {plural(fast_hours, 'hour')} on the motorway at {fast} kilometers per hour and then for "
            f"{plural(slow_hours, 'hour')} on country roads at {slow} kilometers per hour.",
            f"A bus covers the first part of its route in {plural(fast_hours, 'hour')} at {fast} kilometers per hour and the second part in "
            f"{plural(slow_hours, 'hour')} at {slow} kilometers per hour.",
        ]
    )
    steps = [
        f"{fast} * {fast_hours} = {fast * fast_hours}",
        f"{slow} * {slow_hours} = {slow * slow_hours}",
        f"{fast * fast_hours} + {slow * slow_hours} = {distance}",
    ]
    numbers = {"fast": fast, "fast_hours": fast_hours, "slow": slow, "slow_hours": slow_hours}
    if story.between(0, 2):
        return draft(f"{trip} How many kilometers is that altogether?", distance, steps, form="distance", **numbers)
    speed = Fraction(distance, hours)
    steps += [f"{fast_hours} + {slow_hours} = {hours}", f"{distance} / {hours} = {show(speed)}"]
    question = f"{trip} What is the average speed over the whole way, in kilometers per hour? Give an exact number."
    return draft(question, speed, steps, form="average", **numbers)


def catch_up(story: Story) -> ProblemDraft | None:
    """A faster one starts later."""
    early, late = story.people(2)
    slow, head_start = story.between(4, 20), story.between(1, 4)
    fast = slow + story.between(1, 12)
    hours = Fraction(slow * head_start, fast - slow)
    if hours.denominator > 4 or hours > 8:
        return None
    question = story.choose(
        [
            f"{early.name} sets off on a bicycle at {slow} kilometers per hour. {plural(head_start, 'hour')} later {late.name} follows on the "
            f"same road at {fast} kilometers per hour. How many hours after {late.name}'s start do they meet? Give an exact number.",
            f"A barge travels down a canal at {slow} kilometers per hour. A boat leaves the same lock {plural(head_start, 'hour')} after it at "
            f"{fast} kilometers per hour. After how many hours on the water does the boat catch up with the barge? Give an exact number.",
        ]
    )
    steps = [
        f"{slow} * {head_start} = {slow * head_start}",
        f"{fast} - {slow} = {fast - slow}",
        f"{slow * head_start} / {fast - slow} = {show(hours)}",
    ]
    return draft(question, hours, steps, slow=slow, fast=fast, head_start=head_start)


def schedules(story: Story) -> ProblemDraft:
    """Lessons with breaks between them, or departures at a fixed interval."""
    if story.between(0, 1):
        lessons, minutes, pause = story.between(3, 8), story.between(35, 60, 5), story.between(5, 20, 5)
        total = lessons * minutes + (lessons - 1) * pause
        question = story.choose(
            [
                f"A school morning has {lessons} lessons of {minutes} minutes each, with a break of {pause} minutes between one lesson and the "
                "next. How many minutes pass from the start of the first lesson to the end of the last one?",
                f"A dentist sees {lessons} patients one after another. Each visit takes {minutes} minutes, and between two visits there are "
                f"{pause} minutes for cleaning. How many minutes does it take from the start of the first visit to the end of the last?",
            ]
        )
        steps = [f"{lessons} * {minutes} = {lessons * minutes}", f"({lessons} - 1) * {pause} = {(lessons - 1) * pause}"]
        steps.append(f"{lessons * minutes} + {(lessons - 1) * pause} = {total}")
        return draft(question, total, steps, form="lessons", lessons=lessons, minutes=minutes, pause=pause)
    interval, hours, seats = story.choose([6, 10, 12, 15, 20, 30]), story.between(3, 12), story.between(20, 60, 5)
    trips = hours * 60 // interval + 1
    question = (
        f"A ferry leaves every {interval} minutes, for the first time at opening and for the last time exactly {hours} hours later. "
        f"Each crossing can take {seats} passengers. How many passengers can be carried in a day?"
    )
    steps = [f"{hours} * 60 / {interval} = {trips - 1}", f"{trips - 1} + 1 = {trips}", f"{trips} * {seats} = {trips * seats}"]
    return draft(question, trips * seats, steps, form="departures", interval=interval, hours=hours, seats=seats)


def work_together(story: Story) -> ProblemDraft | None:
    """Two that work at once, or one that works against the other."""
    first, second = story.people(2)
    quick, long = story.between(2, 12), story.between(3, 30)
    if quick >= long:
        return None
    if story.between(0, 1):
        hours = Fraction(quick * long, quick + long)
        question = story.choose(
            [
                f"{first.name} can paint a fence in {quick} hours, {second.name} needs {long} hours for it. How many hours does it take them "
                "together? Give an exact number.",
                f"One pump empties a pool in {quick} hours and another one in {long} hours. Both run at the same time. "
                "After how many hours is the pool empty? Give an exact number.",
            ]
        )
        steps = [
            f"1 / {quick} + 1 / {long} = {Fraction(1, quick) + Fraction(1, long)}",
            f"{quick} * {long} / ({quick} + {long}) = {show(hours)}",
        ]
        return draft(question, hours, steps, form="together", quick=quick, long=long)
    hours = Fraction(quick * long, long - quick)
    if hours > 60:
        return None
    question = (
        f"A tap fills a tank in {quick} hours. With the drain open and the tap closed, a full tank runs empty in {long} hours. "
        "The tank is empty, the drain is open, and the tap is turned on. After how many hours is the tank full? Give an exact number."
    )
    steps = [
        f"1 / {quick} - 1 / {long} = {Fraction(1, quick) - Fraction(1, long)}",
        f"{quick} * {long} / ({long} - {quick}) = {show(hours)}",
    ]
    return draft(question, hours, steps, form="against", quick=quick, long=long)
