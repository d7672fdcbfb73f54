"""When an answer counts as the gold one: what must be accepted, what must not, and that every gold accepts itself."""

from fractions import Fraction

import pytest

from tether.envs.metamathqa.compare import is_words, same, words
from tether.envs.metamathqa.latex import Parts, Scalar, canonical, structure
from tether.envs.metamathqa.quantity import Measure, number, split_unit
from tether.envs.metamathqa.symbolic import for_worker


def pairs(table: str) -> list[tuple[str, str]]:
    lines = [line.partition(" | ") for line in table.strip("\n").split("\n")]
    return [(gold.strip(), answer.strip()) for gold, _, answer in lines]


# Decided in this process, by exact arithmetic and by words.
SAME = pairs(
    r"""
5 | 5.0
5 | +5
0.5 | 1/2
1/2 | .5
1,000,000 | 1000000
1,000,000 | 1 000 000
11,\! 111,\! 111 | 11111111
10{,}000 | 10,000
\frac{3}{4} | 0.75
\dfrac 34 | \frac34
-\frac{3}{4} | \frac{-3}{4}
-\frac{3}{4} | \frac{3}{-4}
2\frac{1}{2} | 2.5
2 1/2 | 5/2
-2\frac12 | -2.5
0.\overline{3} | 1/3
0.1\overline{6} | 1/6
3\times10^5 | 300,000
3 \times 10^{-2} | 3e-2
10^{-8} | 0.00000001
10\% | 10
10\% | 10%
10\% | 10 percent
10\% | 0.1
10 | 10%
0.1 | 10%
18 | 18 dollars
18 | $18
18 | \$18.00
18 | 18.
3 | 3 times
\$18 | 18
\$1{,}000 | 1000 dollars
-\$0.50 | -0.5
-$5 | $-5
5\text{ cm} | 5
5\text{ cm} | 5cm
5\text{ cm} | 5 centimeters
5\text{ cm}^2 | 5 square centimeters
60\text{ km}/\text{h} | 60 km/h
45 \text{ units}^2 | 45
5 million | 5,000,000
$5 million | 5000000
24 | 2 dozen
90^\circ | 90
90^{\circ} | 90°
90^\circ | 90 degrees
x=5 | 5
5 | x = 5
y = -\frac{1}{4} | -0.25
f(x)=3 | 3
5 | 5 = 5.0
1011_2 | 1011_{2}
152A_{11} | 152\text{A}_{11}
\text{Tuesday} | tuesday
Tuesday | \text{Tuesday}.
\text{(A)} | A
\text{(A)} | (A)
(A) | A
C | \text{(C)}
\text{no solution} | No solution
9\text{ a.m.} | 9 a.m.
9:00 a.m. | 9:00 AM
\emptyset | \varnothing
(1,2) | ( 1, 2.0 )
(1,2) | \left(1,2\right)
(1,2) | 1,2
(100,200) | (100, 200)
1,2,3 | 3, 2, 1
1,2,3 | \{1,3,2\}
\{1,2,3\} | 3, 1 and 2
12\text{ and }13 | 13, 12
3 \text{ or } 4 | 4 or 3
7, -2, \text{ and } -5 | -5, -2, 7
\text{B, C} | C, B
-125,343 | 343, -125
[0,1) | [0, 1.0)
x \in [1,2] | [1,2]
\{-1\} \cup [0,7) | [0,7)\cup\{-1\}
x=1,y=2 | y=2, x=1
x=1,y=2 | 1,2
x=1, x=2 | 2,1
\pm 3 | 3, -3
\begin{pmatrix}1\\-1/2\end{pmatrix} | \begin{bmatrix} 1.0 \\ -\frac{1}{2} \end{bmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \left( \begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array} \right)
9 (apples) | 9
9 (apples) | 9 apples
9 | 9 (apples)
1,234 (people) | 1234
120 (dollars) | $120
1/2 (hours) | 0.5
5 (cm) | 5 cm
5 (cm) | 5
5 | 5 (cm)
5\ (\text{cm}) | 5
5 \text{ (cm)} | 5 cm
12 (cm^2) | 12
12 (cm^2) | 12 square centimeters
12 (\text{cm}^2) | 12\text{ cm}^2
9 (apples), 5 (pears) | 9, 5
2\frac{1}{2} \text{ hours} | 2.5 hours
2\frac{1}{2} \text{ hours} | 2.5
2\frac{1}{2} hours | 2.5
2.5 | 2\frac{1}{2} hours
2\frac12 cups | 5/2
2 1/2 hours | 2.5
2 1/2 hours | 5/2 hours
-1\frac{1}{4} \text{ inches} | -1.25 inches
\frac{68}{3} \text{ pounds} | 68/3
\frac{1}{2} \text{ km} / \text{h} | 0.5 km/h
58500 | 58, 500
58,500 | 58, 500
58500 | $58, 500
58,500 dollars | 58, 500
1234567 | 1, 234, 567
\pm 1, \pm 2 | 1, -1, 2, -2
\pm 1, 3 | 3, 1, -1
1, -1, 3 | 3, \pm 1
\{\pm 1, \pm 2\} | \{-2, -1, 1, 2\}
\pm 1 \text{ and } 3 | -1, 1, 3
x=\pm 2 | x=2, x=-2
x=\pm 2 | 2, -2
2\sqrt3 | 2 \sqrt{3}
10\sqrt 2 | 10\sqrt{2}
x^2 | x^{2}
"""
)

# Decided by the worker.
SAME_MATHEMATICS = pairs(
    r"""
\sqrt{18} | 3*sqrt(2)
\frac{\sqrt{3}}{3} | 1/sqrt(3)
2\pi | 2*pi
\frac{\pi}{4} | 0.25π
x^2+2x+1 | (x+1)^2
x^2 | x**2
4x^2-6x+4 | 4 - 6x + 4x^{2}
(2,\infty) | x>2
x>2 | 2<x
-2<x<3 | (-2,3)
1 \pm \sqrt{2} | 1-\sqrt2, 1+\sqrt2
0, \pm\sqrt{3} | 0, \sqrt{3}, -\sqrt{3}
0, 1 \pm \sqrt{12} | 1+2\sqrt{3}, 0, 1-2\sqrt{3}
x^2 + y^2 = 13 | 2x^2+2y^2=26
y=2x+3 | 3+2x
(3, \frac{\pi}{2}) | (3, pi/2)
6! | 720
\log_2 8 | 3
72 | 48+24
\frac{1}{i} | -i
\cos 13^\circ | \sin 77^\circ
2\pi\text{ cm} | 2 \pi
0.5x | \frac{x}{2}
(-\infty,2)\cup(3,\infty) | (3,\infty) \cup (-\infty,2)
"""
)

DIFFERENT = pairs(
    r"""
5 | 6
5 | -5
5 | 5.01
7 | 7.0000000001
1/3 | 0.33
1/3 | 0.3333333333333333
0.\overline{3} | 0.3
2/3 | 0.67
1/2 | 2
1/2 | 0.05
5 | 50
5 | 55
11 | 5 6
18 | 1 8
2 1/2 | 21/2
2\frac12 | 21/2
1.5 | 1,5
1,200 | 1,2,0,0
1,000,000 | 1,0,0
123 | 1,2,3
1,2,3 | 123
1,2,3 | 1,2
1,2,3 | 1,2,4
1,2,3 | 1,2,3,4
1,2,2 | 1,1,2
(1,2) | (2,1)
(1,2) | 2,1
(1,2,3) | (1,3,2)
(1,2) | [1,2]
(1,2) | \{1,2\}
[0,1) | (0,1]
[0,1) | [0,1]
(0,1] | 0,1
\{1,2\} | \{1,3\}
(-\infty,2)\cup(3,\infty) | (-\infty,2)
(-\infty,2)\cup(3,\infty) | (-\infty,2)\cup(4,\infty)
x=5 | y=5
x=5 | x=6
x=5 | 6
5 | 6=5
5 | 5=6
x=1,y=2 | 2,1
x=1,y=2 | x=2,y=1
5 | 5 or 6
5 | 5, 6
5 | 5 \text{ or } 6
5 | not 5
5 | about 5
5 | 5 and a half
5 | 5 thirds
5 | 5 million
5 | five
5 | the answer
5 | .
5\text{ cm} | 5 m
5\text{ cm} | 5\text{ cm}^2
\$5 | 5 cents
5\% | 5 cm
10\% | 1
10\% | 0.01
10 | 1%
9\text{ a.m.} | 9 p.m.
3 hours | 3 minutes
3:30 | 3:31
2:3 | 3:2
1011_2 | 1011_3
1011_2 | 1010_2
1011_2 | 11
1011_2 | 1011
1011 | 1011_2
\text{Tuesday} | Thursday
\text{(A)} | B
\text{(A)} | AB
\text{east} | seat
\text{even} | odd
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1&2\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&2\\3&5\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{vmatrix}1&2\\3&4\end{vmatrix}
\begin{pmatrix}1\\2\end{pmatrix} | (1,2)
9 (apples) | 10
9 (apples) | 9 pears
9 | 10 (apples)
9 | 9 (not 10)
9 | 9 (or 10)
9 | 9 (or ten)
9 | 9 (ten)
9 | 9 (approximately)
9 | 9 (negative)
9 | 9 (million)
5 (cm) | 5 m
5 (cm) | 5 cm^2
12 (cm^2) | 12 cm
5 (x) | 5
5 | 5 (ab)
5 (ab) | 5
9 (3) | 9
2\frac{1}{2} \text{ hours} | 21/2
2\frac{1}{2} \text{ hours} | 2
2\frac{1}{2} hours | 2.5 minutes
2\frac{1}{2} hours | 1
2 1/2 hours | 21/2 hours
\frac{1}{2} bh | \frac{1}{2}
\frac{1}{2} abc | \frac{1}{2}
\frac{68}{3} \text{ pounds} | 68
58500 | 58, 50
58500 | 58, 5000
58500 | 585, 00
58500 | 58, 501
58500 | 58 and 500
58, 500 | 58500
100, 200 | 100200
100200 | 100 200 300
1200 | 1, 2, 0, 0
1.2 | 1, 200
\pm 1, \pm 2 | 1, -1, 2
\pm 1, \pm 2 | 1, 2
\pm 1, 3 | 1, 3
\pm 1, 3 | \pm 1, -3
1, 3 | 3, \pm 1
(1, \pm 2) | 1, 2, -2
x=\pm 2 | 2
"""
)

DIFFERENT_MATHEMATICS = pairs(
    r"""
5 | 5x
4t | 4
x | x_1
x^2+1 | x^2-1
R-r | r-R
R-r | 0
\sqrt{2} | 1.41421356237
\pi | 3.14159265358979
\cos 13^\circ | \cos 13
3^{2007} | 3^{2006}
72 | 48+25
1+2i | 1-2i
1 \pm \sqrt{2} | 1+\sqrt2
(2,\infty) | x\geq 2
-2<x<3 | (-2,4)
0 | \frac{0}{0}
\infty | -\infty
\pm 3 | 3
y=2x+3 | 2x+4
1 | i
"""
)


@pytest.mark.parametrize(("gold", "answer"), SAME + SAME_MATHEMATICS)
def test_the_same_answer_in_other_words(gold: str, answer: str) -> None:
    assert same(gold, answer, "math")


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT + DIFFERENT_MATHEMATICS)
def test_near_misses_are_not_accepted(gold: str, answer: str) -> None:
    assert not same(gold, answer, "math")


GOLDS = [
    r"\{1, 2, 3\}", "(-\\infty, 0] \\cup (\\tfrac12, \\tfrac32]", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "Tuesday", "(A)",
    r"\text{(A)}", "x=5", r"5\text{ cm}", r"10\%", r"2\frac{1}{2}", "2 1/2", r"45^\circ", "1,000,000", "1,2,3", "1011_2", r"\$16,\!386.16",
    r"-\$0.50", r"\frac{2x-7}{(x+1)(x-2)}", r"x^4+x^2-10x-24 = 0", r"-2 < x \le 3", r"\text{June 20}", "3:45", "2:3", r"\emptyset", "{}",
    "no solution", r"f^{-1}(x) = \sqrt{x}", "}{", r"\frac{", "(((", "$", "%", r"\boxed", "=", "x", ".5", "0.0011_{2}", "\\", "naïve", "①",
    r"90\text{ square" + "\n" + "units}", r"\sum_{k=3}^{20}(-1)^{k}\ln(k)", "1e5", "a" * 5000, "(" * 3000,
]  # fmt: skip


@pytest.mark.parametrize("gold", GOLDS, ids=lambda gold: gold[:20])
def test_every_gold_accepts_itself(gold: str) -> None:
    assert same(gold, gold, "math")
    assert same(gold, f"  {gold}\n", "math")
    assert same(gold, gold, "strict")


@pytest.mark.parametrize("gold", ["72", r"\frac{1}{2}", r"x^2+1", "(1,2)", r"\{1,2\}", "Tuesday", r"5\text{ cm}", r"\$5", r"10\%", "[0,1)"])
@pytest.mark.parametrize(
    "around",
    [
        "${}$",
        r"\boxed{{{}}}",
        r"$\boxed{{{}}}$",
        r"\({}\)",
        r"\[ {} \]",
        "The answer is: {}",
        "The final answer is {}.",
        "**{}**",
        "#### {}",
    ],
)
def test_what_stands_around_an_answer_does_not_matter(gold: str, around: str) -> None:
    assert same(gold, around.format(gold), "math")


def test_strict_is_upstreams_rule() -> None:
    assert same("Two Apples", "twoapples", "strict")
    assert same(r"\frac{1}{2}", r"\frac{ 1 }{ 2 }", "strict")
    assert not same("1,200", "1200", "strict")
    assert not same(r"\frac12", "0.5", "strict")
    assert not same(" ", "", "strict") and not same("", " ", "math")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"$\boxed{\dfrac 12 \text{ cm}}$.", r"\frac{1}{2}\text{cm}"),
        (r"x^10 + \sqrt2", r"x^{10}+\sqrt{2}"),
        ("√(3)/2", r"\sqrt{3}/2"),
        ("1, 200", "1;200"),
        ("1,200", "1,200"),
        ("land or sea", "land;sea"),
        ("Oregon", "Oregon"),
        (r"\mathrm{~m/s}", r"\text{m/s}"),
        (r"\boxed{[0, 1)} and no more", "[0;1)"),
        ("$18", "$18"),
        ("$18$", "18"),
        ("2pi r", r"2\pi r"),
        (r"3 \le x", r"3\leq x"),
        ("x²", "x^{2}"),
    ],
)
def test_canonical_spelling(text: str, expected: str) -> None:
    assert canonical(text) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.50", Fraction(2469, 2)), ("12,34", None), ("1234,567", None), ("1 00", None), ("1/0", None), (r"\frac{1}{0}", None),
        (r"3 \frac{1}{0}", None), (".", None), ("", None), ("-", None), ("1e400", None), ("x", None), ("2^{3}", None), ("9" * 900, Fraction(10**900 - 1)),
        ("-.5", Fraction(-1, 2)), (r"\frac{0.5}{2}", Fraction(1, 4)), ("1.5e3", Fraction(1500)), (r"1.5*10^{-1}", Fraction(3, 20)), ("0", Fraction(0)),
    ],
)  # fmt: skip
def test_plain_numbers_are_exact(text: str, value: Fraction | None) -> None:
    assert number(text) == value


def test_units() -> None:
    assert split_unit("5 square meters") == Measure("5", "m^2")
    assert split_unit("$5 million") == Measure("5", "dollar", 10**6)
    assert split_unit(r"\frac{68}{3}\text{pounds}") == Measure(r"\frac{68}{3}", "lb")
    assert split_unit("5 apples in total") == Measure("5", "apple")
    for no_unit in ("5x", "5 x", "5m", "5 m", "3 hours 20 minutes", "x cm", "5 not", "cm", "%"):
        assert split_unit(no_unit) == Measure(no_unit)


def test_structure() -> None:
    assert structure("1,000,000") == Scalar("1,000,000")
    assert structure("(100,200)") == Parts("()", (Scalar("100"), Scalar("200")), "(100,200)")
    assert structure("(1,000;2)") == Parts("()", (Scalar("1000"), Scalar("2")), "(1,000;2)")
    assert structure("(5)") == structure("{5}") == Scalar("5")
    assert structure("[1,2)") == Parts("[)", (Scalar("1"), Scalar("2")), "[1,2)")
    assert structure(r"\{5\}") == Parts("{}", (Scalar("5"),), r"\{5\}")
    assert structure("f(1,2)") == Scalar("f(1,2)")
    assert structure(r"5\pmod{7}") == Scalar(r"5\pmod{7}")
    assert structure("(1),(2)") == Parts("", (Scalar("1"), Scalar("2")), "(1),(2)")
    assert structure("1,234,5") == Parts("", (Scalar("1"), Scalar("234"), Scalar("5")), "1,234,5")
    assert structure("1,,2") == Scalar("1,,2")
    assert structure("(" * 400 + "1" + ")" * 400) == Scalar("(" * 392 + "1" + ")" * 392)


def test_words() -> None:
    assert (
        is_words("Tuesday")
        and is_words(r"\text{A}")
        and is_words("3:30")
        and not is_words("xy")
        and not is_words(r"\sin x")
        and not is_words("12")
    )
    assert words(r"\text{(A)}") == "a" and words("9:00 a.m.") == "9:00 am"


@pytest.mark.parametrize(
    "hopeless",
    [
        "9^{9^{9}}", "10^{10^{10}}", "e^{2^{99}x}", "2^{10000}", "(9^{99})^{99}", "201!", "5!!", "((5!)!)!", "x" * 301, "(" * 16 + "1" + ")" * 16, "5 6",
        r"5\text{ways}", "3:30", "²½", "\x00",
    ],
)  # fmt: skip
def test_hopeless_questions_are_not_asked(hopeless: str) -> None:
    assert for_worker(hopeless) is None


def test_what_the_worker_is_asked() -> None:
    assert for_worker("0.5x*2") == r"\frac{5}{10}x\cdot 2"
    assert for_worker("1e5x") == r"1\cdot 10^{5}x"
    assert for_worker(r"\cos 13°") == r"\cos 13^{\circ}"
    assert for_worker("e^{x^{2}}") == "e^{x^{2}}"
    assert for_worker("3^{2007}") == "3^{2007}"
