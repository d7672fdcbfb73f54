"""The smallest agent that learns: one question about a frozen lake, and a reward for going down. On two CPU cores, with the embedded model, a minute.

    python first_agent.py            # trains; then: tether report runs/first-agent

The reward is no skill; it shows within five steps that what your program returns is what the model becomes.
"""

import httpx

import tether


async def agent(task, llm):
    """Ask for one move; those that begin with Down earn 1."""
    lake = tether.make_env("frozen_lake")
    messages = [{"role": "system", "content": lake.instructions}, {"role": "user", "content": lake.reset(task["seed"]).text}]
    async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
        request = {"model": llm.model, "messages": messages, "stop": ["</answer>"]}
        reply = await client.post(f"{llm.base_url}/chat/completions", json=request)
    said = reply.raise_for_status().json()["choices"][0]["message"]["content"]
    return float(said.rpartition("<answer>")[2].strip().startswith("Down"))


def train(out, steps=5):
    return tether.train(
        agent=agent,
        tasks=[{"seed": seed} for seed in range(300)],
        model="tiny",
        steps=steps,
        out=out,
        rollout={"num_groups": 4, "group_size": 8, "max_tokens": 40},
        learner={"learning_rate": 3e-4, "update_batch": 16},
        evaluation={"prompts": 24, "every": steps},
    )


if __name__ == "__main__":
    success = train("runs/first-agent").metrics("validation/success")
    print(f"replies that go down: {success[0]:.0%} before, {success[5]:.0%} after")
