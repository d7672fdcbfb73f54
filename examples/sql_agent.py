"""An agent that answers questions about sqlite databases with three tools, as a plain loop over OpenAI's package. Tether trains it as it is.

    python sql_agent.py tasks.jsonl                  # write the tasks: 400 generated databases, three questions each, answers computed by sqlite
    tether train --agent sql_agent:agent --tasks tasks.jsonl --model path/to/model --steps 50 --out runs/sql
    tether eval runs/sql

The only lines for Tether are the signature, the client (`llm.client()`) and the reward that is returned. A task's `id` is its database, so databases of
training and of validation are disjoint.
"""

import json
import random
import re
import sqlite3
import sys

SYSTEM = (
    "Answer the question about the database. Look at its tables with the tools first (they are joined by their id columns), run a query, "
    "then reply with the answer in one short sentence."
)


def tool(name, description, **parameters):
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    tool("list_tables", "List the tables of the database."),
    tool("describe_table", "Show the columns of a table and its first rows.", table="The table's name"),
    tool("run_query", "Run a SELECT query and show its rows.", query="One SQL query"),
]


def run_tool(db, name, arguments):
    """What a tool says; an error is told to the model, which may try again."""
    try:
        if name == "list_tables":
            return ", ".join(row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"))
        if name == "describe_table":
            table = str(arguments["table"])
            columns = ", ".join(f"{row[1]} {row[2]}" for row in db.execute(f'PRAGMA table_info("{table}")')) or "no such table"
            return f"{columns}\n" + "\n".join(map(str, db.execute(f'SELECT * FROM "{table}" LIMIT 3')))
        if name == "run_query":
            rows = db.execute(str(arguments["query"])).fetchmany(10)
            return "\n".join(map(str, rows)) or "no rows"
        return f"there is no tool {name}"
    except (sqlite3.Error, sqlite3.Warning, KeyError) as error:
        return f"error: {error}"


async def agent(task, llm):
    """Play one task; returns 1 for the right answer."""
    client = llm.client()
    db = sqlite3.connect(":memory:")
    db.executescript(task["sql"])
    db.execute("PRAGMA query_only = ON")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    asked = False  # a guess that happens to be right earns nothing
    for _ in range(6):
        reply = await client.chat.completions.create(model=llm.model, messages=messages, tools=TOOLS, max_tokens=200)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return float(asked and is_right(message.content or "", task))
        for call in message.tool_calls:
            shown = run_tool(db, call.function.name, json.loads(call.function.arguments))
            asked = asked or call.function.name == "run_query"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": shown[:600]})
    return 0.0


def is_right(said, task):
    """Whether a reply gives the answer and no other number, or name, but those of the question."""
    kind = r"\d+(?:\.\d+)?" if task["answer"][0].isdigit() else "|".join(NAMES.split())
    return set(re.findall(rf"\b(?:{kind})\b", said.replace(",", ""))) - set(re.findall(kind, task["question"])) == {task["answer"]}


# --- tasks ---

OWNERS = "farms clinics museums theatres garages bakeries schools harbours libraries studios hotels orchards depots kennels vineyards mills"
THINGS = "visits repairs orders lessons trips exhibits shipments rentals sales bookings harvests tests loans meals jobs tours"
AMOUNTS = "price weight minutes distance score cost volume points"
KINDS = "red blue green small large early late local foreign"
NAMES = "Ada Bruno Clara Dario Elif Farid Greta Hugo Ines Jonas Kira Luca Mara Nils Olga Pavel Rosa Sami Tilda Viktor"


def make_database(seed):
    """A database of two tables as SQL, and questions about it."""
    rng = random.Random(seed)
    owner, thing, amount = (rng.choice(words.split()) for words in (OWNERS, THINGS, AMOUNTS))
    key, names, kinds = f"{owner[:-1]}_id", rng.sample(NAMES.split(), rng.randint(4, 8)), rng.sample(KINDS.split(), 3)
    lines = [f"CREATE TABLE {owner} (id INTEGER, name TEXT, founded INTEGER);"]
    lines.append(f"CREATE TABLE {thing} (id INTEGER, {key} INTEGER, kind TEXT, {amount} INTEGER);")
    lines += [f"INSERT INTO {owner} VALUES ({n}, '{name}', {rng.randint(1900, 2020)});" for n, name in enumerate(names, 1)]
    for n in range(1, rng.randint(15, 40)):
        lines.append(f"INSERT INTO {thing} VALUES ({n}, {rng.randint(1, len(names))}, '{rng.choice(kinds)}', {rng.randint(1, 99)});")
    name, kind, join = rng.choice(names), rng.choice(kinds), f"{thing} t JOIN {owner} o ON t.{key} = o.id"
    questions = {
        f"How many {thing} of kind {kind} are there?": f"SELECT COUNT(*) FROM {thing} WHERE kind = '{kind}'",
        f"What is the total {amount} of the {thing} of the {owner[:-1]} named {name}?": f"SELECT COALESCE(SUM(t.{amount}), 0) FROM {join} WHERE o.name = '{name}'",
        f"Which of the {owner} has the most {thing}? Give its name; among equals the first by name.": f"SELECT o.name FROM {join} GROUP BY o.id ORDER BY COUNT(*) DESC, o.name LIMIT 1",
        f"How many {owner} were founded after 1960 and have {thing} of kind {kind}?": f"SELECT COUNT(DISTINCT o.id) FROM {join} WHERE o.founded > 1960 AND t.kind = '{kind}'",
        f"What is the largest {amount} of {thing} of kind {kind}?": f"SELECT MAX({amount}) FROM {thing} WHERE kind = '{kind}'",
    }
    return "\n".join(lines), rng.sample(sorted(questions.items()), 3)


if __name__ == "__main__":
    with open(sys.argv[1], "w") as file:
        for seed in range(400):
            sql, questions = make_database(seed)
            db = sqlite3.connect(":memory:")
            db.executescript(sql)
            for question, query in questions:
                (answer,) = db.execute(query).fetchone()
                file.write(json.dumps({"id": f"database {seed}", "question": question, "sql": sql, "answer": str(answer)}) + "\n")
