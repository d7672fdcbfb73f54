"""An agent that learns on two CPU cores in three minutes: a loop over httpx that plays FrozenLake with the embedded model.

    python frozen_lake_agent.py                      # trains, then says what changed

The lake is Tether's own, played here as any simulator of yours would be: the loop shows its text, takes the reply, and returns the reward.
"""

import httpx

import tether

TASKS = [{"id": str(seed), "seed": seed} for seed in range(2000)]


async def agent(task, llm):
    """Play one lake; returns 1 if the goal is reached."""
    lake = tether.make_env("frozen_lake")
    messages = [{"role": "system", "content": lake.instructions}, {"role": "user", "content": lake.reset(task["seed"]).text}]
    async with httpx.AsyncClient(base_url=llm.base_url, trust_env=False, timeout=None) as client:
        while True:
            request = {"model": llm.model, "messages": messages, "stop": ["</answer>"]}
            reply = await client.post("/chat/completions", json=request)
            if reply.status_code == 400:  # the conversation is as long as it may get
                return 0.0
            message = reply.raise_for_status().json()["choices"][0]["message"]
            step = lake.step(message["content"].rpartition("<answer>")[2].strip())
            if step.done:
                return float(step.success)
            messages += [message, {"role": "user", "content": step.observation.text}]


def train(out, steps=12):
    return tether.train(
        agent=agent,
        tasks=TASKS,
        model="tiny",
        steps=steps,
        out=out,
        seed=0,
        algorithm={"name": "grpo"},
        rollout={"num_groups": 8, "group_size": 8, "max_tokens": 60},
        learner={"learning_rate": 1e-4, "update_batch": 16, "micro_tokens": 4096},
        evaluation={"prompts": 128, "every": steps},
        diagnosis={"every": steps},
    )


if __name__ == "__main__":
    train("runs/lake-agent")
