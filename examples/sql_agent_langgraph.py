"""The SQL agent as a LangGraph graph: the framework's own agent and tools, and the address of the episode as its base_url. Nothing else is Tether's.

pip install langgraph langchain-openai
python sql_agent.py tasks.jsonl
tether train --agent sql_agent_langgraph:agent --tasks tasks.jsonl --model path/to/model --steps 50 --out runs/sql-langgraph
"""

import sqlite3

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent
from sql_agent import SYSTEM, is_right, run_tool


async def agent(task, llm):
    """Play one task; returns 1 for the right answer."""
    db = sqlite3.connect(":memory:", check_same_thread=False)  # LangGraph calls tools in threads
    db.executescript(task["sql"])
    db.execute("PRAGMA query_only = ON")
    asked = []

    @tool
    def list_tables() -> str:
        """List the tables of the database."""
        return run_tool(db, "list_tables", {})

    @tool
    def describe_table(table: str) -> str:
        """Show the columns of a table and its first rows."""
        return run_tool(db, "describe_table", {"table": table})[:600]

    @tool
    def run_query(query: str) -> str:
        """Run a SELECT query and show its rows."""
        asked.append(query)
        return run_tool(db, "run_query", {"query": query})[:600]

    model = ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=llm.api_key, max_tokens=200)
    graph = create_react_agent(model, [list_tables, describe_table, run_query], prompt=SYSTEM)
    try:
        state = await graph.ainvoke({"messages": [("user", task["question"])]}, {"recursion_limit": 12})
    except GraphRecursionError:  # it asked its tools until the end
        return 0.0
    return float(bool(asked) and is_right(str(state["messages"][-1].content), task))
