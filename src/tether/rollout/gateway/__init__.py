"""The gateway: agents that are programs of their own talk to the policy through it, as to any chat endpoint."""
