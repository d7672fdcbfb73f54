"""Problems of prices: discounts, change, profit, saving up, coins."""

from fractions import Fraction

from tether.envs.metamathqa.kinds.story import ProblemDraft, Story, draft, money, plural, show


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
