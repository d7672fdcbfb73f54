"""Problems of time: travel, catching up, schedules, working together."""

from fractions import Fraction

from tether.envs.metamathqa.kinds.story import ProblemDraft, Story, draft, plural, show


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
