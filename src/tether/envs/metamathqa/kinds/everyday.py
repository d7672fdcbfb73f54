"""Problems of people, things and prices: ages, ratios, left-overs, choices, animals; discounts, change, profit, saving up, coins."""

from fractions import Fraction
from math import gcd

from tether.envs.metamathqa.kinds.story import ProblemDraft, Story, draft, money, plural, show


def ages(story: Story) -> ProblemDraft | None:
    """Ages from a sum in the future, or from two ratios."""
    older, younger = story.people(2)
    return _ages_by_sum(story, older.name, younger.name) if story.between(0, 1) else _ages_by_ratio(story, older.name, younger.name)


def _ages_by_sum(story: Story, older: str, younger: str) -> ProblemDraft:
    age, gap, years = story.between(4, 40), story.between(2, 25), story.between(2, 15)
    total = 2 * age + gap + 2 * years
    question = story.choose(
        [
            f"{older} is {gap} years older than {younger}. In {years} years their ages will add up to {total}. How old is {younger} now?",
            f"In {years} years, {older} and {younger} will be {total} years old together. {older} is {gap} years older. "
            f"What is {younger}'s age today?",
        ]
    )
    steps = [
        f"{total} - 2 * {years} = {total - 2 * years}",
        f"{total - 2 * years} - {gap} = {2 * age}",
        f"{2 * age} / 2 = {age}",
    ]
    return draft(question, age, steps, form="sum", gap=gap, years=years, total=total)


def _ages_by_ratio(story: Story, older: str, younger: str) -> ProblemDraft | None:
    now = story.between(3, 6)
    then = story.between(2, now - 1)
    years = story.between(2, 16)
    age, rest = divmod(years * (then - 1), now - then)
    if rest or not 2 <= age <= 20 or age * now > 75:
        return None
    question = story.choose(
        [
            f"{older} is {now} times as old as {younger}. In {years} years {older} will be {then} times as old as {younger}. "
            f"How old is {younger} now?",
            f"Today {older}'s age is {now} times {younger}'s age; {years} years from now it will be {then} times {younger}'s age then. "
            f"Find {younger}'s age today. How many years is it?",
        ]
    )
    steps = [
        f"{years} * ({then} - 1) = {years * (then - 1)}",
        f"{now} - {then} = {now - then}",
        f"{years * (then - 1)} / {now - then} = {age}",
    ]
    return draft(question, age, steps, form="multiple", now=now, then=then, years=years)


def ratios(story: Story) -> ProblemDraft | None:
    """A whole shared in a ratio."""
    first, second, third = story.people(3)
    parts = [story.between(1, 9) for _ in range(3)]
    if len(set(parts)) < 3 or gcd(*parts) > 1:
        return None
    unit = story.between(2, 30)
    total = unit * sum(parts)
    thing = story.choose(["marbles", "stickers", "trading cards", "beads", "shells"])
    written = ":".join(map(str, parts))
    low, high = min(parts), max(parts)
    steps = [f"{parts[0]} + {parts[1]} + {parts[2]} = {sum(parts)}", f"{total} / {sum(parts)} = {unit}"]
    numbers = {"first": parts[0], "second": parts[1], "third": parts[2], "total": total}
    if story.between(0, 1):
        question = (
            f"{first.name}, {second.name} and {third.name} share {total} {thing} in the ratio {written}. "
            f"How many {thing} does {second.name} get?"
        )
        return draft(question, unit * parts[1], [*steps, f"{unit} * {parts[1]} = {unit * parts[1]}"], form="share", **numbers)
    question = (
        f"A bag of {total} {thing} is divided among {first.name}, {second.name} and {third.name} in the ratio {written}. "
        "How many more does the one with the largest share get than the one with the smallest?"
    )
    return draft(
        question, unit * (high - low), [*steps, f"{unit} * ({high} - {low}) = {unit * (high - low)}"], form="difference", **numbers
    )


def remainders(story: Story) -> ProblemDraft | None:
    """Packing things into boxes: what is left over, or how many boxes it takes."""
    packer = story.person()
    things, box = story.choose(
        [("eggs", "carton"), ("books", "crate"), ("oranges", "bag"), ("tennis balls", "tube"), ("cookies", "tin"), ("photos", "album")]
    )
    lots, each, broken, size = story.between(3, 15), story.between(8, 40), story.between(1, 9), story.between(4, 24)
    left = lots * each - broken
    full, rest = divmod(left, size)
    if full < 2 or rest == 0:
        return None
    story_so_far = story.choose(
        [
            f"{packer.name} receives {lots} deliveries of {each} {things} each, but {broken} of the {things} turn out to be damaged. "
            f"{packer.they.capitalize()} packs the good ones into {box}s that hold {size} each.",
            f"There are {lots} shelves with {each} {things} on each. {packer.name} gives away {broken} of them and puts the others into {box}s, "
            f"{size} to a {box}.",
        ]
    )
    steps = [f"{lots} * {each} = {lots * each}", f"{lots * each} - {broken} = {left}"]
    if story.between(0, 1):
        question = f"{story_so_far} {packer.they.capitalize()} fills as many {box}s as possible. How many {things} are left over?"
        return draft(
            question, rest, [*steps, f"{left} - {full} * {size} = {rest}"], form="left_over", lots=lots, each=each, broken=broken, size=size
        )
    question = f"{story_so_far} How many {box}s does {packer.they} need so that nothing is left unpacked?"
    steps.append(f"({left} + {size - rest}) / {size} = {full + 1}")
    return draft(question, full + 1, steps, lots=lots, each=each, broken=broken, size=size, form="boxes")


def combinations(story: Story) -> ProblemDraft:
    """Counting choices."""
    chooser = story.person()
    form = story.choose(["outfits", "handshakes", "offices"])
    if form == "outfits":
        shirts, trousers, hats = story.between(3, 9), story.between(2, 7), story.between(2, 6)
        question = story.choose(
            [
                f"{chooser.name} owns {shirts} shirts, {trousers} pairs of trousers and {hats} hats. An outfit is one of each. "
                f"How many different outfits can {chooser.they} put together?",
                f"A café offers {shirts} soups, {trousers} main courses and {hats} desserts. A menu is one of each. "
                f"How many different menus can {chooser.name} order?",
            ]
        )
        steps = [f"{shirts} * {trousers} = {shirts * trousers}", f"{shirts * trousers} * {hats} = {shirts * trousers * hats}"]
        return draft(question, shirts * trousers * hats, steps, form="outfits", shirts=shirts, trousers=trousers, hats=hats)
    people = story.between(5, 24)
    if form == "handshakes":
        question = story.choose(
            [
                f"At a meeting {people} people each shake hands once with every other person. How many handshakes are there?",
                f"In a chess club of {people} members everybody plays everybody else exactly once. How many games are played?",
            ]
        )
        pairs = people * (people - 1) // 2
        return draft(question, pairs, [f"{people} * ({people} - 1) / 2 = {pairs}"], form="handshakes", people=people)
    question = f"A club of {people} members elects a president and then, from the others, a treasurer. In how many ways can the two posts be filled?"
    return draft(question, people * (people - 1), [f"{people} * ({people} - 1) = {people * (people - 1)}"], form="offices", people=people)


def animals(story: Story) -> ProblemDraft:
    """Heads and legs."""
    farmer = story.person()
    birds, beasts = story.choose([("chickens", "rabbits"), ("ducks", "goats"), ("geese", "sheep"), ("turkeys", "cows")])
    two, four = story.between(4, 40), story.between(3, 30)
    heads, legs = two + four, 2 * two + 4 * four
    question = story.choose(
        [
            f"{farmer.name} keeps only {birds} and {beasts}. Together they have {heads} heads and {legs} legs. "
            f"How many {beasts} does {farmer.they} have?",
            f"In a farmyard there are {birds} and {beasts}, {heads} animals in all. {farmer.name} counts {legs} legs. How many {beasts} are there?",
        ]
    )
    steps = [f"2 * {heads} = {2 * heads}", f"{legs} - {2 * heads} = {legs - 2 * heads}", f"{legs - 2 * heads} / 2 = {four}"]
    return draft(question, four, steps, heads=heads, legs=legs)


def fractions(story: Story) -> ProblemDraft | None:
    """Parts of a whole, and parts of the rest."""
    owner = story.person()
    (upper, lower), (second_upper, second_lower) = story.choose(_SIMPLE), story.choose(_SIMPLE)
    first, second = Fraction(upper, lower), Fraction(second_upper, second_lower)
    whole = lower * second_lower * story.between(2, 12)
    rest = whole * (1 - first)
    left = rest * (1 - second)
    one, other = story.choose([("rent", "food"), ("a coat", "books"), ("a gift", "a concert ticket"), ("paint", "tools")])
    if whole > 600:
        return None
    steps = [f"{whole} * (1 - {first}) = {show(rest)}", f"{show(rest)} * (1 - {second}) = {show(left)}"]
    if story.between(0, 1):
        question = (
            f"{owner.name} has ${whole}. {owner.they.capitalize()} spends {first} of it on {one} and {second} of the rest on {other}. "
            "How many dollars are left?"
        )
        return draft(question, left, steps, form="forwards", first=first, second=second, whole=whole)
    question = (
        f"{owner.name} spends {first} of {owner.their} money on {one} and then {second} of what remains on {other}. "
        f"Now {owner.they} has ${left}. How many dollars did {owner.they} have at first?"
    )
    steps = [f"{show(left)} / (1 - {second}) = {show(rest)}", f"{show(rest)} / (1 - {first}) = {whole}"]
    return draft(question, whole, steps, form="backwards", first=first, second=second, left=left)


_SIMPLE = ((1, 2), (1, 3), (2, 3), (1, 4), (3, 4), (1, 5), (2, 5), (3, 5), (1, 6), (3, 8), (5, 8))


def discount(story: Story) -> ProblemDraft | None:
    """Some pieces at a percentage off, then a coupon."""
    buyer = story.person()
    item = story.choose(["backpack", "jacket", "lamp", "chair", "headset", "pair of boots", "blanket", "skateboard"])
    price, percent, coupon = story.between(16, 160, 2), story.between(5, 60, 5), story.between(2, 12)
    sale = Fraction(price * (100 - percent), 100)
    if sale <= coupon:
        return None
    question = story.choose(
        [
            f"A {item} costs {money(price)}. The shop takes {percent}% off, and {buyer.name} also has a coupon worth {money(coupon)} that is "
            f"taken off the reduced price. How many dollars does {buyer.name} pay for the {item}?",
            f"{buyer.name} wants to buy a {item} that is marked {money(price)}. It is on sale for {percent}% less than the marked price. "
            f"At the till {buyer.they} hands over a {money(coupon)} gift card as part of the payment. "
            f"How many dollars does {buyer.they} still have to pay?",
            f"During a sale every price is cut by {percent}%. {buyer.name} finds a {item} that was {money(price)} before the sale, and uses a "
            f"{money(coupon)} voucher after the cut. What is the final price in dollars?",
        ]
    )
    steps = [f"{price} * {percent} / 100 = {show(price - sale)}", f"{price} - {show(price - sale)} = {show(sale)}"]
    steps.append(f"{show(sale)} - {coupon} = {show(sale - coupon)}")
    return draft(question, sale - coupon, steps, price=price, percent=percent, coupon=coupon)


def change(story: Story) -> ProblemDraft | None:
    """Change from a note after buying two sorts of things."""
    buyer = story.person()
    first, second = story.choose(
        [("muffin", "carrot"), ("notebook", "marker"), ("apple", "pear"), ("postcard", "stamp"), ("candle", "ribbon")]
    )
    few, many = story.between(2, 9), story.between(2, 9)
    first_price, second_price = Fraction(story.between(2, 14), 4), Fraction(story.between(2, 14), 4)
    note = story.choose([10, 20, 50, 100])
    spent = few * first_price + many * second_price
    if not note / 3 < spent < note:
        return None
    question = story.choose(
        [
            f"{buyer.name} buys {few} {first}s at {money(first_price)} each and {many} {second}s at {money(second_price)} each. "
            f"{buyer.they.capitalize()} pays with a {money(note)} note. How many dollars of change does {buyer.they} get?",
            f"At the market a {first} costs {money(first_price)} and a {second} costs {money(second_price)}. {buyer.name} takes {few} {first}s "
            f"and {many} {second}s and hands the seller {money(note)}. How much change, in dollars, should {buyer.they} receive?",
            f"With {money(note)} in {buyer.their} pocket, {buyer.name} pays for {many} {second}s ({money(second_price)} each) and {few} {first}s "
            f"({money(first_price)} each). How many dollars does {buyer.they} have left?",
        ]
    )
    steps = [
        f"{few} * {show(first_price)} = {show(few * first_price)}",
        f"{many} * {show(second_price)} = {show(many * second_price)}",
        f"{show(few * first_price)} + {show(many * second_price)} = {show(spent)}",
        f"{note} - {show(spent)} = {show(note - spent)}",
    ]
    return draft(question, note - spent, steps, few=few, many=many, first_price=first_price, second_price=second_price, note=note)


def profit(story: Story) -> ProblemDraft | None:
    """What is left of sales after the costs."""
    seller = story.person()
    thing = story.choose(["bracelet", "cupcake", "poster", "scarf", "birdhouse", "soap bar"])
    count, cost, fee = story.between(12, 80), story.between(2, 9), story.between(10, 60, 5)
    price = cost + story.between(1, 9)
    gain = count * (price - cost) - fee
    if gain <= 0:
        return None
    question = story.choose(
        [
            f"{seller.name} makes {count} {thing}s. The material for one {thing} costs {money(cost)}, and the stall at the fair costs "
            f"{money(fee)}. {seller.they.capitalize()} sells all of them for {money(price)} each. How many dollars of profit is that?",
            f"A stall at the craft fair costs {money(fee)} for the day. {seller.name} sells {count} {thing}s there at {money(price)} apiece; "
            f"each had cost {seller.their} workshop {money(cost)} to make. What is the profit in dollars?",
            f"Each {thing} costs {seller.name} {money(cost)} to make and brings in {money(price)}. {seller.they.capitalize()} sells {count} of "
            f"them and pays {money(fee)} for advertising. How many dollars does {seller.they} earn in the end?",
        ]
    )
    steps = [f"{price} - {cost} = {price - cost}", f"{count} * {price - cost} = {count * (price - cost)}"]
    steps.append(f"{count * (price - cost)} - {fee} = {gain}")
    return draft(question, gain, steps, count=count, cost=cost, price=price, fee=fee)


def savings(story: Story) -> ProblemDraft | None:
    """Weeks until something can be bought."""
    saver = story.person()
    goal = story.choose(["bicycle", "guitar", "telescope", "tablet", "tent", "sewing machine"])
    allowance, chores, spent, weeks = story.between(6, 20), story.between(3, 15), story.between(2, 8), story.between(4, 20)
    start = story.between(10, 60)
    weekly = allowance + chores - spent
    price = start + weekly * weeks
    if weekly <= 1:
        return None
    question = story.choose(
        [
            f"{saver.name} wants a {goal} that costs {money(price)} and has {money(start)} so far. Every week {saver.they} gets {money(allowance)} "
            f"of pocket money, earns {money(chores)} with chores and spends {money(spent)}. After how many weeks can {saver.they} buy the {goal}?",
            f"A {goal} costs {money(price)}. {saver.name} has already put aside {money(start)}. Each week {saver.their} income is "
            f"{money(allowance)} from the family and {money(chores)} from odd jobs, of which {money(spent)} goes on snacks. "
            f"How many weeks does {saver.they} need to save up the rest?",
        ]
    )
    steps = [
        f"{allowance} + {chores} - {spent} = {weekly}",
        f"{price} - {start} = {price - start}",
        f"{price - start} / {weekly} = {weeks}",
    ]
    return draft(question, weeks, steps, price=price, start=start, allowance=allowance, chores=chores, spent=spent)


def coins(story: Story) -> ProblemDraft:
    """The worth of a handful of coins."""
    owner = story.person()
    quarters, dimes, nickels = story.between(3, 25), story.between(2, 30), story.between(2, 30)
    worth = Fraction(25 * quarters + 10 * dimes + 5 * nickels, 100)
    contents = f"{plural(quarters, 'quarter')}, {plural(dimes, 'dime')} and {plural(nickels, 'nickel')}"
    question = story.choose(
        [
            f"{owner.name} empties a jar and finds {contents}. How many dollars is that in all?",
            f"There are {contents} in {owner.name}'s purse. What are the coins worth together, in dollars?",
            f"{owner.name} pays for lunch with exactly {contents}. How many dollars did the lunch cost?",
        ]
    )
    steps = [
        f"{quarters} * 25 = {25 * quarters}",
        f"{dimes} * 10 = {10 * dimes}",
        f"{nickels} * 5 = {5 * nickels}",
        f"({25 * quarters} + {10 * dimes} + {5 * nickels}) / 100 = {show(worth)}",
    ]
    return draft(question, worth, steps, quarters=quarters, dimes=dimes, nickels=nickels)
